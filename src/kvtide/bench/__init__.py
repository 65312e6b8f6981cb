"""Benchmarks as functions: each has `run`, which returns a result with rows, and `table`, which shows it to people."""
