"""The order in which one holder's objects leave: what a tier asks when it needs room.

Invariant: an order knows exactly the objects that entered and did not leave; what it yields as a victim has left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvtide.clock import Clock
from kvtide.evict.ranking import RankedOrder, Ranking, ScoreRanking
from kvtide.types import BlockKey, Namespace, ObjectId

MayGo = Callable[[ObjectId], bool]


class EvictionOrder(Protocol):
    """Ranks what one tier holds. Called under the tier's lock, but for `note_request`, which comes from any thread."""

    @property
    def hears_requests(self) -> bool:
        """Tell whether `note_request` matters."""

    def note_request(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Note that a prompt asks for these blocks, all of its full ones from the first on."""

    def note_use(self, object_id: ObjectId) -> None:
        """Note that an object that is here was read."""

    def enter(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Rank an object that is here from now on. `parent`: the block before it, or its namespace."""

    def leave(self, object_id: ObjectId) -> None:
        """Forget an object that is here no more. One that never entered is ignored."""

    def wants(self, object_id: ObjectId) -> bool:
        """Tell whether to store an object for which others must leave. False: it is worth less than they are."""

    def admits(self, object_id: ObjectId, may_go: MayGo) -> bool:
        """Tell whether to copy an object up although something must leave for it."""

    def victims(self, may_go: MayGo) -> Generator[ObjectId]:
        """Yield what leaves next, for as long as the caller wants more; each one has left when it is yielded."""

    def __len__(self) -> int:
        """Return how many objects are here."""


# The order of memory, of this machine or a device, whose URL names none.
DEFAULT_POLICY = "frequency"


def order_named(name: str, clock: Clock, bytes_max: int, ranking: Ranking | None = None) -> EvictionOrder:
    """Return a new order by its name: `frequency` (uses that fade, times important tokens), `pool`, or a policy.

    ranking: what `frequency` ranks by, if somebody shares one. ValueError for an unknown name.
    """
    if name == "frequency":
        return RankedOrder(ranking or ScoreRanking(lambda object_id: 1.0))
    if name == "pool":
        from kvtide.evict.pool import PoolOrder

        return PoolOrder(clock)
    from kvtide.evict.policies import PolicyOrder, policy_named

    try:
        policy_of = policy_named(name)
    except ValueError as error:
        raise ValueError(f"{error}, frequency, pool") from None
    return PolicyOrder(policy_of, clock, bytes_max)
