"""Codecs: block to sections and back. Codecs know blocks, not tiers."""

from kvtide.codec.base import Codec, EmbeddedCodec, LayeredCodec, layer_section_ids, sections_by_layer
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.packed import PackedBase, PackedCodec, chunk_bits, put_chunk
from kvtide.codec.profile import PROFILE_BYTES_MAX, Profile
from kvtide.codec.registry import CodecRegistry
from kvtide.codec.tide import TideCodec

__all__ = [
    "PROFILE_BYTES_MAX",
    "Codec",
    "CodecRegistry",
    "EmbeddedCodec",
    "LayeredCodec",
    "LosslessCodec",
    "PackedBase",
    "PackedCodec",
    "Profile",
    "TideCodec",
    "chunk_bits",
    "layer_section_ids",
    "put_chunk",
    "sections_by_layer",
]
