"""Benchmarks that run on the user's own machine; compare figures within one run only."""
