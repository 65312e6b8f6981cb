"""Benchmarks. Each module has `run(quick) -> result` and `render(result)`; the command line adds machine and commit."""
