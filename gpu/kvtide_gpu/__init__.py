"""Codecs on the device: kernels built at run time, and what calls them. Not measured on a GPU yet (docs/gpu.md)."""

from kvtide_gpu.pages import cuda_pages

__all__ = ["cuda_pages"]
