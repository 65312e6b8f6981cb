"""What the cache asks of an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvtide.types import BlockKey, Namespace

_Edge = tuple[Namespace, BlockKey]


class Rebuild:
    """The blocks of a listing, in any order, as chains that an index can insert. `listed` counts them, each once."""

    def __init__(self, records: Iterable[ListedBlock]) -> None:
        self._children: defaultdict[_Edge, set[BlockKey]] = defaultdict(set)
        for namespace, key, parent in records:
            self._children[namespace, parent].add(key)
        self.listed = sum(map(len, self._children.values()))

    def chains(self) -> Iterator[tuple[Namespace, BlockKey, list[BlockKey]]]:
        """Yield (namespace, parent, chain), parents before their children; blocks that hang nowhere are left out. Once.

        A chain is as long as its blocks have one child each.
        """
        children = self._children
        pending = [edge for edge in children if bytes(edge[0]) == edge[1]]
        while pending:
            namespace, parent = pending.pop()
            for key in children.pop((namespace, parent)):
                chain = [key]
                while len(children.get((namespace, chain[-1]), ())) == 1:
                    chain += children.pop((namespace, chain[-1]))
                yield namespace, parent, chain
                if (namespace, chain[-1]) in children:
                    pending.append((namespace, chain[-1]))


class Match(NamedTuple):
    """The longest leading run of held blocks; `tier_blocks[t]` of them are in tier `t` without a gap from the first.

    `tiers` has a byte for each block, whose bit `t` says that it is in tier `t`.
    """

    blocks: tuple[BlockKey, ...]
    tier_blocks: tuple[int, ...]
    tiers: bytes


class ListedBlock(NamedTuple):
    """One block as a tier lists it: enough to hang it into the tree."""

    namespace: Namespace
    key: BlockKey
    parent: BlockKey


class RestoreReport(NamedTuple):
    """What a rebuild found: blocks that hang together from their namespace on, and those that don't."""

    blocks: int
    orphans: int


class IndexStats(NamedTuple):
    """What an index holds, remembers and protects now."""

    held_blocks: int
    known_blocks: int
    pinned_blocks: int


class Index(Protocol):
    """Knows which blocks exist and protects those in use. Safe to use from several threads.

    `keys` are always chained: each names the prefix that ends with the one before.
    """

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Find the longest leading run of held blocks.

        Does not modify the index. The result may be evicted at any time unless pinned. No keys gives an empty match.
        """

    def insert(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tier: int = 0,
        *,
        cost: float | None = None,
    ) -> list[BlockKey]:
        """Note a use of a prefix and make the blocks of `keys` known in a tier; return those that had to go for them.

        `parent` is the key before the first one; None or the namespace itself for a prefix from its beginning. A
        chain whose parent is not held is not inserted: nothing could match it. `cost` is what recomputing one of the
        blocks costs beside a prompt's first; None leaves it to the index. ValueError if the keys are no chain, or for a
        cost that is not positive.
        """

    def restore(self, records: Iterable[ListedBlock], tier: int = 0) -> RestoreReport:
        """Make known what a tier lists, in any order."""

    def place(self, key: BlockKey, tier: int) -> None:
        """Note that a held block is in a tier too; not a use. Blocks that are not held are ignored."""

    def remove(self, key: BlockKey, tier: int | None = None) -> list[BlockKey]:
        """Drop a block from one tier or from all; if none has it then, all blocks below go too.

        Returns what was dropped, deepest first. Unknown blocks are ignored. A pin outlives it.
        """

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction, once more for each call; they need not be known yet."""

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Take one pin of each block back. AssertionError if one has none."""

    def is_pinned(self, key: BlockKey) -> bool:
        """Tell whether a block is protected from eviction."""

    def check(self) -> None:
        """AssertionError if the index contradicts itself."""
