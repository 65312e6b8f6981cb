"""A run: blocks of one prefix that have always been used together. The radix tree's node.

Invariant: the leading `held` of a run's blocks are held, the others are remembered only; a block is held only if the
blocks before it are, in its run and in all runs above.
"""

from __future__ import annotations

from typing import Any

from kvtide.types import BlockKey

# A block's attention costs as much as its matrices once this many blocks come before it (16k tokens of 256 a block,
# the order of magnitude of today's 8B models).
BLOCKS_OF_EQUAL_COST = 64


class Run:
    """Consecutive blocks `[start, start + len(keys))` of a prefix, in the tree of their namespace.

    Index and policies share it: the first group of fields belongs to the index, the second to the policy that the
    run's account uses. `uses` and `last_s`, `last_use` (a sequence number) tell of the latest use, set before the
    policy hears of it. `value` is the mean number of important tokens of its blocks, `given_cost` what recomputing one
    of them costs if somebody said so.
    """

    __slots__ = (
        "account",
        "children",
        "given_cost",
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
        self.given_cost: float | None = None

        self.order = 0
        self.tag = 0
        self.state: Any = None

    @property
    def cost(self) -> float:
        """Return what recomputing one of its held blocks costs; if not given, by its position, a prompt's first 1."""
        if self.given_cost is not None:
            return self.given_cost
        return 1 + (self.start + self.held / 2) / BLOCKS_OF_EQUAL_COST

    def may_grow(self, depth: int, account: Any) -> bool:
        """Tell whether blocks behind `depth` share this run's history: stored one by one, used by nobody since."""
        return (
            self.uses == 1
            and self.stop == depth
            and self.held == len(self.keys)
            and not self.children
            and self.account is account
            and not account.policy.splits_tail
        )

    def note_cost(self, cost: float | None, blocks: int) -> None:
        """Take the cost of blocks that are about to be added; the given one is the mean over all, if all gave one."""
        if cost is not None and self.given_cost is not None:
            self.given_cost += blocks / (len(self.keys) + blocks) * (cost - self.given_cost)

    @property
    def stop(self) -> int:
        """Return the position behind the last block."""
        return self.start + len(self.keys)
