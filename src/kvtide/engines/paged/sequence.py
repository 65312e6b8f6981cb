"""One request's tokens as blocks: refs of a growing sequence, and which of them have been taken care of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtide.engines.paged.orders import BlockRef
from kvtide.keys import KeyChain, NamespaceSpec
from kvtide.outcomes import Decided
from kvtide.types import BlockKey, Namespace, ObjectId

SALTS_MAX = 1024


class Namespaces:
    """Namespaces of a model's shards, by the salt that a request carries besides the connector's own."""

    def __init__(self, specs: Callable[[bytes], Sequence[NamespaceSpec]]) -> None:
        self._specs = specs
        self._known: OrderedDict[bytes, tuple[Namespace, ...]] = OrderedDict()

    def of(self, salt: bytes) -> tuple[Namespace, ...]:
        """Return one namespace for each shard."""
        found = self._known.get(salt)
        if found is None:
            found = tuple(spec.digest() for spec in self._specs(salt))
            self._known[salt] = found
            if len(self._known) > SALTS_MAX:
                self._known.popitem(last=False)
        return found


class TrackedSequence:
    """The blocks of a request. Its tokens may only grow."""

    def __init__(self, namespaces: tuple[Namespace, ...], block_tokens: int) -> None:
        self._namespaces = namespaces
        self._block_tokens = block_tokens
        self._chains = [KeyChain(namespace, block_tokens) for namespace in namespaces]
        self._blocks: list[BlockRef] = []
        self._parents = tuple(BlockKey(namespace) for namespace in namespaces)
        self._tokens = 0
        # Blocks that were stored, ordered to be, or found stored.
        self.settled = 0
        # A request whose load has failed is not made to wait for a second one.
        self.may_load = True
        # Whether copies of this machine won't do.
        self.is_latest = False
        # Where it is streamed: until when, by the clock, and at which quality.
        self.stream: tuple[float, float | None] | None = None
        # The first of its blocks that came rougher than the store has it: what is computed on top is not stored.
        self.rough_from: int | None = None
        # Where its last load began.
        self.loaded_from = 0
        # What was decided, and counted, about what is not loaded.
        self.counted: set[Decided] = set()
        # What the engine had computed itself when it last asked for a match.
        self.computed_tokens = 0

    @property
    def tokens(self) -> int:
        """Return how many tokens are known of it."""
        return self._tokens

    def blocks(self, tokens: Sequence[int]) -> list[BlockRef]:
        """Return the full blocks of `tokens`, which start with all tokens given before. Don't change the list."""
        if len(tokens) // self._block_tokens > len(self._blocks):
            fresh = list(tokens[self._tokens :])
            self._tokens = len(tokens)
            for keys in zip(*(chain.extend(fresh) for chain in self._chains), strict=True):
                ids = tuple(ObjectId(namespace, key) for namespace, key in zip(self._namespaces, keys, strict=True))
                self._blocks.append(BlockRef(ids, self._parents, len(self._blocks) * self._block_tokens))
                self._parents = keys
        return self._blocks
