"""Kernels for GPUs, compiled at run time, and their callers: codecs, pages. Measured in docs/benchmarks/gpu.md."""
