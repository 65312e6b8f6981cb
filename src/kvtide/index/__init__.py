"""The index: which blocks are known and which are in use. It knows keys, never bytes."""

from kvtide.index.base import Index, Match
from kvtide.index.flat import FlatIndex

__all__ = ["FlatIndex", "Index", "Match"]
