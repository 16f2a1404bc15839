"""Benchmarks that run on the user's own machine; their results are ratios within one run."""
