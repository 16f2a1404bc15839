"""Benchmarks of the real tier actors."""
