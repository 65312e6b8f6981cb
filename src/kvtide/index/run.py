"""A run: blocks of one prefix that have always been used together. The radix tree's node.

Invariant: the leading `held` of a run's blocks are held, the others are remembered only; a block is held only if the
blocks before it are, in its run and in all runs above.
"""

from __future__ import annotations

from typing import Any

from kvtide.types import BlockKey

__all__ = ["Run"]


class Run:
    """Consecutive blocks `[start, start + len(keys))` of a prefix, in the tree of their namespace.

    Index and policies share it: the first group of fields belongs to the index, the second to the policy that the
    run's account uses. `uses` and `last_s`, `last_use` (a sequence number) tell of the latest use, set before the
    policy hears of it. `value` is the mean number of important tokens of its blocks.
    """

    __slots__ = (
        "account",
        "children",
        "held",
        "held_children",
        "is_candidate",
        "keys",
        "last_s",
        "last_use",
        "order",
        "parent",
        "start",
        "state",
        "tag",
        "tiers",
        "uses",
        "value",
    )

    def __init__(self, keys: list[BlockKey], parent: Run | None, start: int) -> None:
        self.keys = keys
        self.parent = parent
        self.start = start
        self.children: set[Run] = set()
        self.held = 0
        self.held_children = 0
        self.is_candidate = False
        self.account: Any = None
        self.tiers = bytearray(len(keys))
        self.uses = 0
        self.last_s = 0.0
        self.last_use = 0
        self.value = 1.0

        self.order = 0
        self.tag = 0
        self.state: Any = None

    @property
    def stop(self) -> int:
        """Return the position behind the last block."""
        return self.start + len(self.keys)
