"""The codec `tide-1` (docs/codec.md)."""

from kvtide.codec.tide.chunked import ChunkedTide
from kvtide.codec.tide.codec import DEFAULT_QUALITY, DEFAULT_REFINEMENTS, TideCodec
from kvtide.codec.tide.encoder import APART_TOKENS
from kvtide.codec.tide.grid import THIRD
from kvtide.codec.tide.section import Steps

__all__ = ["APART_TOKENS", "DEFAULT_QUALITY", "DEFAULT_REFINEMENTS", "THIRD", "ChunkedTide", "Steps", "TideCodec"]
