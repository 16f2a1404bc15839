"""Measures of a running server that no load generator takes: what each way to it costs, and what requests share."""
