"""Codecs: block to sections and back. Codecs know blocks, not tiers."""

from kvtide.codec.base import Codec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.raw import RawCodec
from kvtide.codec.registry import CodecRegistry, default_registry

__all__ = ["Codec", "CodecRegistry", "LosslessCodec", "RawCodec", "default_registry"]
