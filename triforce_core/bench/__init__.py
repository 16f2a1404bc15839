"""Benchmarks: commands that measure on the user's own machine, in ratios within one run."""
