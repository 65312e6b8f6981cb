"""The codec `tide-1` (docs/codec.md)."""

from kvtide.codec.tide.codec import TideCodec
from kvtide.codec.tide.coding import APART_TOKENS
from kvtide.codec.tide.fit import (
    COSTS,
    AllRows,
    Moments,
    TideCounts,
    draft_profiles,
    finished_profile,
    is_staged,
    joined_draft,
)
from kvtide.codec.tide.grid import THIRD
from kvtide.codec.tide.model import EXCESS_MAX
from kvtide.codec.tide.section import Steps

__all__ = [
    "APART_TOKENS",
    "COSTS",
    "EXCESS_MAX",
    "THIRD",
    "AllRows",
    "Moments",
    "Steps",
    "TideCodec",
    "TideCounts",
    "draft_profiles",
    "finished_profile",
    "is_staged",
    "joined_draft",
]
