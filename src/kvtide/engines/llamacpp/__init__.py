"""Prefix caching for llama.cpp, through llama-cpp-python: `attach` a model, or set a `KVTideCache`."""

from kvtide.engines.llamacpp.cached import CachedLlama, attach
from kvtide.engines.llamacpp.door import KVTideCache
from kvtide.engines.llamacpp.server import serve_model

__all__ = ["CachedLlama", "KVTideCache", "attach", "serve_model"]
