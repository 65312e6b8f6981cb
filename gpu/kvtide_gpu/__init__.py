"""Kernels for GPUs, compiled at run time, and their callers: codecs, pages. No device has run them (docs/gpu.md)."""
