"""Codecs: block to sections and back. Codecs know blocks, not tiers."""

from kvtide.codec.base import Codec, EmbeddedCodec, LayeredCodec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.packed import PackedBase, PackedCodec
from kvtide.codec.profile import Profile
from kvtide.codec.published.cachegen import CachegenCodec
from kvtide.codec.published.chunkwise import ChunkwiseCodec
from kvtide.codec.raw import RawCodec
from kvtide.codec.registry import CodecRegistry, CodecSpec
from kvtide.codec.tide import TideCodec

__all__ = [
    "CachegenCodec",
    "ChunkwiseCodec",
    "Codec",
    "CodecRegistry",
    "CodecSpec",
    "EmbeddedCodec",
    "LayeredCodec",
    "LosslessCodec",
    "PackedBase",
    "PackedCodec",
    "Profile",
    "RawCodec",
    "TideCodec",
]
