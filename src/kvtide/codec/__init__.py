"""Codecs: block to sections and back. Codecs know blocks, not tiers. The registry imports one when it is named."""

from kvtide.codec.base import (
    ByteReader,
    Codec,
    EmbeddedCodec,
    LayeredCodec,
    LevelledCodec,
    OrderingCodec,
    layer_section_ids,
    sections_by_layer,
)
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.profile import PROFILE_BYTES_MAX, Profile
from kvtide.codec.registry import AwaitingCodec, CodecRegistry, ProfileShape, PromisingCodec

__all__ = [
    "PROFILE_BYTES_MAX",
    "AwaitingCodec",
    "ByteReader",
    "Codec",
    "CodecRegistry",
    "EmbeddedCodec",
    "LayeredCodec",
    "LevelledCodec",
    "LosslessCodec",
    "OrderingCodec",
    "Profile",
    "ProfileShape",
    "PromisingCodec",
    "layer_section_ids",
    "sections_by_layer",
]
