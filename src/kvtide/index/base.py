"""What the cache asks of an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtide.types import BlockKey

__all__ = ["Index", "Match"]


class Match(NamedTuple):
    """The longest leading run of known blocks."""

    blocks: tuple[BlockKey, ...]


class Index(Protocol):
    """Knows which blocks exist and protects those in use. Safe to use from several threads."""

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find the longest leading run of known blocks.

        Does not modify the index. The result may be evicted at any time unless pinned. No keys gives an empty match.
        """

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """Make blocks known. Known ones stay as they are."""

    def remove(self, key: BlockKey) -> None:
        """Forget a block; unknown ones are ignored. A pin outlives it."""

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction, once more for each call."""

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take one pin of each block back. AssertionError if one has none."""

    def is_pinned(self, key: BlockKey) -> bool:
        """Tell whether a block is protected from eviction."""

    def check(self) -> None:
        """AssertionError if the index contradicts itself."""
