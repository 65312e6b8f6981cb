"""Blocks as a tier lists them, in any order, put together into chains again.

Invariant: a chain comes after the one that it hangs below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtide.types import BlockKey, Namespace

_Edge = tuple[Namespace, BlockKey]


class ListedBlock(NamedTuple):
    """One block as a tier lists it: enough to hang it into the tree."""

    namespace: Namespace
    key: BlockKey
    parent: BlockKey


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
