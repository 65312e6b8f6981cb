"""Codecs: block to sections and back. Codecs know blocks, not tiers. The registry imports one when it is named."""

from kvtide.codec.base import Codec, EmbeddedCodec, LayeredCodec, LevelledCodec, layer_section_ids, sections_by_layer
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.profile import PROFILE_BYTES_MAX, Profile
from kvtide.codec.registry import CodecRegistry

__all__ = [
    "PROFILE_BYTES_MAX",
    "Codec",
    "CodecRegistry",
    "EmbeddedCodec",
    "LayeredCodec",
    "LevelledCodec",
    "LosslessCodec",
    "Profile",
    "layer_section_ids",
    "sections_by_layer",
]
