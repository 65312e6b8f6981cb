"""kvtide: prefill once, reuse anywhere. A KV-cache layer for LLM serving. Importing this package does nothing."""

__all__ = ["__version__"]

__version__ = "0.1.0"
