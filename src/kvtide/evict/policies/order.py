"""An order by a policy over prefixes: the same policies, on the same tree, as `kvtide-lab sim trace` replays."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.evict.hint import TENANTS_MAX, Hint
from kvtide.evict.policies.reuse import AdvisedPolicy
from kvtide.evict.ranking import EvictionOrder, MayGo, Recent, States
from kvtide.index import USUAL_SIZE, EvictionPolicy, RadixIndex
from kvtide.types import BlockKey, Namespace, ObjectId

_log = logging.getLogger(__name__)

# Objects whose mean size says how many fit, and how far the plan may be off.
_COUNT_MIN = 16
_PLAN_SLACK = 1.25
# Each object moves its namespace's size by this part of the difference; less of a difference than this is none.
_RATE = 1 / 16
_ALIKE = 1.1


class Sizes:
    """Bytes of objects, all together and by namespace; the first one has the usual size. Not thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._of: dict[ObjectId, int] = {}
        self.used_bytes = 0
        self._usual_bytes = 0
        # Means of the namespaces heard of lately.
        self._means: Recent[Namespace, float] = Recent(TENANTS_MAX)

    def enter(self, object_id: ObjectId, size: int) -> int:
        """Note an object that is here from now on; return its size as an index takes it."""
        self._of[object_id] = size
        self.used_bytes += size
        self._usual_bytes = self._usual_bytes or max(1, size)
        mean = self._means.get(object_id.namespace, float(size))
        self._means[object_id.namespace] = mean + _RATE * (size - mean)
        return self.measured(size)

    def leave(self, object_id: ObjectId) -> None:
        """Note that an object is here no more; one that did not enter is ignored."""
        self.used_bytes -= self._of.pop(object_id, 0)

    def fitting(self, planned_blocks: int) -> int:
        """Return how many objects of the mean size fit; what is planned if that is about as many, or few are here."""
        if len(self._of) < _COUNT_MIN or not self.used_bytes:
            return planned_blocks
        blocks = max(1, self._bytes_max * len(self._of) // self.used_bytes)
        return planned_blocks if 1 / _PLAN_SLACK <= blocks / planned_blocks <= _PLAN_SLACK else blocks

    def of(self, namespace: Namespace) -> int:
        """Return the size that a namespace's next blocks will have; of one not heard of, as large as the mean."""
        mean = self._means.get(namespace, self.used_bytes / max(1, len(self._of)))
        return self.measured(mean) if mean else USUAL_SIZE

    def measured(self, size: float) -> int:
        """Return the size of an object of so many bytes, as an index takes it."""
        share = size / self._usual_bytes
        return USUAL_SIZE if 1 / _ALIKE < share < _ALIKE else max(1, round(USUAL_SIZE * share))


# Links of states that may come, those of the latest prompts.
LINKS_MAX = 1 << 14


class _Link(NamedTuple):
    """The state's block, the deepest state of its prompt before it, and whether a prompt ended there."""

    block: BlockKey
    before: ObjectId | None
    is_end: bool


class LinkedStates:
    """The states that are here, by block, and those that may come. Not thread-safe: its order locks."""

    def __init__(self) -> None:
        self._announced: Recent[ObjectId, _Link] = Recent(LINKS_MAX)
        self._links: dict[ObjectId, _Link] = {}
        self._of: dict[BlockKey, list[ObjectId]] = {}
        self._superseded: set[ObjectId] = set()

    def __contains__(self, state: ObjectId) -> bool:
        return state in self._links

    def announce(self, keys: Sequence[BlockKey], states: Sequence[ObjectId]) -> None:
        """Link the states that a prompt may leave, one a block, to its blocks."""
        before = None
        for block, state in zip(keys, states, strict=True):
            if state in self._links:
                before = state
            else:
                self._announced[state] = _Link(block, before, block == keys[-1])

    def block_of(self, state: ObjectId) -> BlockKey | None:
        """Return the block of a state that is announced or here; None for an object that no prompt named."""
        link = self._links.get(state) or self._announced.get(state)
        return None if link is None else link.block

    def enter(self, state: ObjectId) -> ObjectId | None:
        """Note that an announced state is here; return the one that it supersedes, if it does."""
        link = self._links[state] = self._announced.pop(state)
        self._of.setdefault(link.block, []).append(state)
        before = link.before
        if before is None or before in self._superseded or before not in self._links or not self._links[before].is_end:
            return None
        self._superseded.add(before)
        return before

    def use(self, state: ObjectId) -> None:
        """Note a read of a state that is here. One that was superseded is where prompts branch: it stays."""
        if state in self._superseded:
            self._superseded.remove(state)
            self._links[state] = self._links[state]._replace(is_end=False)

    def leave(self, state: ObjectId) -> None:
        """Note that a state is not here any more; it may come back."""
        link = self._links.pop(state)
        self._of[link.block].remove(state)
        if not self._of[link.block]:
            del self._of[link.block]
        self._superseded.discard(state)
        self._announced[state] = link

    def of(self, block: BlockKey) -> Sequence[ObjectId]:
        """Return the states of a block that are here."""
        return self._of.get(block, ())

    def current_of(self, block: BlockKey) -> list[ObjectId]:
        """Return those of them that are not superseded."""
        return [state for state in self.of(block) if state not in self._superseded]


def insert_chain(
    index: RadixIndex, namespace: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None, size: int
) -> list[BlockKey]:
    """Note a use of a prefix; return what had to go. Keys that are no chain have none: their objects leave first."""
    try:
        return index.insert(namespace, keys, parent, size=size)
    except ValueError as error:
        _log.debug("no prefix: %s", error)
        return []


# Makes a policy for an account that may hold so many blocks.
PolicyOf = Callable[[int], EvictionPolicy]

# Sessions of each tenant whose ends are known.
SESSIONS_MAX = 256
# Blocks of requests that are remembered until their objects come.
ANNOUNCED_MAX = 1 << 16
# The same request again within this time is an engine that asks twice.
ASKED_TWICE_S = 0.5


class PolicyOrder(EvictionOrder):
    """By a policy over prefixes (`evict.policies`): blocks leave from the ends of prefixes, as the policy ranks these.

    A request is one use of its whole prefix, also of blocks whose objects are only about to come: those have a place
    from the request on, and what must go for them loses its own: objects then, which leave when room is needed, or
    blocks of that request, which are refused when they come. Objects whose prefix is not here leave first too.
    States that a request names leave just before their block, or first if another one is in their place.
    Room is bytes: where objects of different namespaces differ in size, worth is told by the byte.
    """

    def __init__(self, policy_of: PolicyOf, clock: Clock, bytes_max: int, blocks_max: int | None = None) -> None:
        """blocks_max: how many objects fit, for policies that plan with it; by default as their sizes say."""
        self._policy_of = policy_of
        self._clock = clock
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self._tree: RadixIndex | None = None
        self._advised: AdvisedPolicy | None = None
        # The end of the latest request of each session, by namespace and name.
        self._session_ends: Recent[Namespace, Recent[str, BlockKey]] = Recent(TENANTS_MAX)
        self._parents: dict[ObjectId, BlockKey] = {}
        self._sizes = Sizes(bytes_max)
        # How many objects the tree has room for, if that goes by their sizes.
        self._planned_blocks: int | None = None
        # The object that the tree's block is. Of two namespaces with one key it is that of the newest.
        self._blocks: dict[BlockKey, ObjectId] = {}
        # Objects that the tree does not hold: the first ones leave first.
        self._orphans: OrderedDict[ObjectId, None] = OrderedDict()
        # Of these, by the block that they follow, those that entered before it.
        self._waiting: dict[BlockKey, set[ObjectId]] = {}
        self._announced: OrderedDict[BlockKey, None] = OrderedDict()
        self._states = LinkedStates()
        # Namespaces for which somebody tells of requests, the last ones.
        self._told: Recent[Namespace, None] = Recent(TENANTS_MAX)
        # The end of the latest request, and when it came.
        self._latest: tuple[BlockKey, float] | None = None
        if blocks_max is not None:
            self._tree = self._planted(blocks_max)

    def __len__(self) -> int:
        return len(self._parents)

    def _planted(self, blocks_max: int) -> RadixIndex:
        policy = self._policy_of(blocks_max)
        self._advised = policy if isinstance(policy, AdvisedPolicy) else None
        return RadixIndex(self._clock, lambda _: policy, blocks_max)

    def note_request(
        self, namespace: Namespace, keys: Sequence[BlockKey], hint: Hint | None = None, states: States = ()
    ) -> bool:
        """Note a use of a prefix; the end of a session whose latest request it was is none."""
        with self._lock:
            for group in states:
                self._link(keys, group)
            # Before the first object nothing can leave.
            if self._tree is None or not keys:
                return False
            now_s, before = self._clock.monotonic_s(), self._latest
            self._latest = (keys[-1], now_s)
            self._told[namespace] = None
            is_known = before is not None and before[0] == keys[-1] and now_s - before[1] < ASKED_TWICE_S
            if hint is not None and hint.session is not None:
                ends = self._session_ends[namespace] = self._session_ends.get(namespace) or Recent(SESSIONS_MAX)
                is_known |= ends.get(hint.session) == keys[-1] and hint.is_last
                ends[hint.session] = keys[-1]
            policy, mark = self._advised, 0 if hint is None else hint.mark
            ignored = policy.trust.ignored if policy is not None else 0
            if policy is not None and mark:
                policy.hear(mark)
            if not is_known:
                self._use(self._tree, namespace, keys, None)
                self._announced.update(dict.fromkeys(keys))
            elif hint is not None:
                self._tree.advise(keys[-1])
            if policy is not None and mark:
                policy.hear(0)
            while len(self._announced) > ANNOUNCED_MAX:
                self._announced.popitem(last=False)
            return hint is not None and policy is not None and policy.trust.ignored == ignored

    def _link(self, keys: Sequence[BlockKey], states: Sequence[ObjectId]) -> None:
        """Link a prompt's states to its blocks, also those that came before anybody named them."""
        here = [state for state in states if state in self._parents and state not in self._states]
        self._states.announce(keys, states)
        for state in here:
            # Of a prompt of more blocks than links are kept for, the first ones are not linked.
            if self._states.block_of(state) is not None:
                parent = self._parents[state]
                self.leave(state)
                self._enter_state(state, parent)

    def _enter_state(self, state: ObjectId, parent: BlockKey) -> None:
        self._parents[state] = parent
        superseded = self._states.enter(state)
        if superseded is not None:
            self._orphans[superseded] = None
        if not self._has_place(state):
            self._orphans[state] = None

    def _has_place(self, state: ObjectId) -> bool:
        """Tell whether the block is held to which a state is linked."""
        block = self._states.block_of(state)
        return block is not None and self._tree is not None and self._tree.is_held(block)

    def _use(self, tree: RadixIndex, namespace: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        if evicted := insert_chain(tree, namespace, keys, parent, self._sizes.of(namespace)):
            self._orphan(evicted)
        # Objects of blocks that are held now are orphans no more, nor are those that came before the block ahead.
        held = [key for key in keys if tree.is_held(key)] if self._orphans else []
        for key in held:
            if key in self._blocks:
                self._orphans.pop(self._blocks[key], None)
            for state in self._states.current_of(key):
                self._orphans.pop(state, None)
            for child in self._waiting.pop(key, ()):
                if child in self._orphans:
                    size = self._sizes.of(child.namespace)
                    self._orphan(insert_chain(tree, child.namespace, [child.key], key, size))
                    if tree.is_held(child.key):
                        held.append(child.key)

    def _orphan(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            for state in self._states.of(key):
                self._orphans[state] = None
            if key in self._blocks:
                self._orphans[self._blocks[key]] = None

    def note_use(self, object_id: ObjectId) -> None:
        """Note a read of a namespace for which nobody tells of requests, such as that of states, which stand alone."""
        with self._lock:
            parent = self._parents.get(object_id)
            if object_id in self._states:
                self._states.use(object_id)
                if self._has_place(object_id):
                    self._orphans.pop(object_id, None)
            elif parent is None or self._tree is None or object_id.namespace in self._told:
                return
            elif object_id in self._orphans:
                self._orphans.move_to_end(object_id)
            else:
                self._use(self._tree, object_id.namespace, [object_id.key], parent)

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object; one that no request announced is one of its own."""
        with self._lock:
            key, tree = object_id.key, self._tree
            if self._states.block_of(object_id) is not None:
                # Its size does not tell how many blocks fit.
                self._enter_state(object_id, parent)
                return
            if tree is None:
                self._planned_blocks = max(1, self._bytes_max // max(1, size))
                tree = self._tree = self._planted(self._planned_blocks)
            if key in self._blocks:
                self._orphans[self._blocks[key]] = None
            self._parents[object_id] = parent
            self._blocks[key] = object_id
            if key in self._announced:
                # It had its use with the request. If it lost its place since, it has none now.
                del self._announced[key]
            elif not tree.is_held(key):
                self._use(tree, object_id.namespace, [key], parent)
                if not tree.is_held(key):
                    self._waiting.setdefault(parent, set()).add(object_id)
            if not tree.is_held(key):
                self._orphans[object_id] = None
            if self._planned_blocks is not None:
                tree.measure(key, self._sizes.enter(object_id, size))
                fitting = self._sizes.fitting(self._planned_blocks)
                if fitting != self._planned_blocks:
                    self._planned_blocks = fitting
                    tree.plan(fitting)

    def leave(self, object_id: ObjectId) -> None:
        """Forget an object; those after it in its prefix stay, as objects without one."""
        with self._lock:
            if object_id not in self._parents or not self._forget(object_id) or self._tree is None:
                return
            # What lost its place before stays remembered: policies learn from those that come back.
            if self._tree.is_held(object_id.key):
                # Deepest first: the first to leave is the end of its prefix.
                self._orphan(self._tree.remove(object_id.key))

    def _forget(self, object_id: ObjectId) -> bool:
        """Drop what is known of an object; tell whether it was its block's."""
        parent = self._parents.pop(object_id)
        self._sizes.leave(object_id)
        self._orphans.pop(object_id, None)
        if object_id in self._states:
            self._states.leave(object_id)
            return False
        if parent in self._waiting:
            self._waiting[parent].discard(object_id)
            if not self._waiting[parent]:
                del self._waiting[parent]
        is_block = self._blocks.get(object_id.key) == object_id
        if is_block:
            del self._blocks[object_id.key]
        return is_block

    def wants(self, object_id: ObjectId) -> bool:
        """Refuse what was announced and has lost its place since: it is worth less than what is here."""
        with self._lock:
            if self._states.block_of(object_id) is not None:
                return self._tree is None or self._has_place(object_id)
            return self._tree is None or object_id.key not in self._announced or self._tree.is_held(object_id.key)

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        """Yield what has no place in the tree, then what the policy gives up, from the ends of prefixes."""
        pinned: list[BlockKey] = []
        try:
            while (object_id := self._next(may_go, pinned)) is not None:
                yield object_id
        finally:
            with self._lock:
                if self._tree is not None:
                    self._tree.unpin(pinned)

    def _next(self, may_go: MayGo, pinned: list[BlockKey]) -> ObjectId | None:
        with self._lock:
            victim = next((each for each in self._orphans if may_go(each)), None)
            while victim is None and self._tree is not None and (keys := self._tree.victims(1)):
                # Without an object it was announced and did not come yet: it is not to come any more.
                found = self._blocks.get(keys[0])
                self._orphan(keys)
                if found is None or may_go(found):
                    victim = next((each for each in (*self._states.of(keys[0]), found) if each and may_go(each)), None)
                else:
                    # In use: as good as used now, and passed over for this time.
                    self._use(self._tree, found.namespace, keys, self._parents[found])
                    self._tree.pin(keys)
                    pinned += keys
            if victim is not None:
                self._forget(victim)
            return victim
