"""Policies that take advice, and whom they believe.

Invariant: a tenant whose sessions go on after their announced ends is not believed until fewer of them do.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtide.evict.hint import LAST, TENANTS_MAX
from kvtide.index import EvictionPolicy
from kvtide.types import Namespace

# Counts of a tenant's announcements are halved beyond this many: what was long ago fades.
_SAID_MAX = 64
# A tenant is believed while at most this share of its ends, beside a few, turned out wrong.
_BROKEN_SHARE_MAX = 0.25
_BROKEN_GRANTED = 2


class Trust:
    """Compares what tenants announce with what their sessions do."""

    def __init__(self) -> None:
        # Pieces of advice that came, and those of them that were not believed.
        self.heard = self.ignored = 0
        # Ends that were announced, and those after which the session went on.
        self._ends: OrderedDict[Namespace, tuple[float, float]] = OrderedDict()

    def believed(self, tenant: Namespace, mark: int) -> int:
        """Note a mark; return it, or 0 if its tenant is not believed."""
        if not mark:
            return 0
        self.heard += 1
        said, broken = self._ends.pop(tenant, (0.0, 0.0))
        is_liar = broken > _BROKEN_GRANTED + _BROKEN_SHARE_MAX * said
        said += mark == LAST
        if said > _SAID_MAX:
            said, broken = said / 2, broken / 2
        self._ends[tenant] = said, broken
        if len(self._ends) > TENANTS_MAX:
            self._ends.popitem(last=False)
        self.ignored += is_liar
        return 0 if is_liar else mark

    def note_next_turn(self, tenant: Namespace, announced: int) -> None:
        """Note that a session went on whose latest request had this mark, believed or not."""
        if announced == LAST and tenant in self._ends:
            said, broken = self._ends[tenant]
            self._ends[tenant] = said, broken + 1


class AdvisedPolicy(EvictionPolicy):
    """A policy that takes advice. `trust` says whom it believes."""

    def __init__(self) -> None:
        self.trust = Trust()
        self._mark = 0

    def hear(self, mark: int) -> None:
        """Take a mark as that of the uses and of the advice that come from now on; 0 for requests without advice."""
        self._mark = mark
