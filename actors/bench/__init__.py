"""Benchmarks that need the real actors."""
