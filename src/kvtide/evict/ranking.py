"""The order in which one holder's objects leave, and the default one: by last use, or by how often, and for what.

Invariant: an order knows exactly the objects that entered and did not leave; what it yields as a victim has left. A
rank falls only when an object is forgotten or its importance found again, so a heap of old ranks finds the lowest by
looking again at its top.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

from kvtide.evict.hint import Hint
from kvtide.types import BlockKey, Namespace, ObjectId

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# Objects whose uses are remembered, whether they are in a fast tier or not.
REMEMBERED_MAX = 1 << 18
# In uses of each remembered object. docs/benchmarks.md has the others that were tried.
SCORE_HALF_LIFE = 1.0

# The number of important tokens in a block, as a probe found them; 1.0 for each token of a block that nobody looked at
# is as good as any other constant, since only the order counts.
Importance = Callable[[ObjectId], float]
MayGo = Callable[[ObjectId], bool]
# Of each group whose parts stand alone, such as a hybrid model's states, the part of each block, there or not.
States = Sequence[Sequence[ObjectId]]


class Recent(OrderedDict[_Key, _Value]):
    """The entries that were set last, `count_max` at most; reading one does not keep it. Not thread-safe."""

    def __init__(self, count_max: int) -> None:
        super().__init__()
        self._count_max = count_max

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._count_max:
            self.popitem(last=False)


# Score and number of the last use, compared in this order.
Rank = tuple[float, int]


class _Uses(NamedTuple):
    """`weight_log2` is the logarithm of the sum of the uses' weights."""

    times: int
    tick: int
    weight_log2: float


_NO_USES = _Uses(0, 0, -math.inf)


class Ranking:
    """Remembers uses and ranks objects by them, most used first (LFU). Safe to use from several threads.

    With `half_life`, a use counts half after so many uses of each object that is remembered.

    Ranks must not fall by themselves, so new uses weigh more instead of old ones less: twice as much each half-life.
    """

    def __init__(self, half_life: float | None = None) -> None:
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life must be positive, got {half_life}")
        self._lock = threading.Lock()
        self._half_life = half_life
        self._uses: Recent[ObjectId, _Uses] = Recent(REMEMBERED_MAX)
        self._tick = 0
        self._age = 0.0

    def note_use(self, object_id: ObjectId) -> int:
        """Note a use."""
        with self._lock:
            self._tick += 1
            if self._half_life is not None:
                self._age += 1 / (self._half_life * max(1, len(self._uses)))
            old = self._uses.get(object_id, _NO_USES)
            low, high = sorted((old.weight_log2, self._age))
            self._uses[object_id] = _Uses(old.times + 1, self._tick, high + math.log2(1 + 2.0 ** (low - high)))
            return old.times + 1

    def rank(self, object_id: ObjectId) -> Rank:
        """Return the rank now."""
        with self._lock:
            uses = self._uses.get(object_id, _NO_USES)
        return self._score(object_id, uses), uses.tick

    def _score(self, object_id: ObjectId, uses: _Uses) -> float:
        return uses.weight_log2


class RecencyRanking(Ranking):
    """Last used first (LRU)."""

    def _score(self, object_id: ObjectId, uses: _Uses) -> float:
        return float(uses.tick)


class ScoreRanking(Ranking):
    """Uses times important tokens, highest first (IMPRESS, FAST '25). Uses fade, as sessions drift; None: never."""

    def __init__(self, importance: Importance, half_life: float | None = SCORE_HALF_LIFE) -> None:
        super().__init__(half_life)
        self._importance = importance

    def _score(self, object_id: ObjectId, uses: _Uses) -> float:
        important_tokens = self._importance(object_id)
        return uses.weight_log2 + math.log2(important_tokens) if important_tokens > 0 else -math.inf


class EvictionOrder:
    """Ranks what one tier holds. Called under the tier's lock, but for `note_request`, which comes from any thread."""

    def note_request(
        self, namespace: Namespace, keys: Sequence[BlockKey], hint: Hint | None = None, states: States = ()
    ) -> bool:
        """Note that a prompt asks for these blocks, all of its full ones from the first on. True if it takes advice.

        A session's latest request once more, as its last one, is no use but the session's end, said afterwards.
        """
        return False

    def note_use(self, object_id: ObjectId) -> None:
        """Note that an object that is here was read."""
        raise NotImplementedError

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object that is here from now on. `parent`: the block before it, or its namespace."""
        raise NotImplementedError

    def leave(self, object_id: ObjectId) -> None:
        """Forget an object that is here no more. One that never entered is ignored."""
        raise NotImplementedError

    def wants(self, object_id: ObjectId) -> bool:
        """Tell whether to store an object for which others must leave. False: it is worth less than they are."""
        return True

    def admits(self, object_id: ObjectId, may_go: MayGo) -> bool:
        """Tell whether to copy an object up although something must leave for it; by default what is wanted."""
        return self.wants(object_id)

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        """Yield what leaves next, for as long as the caller wants more; each one has left when it is yielded."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return how many objects are here."""
        raise NotImplementedError


class RankedOrder(EvictionOrder):
    """By rank of single objects, lowest first. The ranking may be shared; whoever shares it tells it of uses."""

    def __init__(self, ranking: Ranking | None = None) -> None:
        """ranking: the default is by last use, and this order's own."""
        self._is_mine = ranking is None
        self._ranking = ranking or RecencyRanking()
        self._members: set[ObjectId] = set()
        # One item for each member, and some of members that left.
        self._heap: list[tuple[Rank, ObjectId]] = []

    def __len__(self) -> int:
        return len(self._members)

    def note_use(self, object_id: ObjectId) -> None:
        """Note a read, unless the owner of a shared ranking does."""
        if self._is_mine:
            self._ranking.note_use(object_id)

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object; storing it is its first use."""
        assert object_id not in self._members
        self.note_use(object_id)
        self._members.add(object_id)
        heapq.heappush(self._heap, (self._ranking.rank(object_id), object_id))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(self._ranking.rank(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def leave(self, object_id: ObjectId) -> None:
        self._members.discard(object_id)

    def _ascending(self) -> Iterator[ObjectId]:
        """Yield the members, lowest rank first; those yielded stay members. None may enter meanwhile."""
        seen: dict[ObjectId, Rank] = {}
        try:
            while self._heap:
                rank, member = heapq.heappop(self._heap)
                if member not in self._members or member in seen:
                    continue
                now = self._ranking.rank(member)
                if now > rank:
                    heapq.heappush(self._heap, (now, member))
                else:
                    seen[member] = rank
                    yield member
        finally:
            for member, rank in seen.items():
                heapq.heappush(self._heap, (rank, member))

    def admits(self, object_id: ObjectId, may_go: MayGo) -> bool:
        """Tell whether the lowest that may go is worth less."""
        lowest = next(filter(may_go, self._ascending()), None)
        return lowest is not None and self._ranking.rank(lowest) < self._ranking.rank(object_id)

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        for object_id in filter(may_go, self._ascending()):
            self._members.discard(object_id)
            yield object_id
