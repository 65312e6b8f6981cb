"""An order by a policy over prefixes: the same policies, on the same tree, as `kvtide-lab sim trace` replays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.index import Policy, RadixIndex
from kvtide.types import BlockKey, Namespace, ObjectId

# Makes a policy for an account that may hold so many blocks.
PolicyOf = Callable[[int], Policy]

# Blocks of requests that are remembered until their objects come.
ANNOUNCED_MAX = 1 << 16


class _Member(NamedTuple):
    object_id: ObjectId
    parent: BlockKey


class PolicyOrder:
    """By a policy over prefixes (`evict.policies`): blocks leave from the ends of prefixes, as the policy ranks these.

    A request is one use of its whole prefix, also of blocks whose objects are only about to come: those have a place
    from the request on, so that a policy that finds them worth less than all others refuses them. Objects whose
    prefix is not here leave before all others, the one that entered first.
    """

    def __init__(self, policy_of: PolicyOf, clock: Clock, bytes_max: int, blocks_max: int | None = None) -> None:
        """blocks_max: how many objects fit, for policies that plan with it; by default as many as the first one."""
        self._policy_of = policy_of
        self._clock = clock
        self._bytes_max = bytes_max
        self._blocks_max = blocks_max
        self._lock = threading.RLock()
        self._tree: RadixIndex | None = None
        self._members: dict[BlockKey, _Member] = {}
        # Members that the tree does not hold, those that entered first first.
        self._orphans: OrderedDict[BlockKey, None] = OrderedDict()
        self._announced: OrderedDict[BlockKey, None] = OrderedDict()
        # The end of the latest request; the same again is somebody who asks twice.
        self._latest: BlockKey | None = None
        if blocks_max is not None:
            self._tree = self._planted(blocks_max)

    def __len__(self) -> int:
        return len(self._members)

    def _planted(self, blocks_max: int) -> RadixIndex:
        # Blocks that were announced and never came must not fill the memory: the tree has a bound of its own.
        return RadixIndex(self._clock, lambda _: self._policy_of(blocks_max), 2 * blocks_max + ANNOUNCED_MAX)

    def note_request(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Note a use of a prefix."""
        with self._lock:
            # Before the first object nothing can leave.
            if self._tree is None or not keys or keys[-1] == self._latest:
                return
            self._latest = keys[-1]
            self._use(self._tree, namespace, keys, None)
            self._announced.update(dict.fromkeys(keys))
            while len(self._announced) > ANNOUNCED_MAX:
                self._announced.popitem(last=False)

    def _use(self, tree: RadixIndex, namespace: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        for gone in tree.insert(namespace, keys, parent):
            if gone in self._members:
                self._orphans[gone] = None
        for key in keys if self._orphans else ():
            if key in self._orphans and tree.is_held(key):
                del self._orphans[key]

    def note_use(self, object_id: ObjectId) -> None:
        """Note a read, where nobody tells of requests."""
        with self._lock:
            member = self._members.get(object_id.key)
            if member is None or self._tree is None or self._latest is not None:
                return
            if object_id.key in self._orphans:
                self._orphans.move_to_end(object_id.key)
            else:
                self._use(self._tree, object_id.namespace, [object_id.key], member.parent)

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object; one that no request announced is one of its own."""
        with self._lock:
            tree = self._tree
            if tree is None:
                tree = self._tree = self._planted(max(1, self._bytes_max // max(1, size)))
            self._members[object_id.key] = _Member(object_id, parent)
            self._announced.pop(object_id.key, None)
            if not tree.is_held(object_id.key):
                self._use(tree, object_id.namespace, [object_id.key], parent)
            if not tree.is_held(object_id.key):
                self._orphans[object_id.key] = None

    def leave(self, object_id: ObjectId) -> None:
        """Forget an object; those behind it in its prefix stay, as objects without one."""
        with self._lock:
            key = object_id.key
            if self._members.pop(key, None) is None or self._tree is None:
                return
            self._orphans.pop(key, None)
            # Deepest first: the first to leave is the end of its prefix.
            for gone in self._tree.remove(key):
                if gone in self._members:
                    self._orphans[gone] = None

    def wants(self, object_id: ObjectId) -> bool:
        """Refuse what was announced and has lost its place since: it is worth less than what is here."""
        with self._lock:
            return self._tree is None or object_id.key not in self._announced or self._tree.is_held(object_id.key)

    def admits(self, object_id: ObjectId, may_go: Callable[[ObjectId], bool]) -> bool:
        """Admit what is wanted."""
        return self.wants(object_id)

    def victims(self, may_go: Callable[[ObjectId], bool]) -> Generator[ObjectId]:
        """Yield what the policy gives up, from the ends of prefixes; first what has no prefix here."""
        pinned: list[BlockKey] = []
        try:
            while (member := self._next(may_go, pinned)) is not None:
                yield member.object_id
        finally:
            with self._lock:
                if self._tree is not None:
                    self._tree.unpin(pinned)

    def _next(self, may_go: Callable[[ObjectId], bool], pinned: list[BlockKey]) -> _Member | None:
        with self._lock:
            for key in self._orphans:
                if may_go(self._members[key].object_id):
                    del self._orphans[key]
                    return self._members.pop(key)
            while self._tree is not None and (keys := self._tree.victims(1)):
                member = self._members.get(keys[0])
                if member is None:
                    # Announced, and did not come yet: it is not to come any more.
                    continue
                if may_go(member.object_id):
                    return self._members.pop(keys[0])
                # In use: as good as used now, and passed over for this time.
                self._use(self._tree, member.object_id.namespace, keys, member.parent)
                self._tree.pin(keys)
                pinned += keys
            return None
