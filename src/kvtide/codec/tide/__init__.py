"""The codec `tide-1` (docs/codec.md)."""

from kvtide.codec.tide.codec import DEFAULT_QUALITY, DEFAULT_REFINEMENTS, TideCodec

__all__ = ["DEFAULT_QUALITY", "DEFAULT_REFINEMENTS", "TideCodec"]
