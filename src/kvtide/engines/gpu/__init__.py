"""Codecs on the device: kernels built at run time, and what calls them. Not measured on a GPU yet (docs/gpu.md)."""
