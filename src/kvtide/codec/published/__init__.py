"""Baselines: the codecs that papers describe, CacheGen and chunkwise quantising, and the fit of their profiles."""

from kvtide.codec.published.cachegen import CachegenCodec, ChunkwiseCodec, ProfileFitter
from kvtide.codec.published.integers import coder_named
from kvtide.codec.published.snippet import SnippetCodec

__all__ = ["CachegenCodec", "ChunkwiseCodec", "ProfileFitter", "SnippetCodec", "coder_named"]
