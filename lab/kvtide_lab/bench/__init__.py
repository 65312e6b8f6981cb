"""Benchmarks: each `run` returns a result of rows; the command line adds machine and commit."""
