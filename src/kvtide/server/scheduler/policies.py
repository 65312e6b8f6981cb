"""The policies: two that send whole bodies (`fifo`, `lottery`) and two that share bytes by slices (`drr`, `vtc`)."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvtide.server.scheduler.base import Flow, Owner, SendPolicy

# Owners without anything to send of which a policy still knows something.
_LEFT_OWNERS_MAX = 1024
_CREDIT_SLICES = 8


class FifoPolicy(SendPolicy):
    """Whole bodies in order of arrival: what a server without a scheduler does."""

    has_slices = False

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the flow whose send came first."""
        return min(ready, key=lambda flow: flow.head().turn)


class LotteryPolicy(SendPolicy):
    """Whole bodies, drawn: the fewer requests of a client wait, the likelier it is.

    As in the report: take the number of requests that each client has waiting, invert each, softmax the list. What is a
    client there is an owner here. It counts requests, not bytes, and since the inverses lie in (0, 1], no one is more
    than e times likelier than another.
    """

    has_slices = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Draw a flow."""
        return self._rng.choices(ready, self.probabilities(ready))[0]

    @staticmethod
    def probabilities(ready: Sequence[Flow]) -> list[float]:
        """Return the softmax of the inverse numbers of waiting requests."""
        exponentials = [math.exp(1 / flow.waiting) for flow in ready]
        return [each / sum(exponentials) for each in exponentials]


class DrrPolicy(SendPolicy):
    """Deficit round robin (Shreedhar and Varghese 1995): at each visit a flow gets a quantum times its weight to send.

    A slice may overdraw what is left of it; the next visits pay. Between two flows that always have something to send,
    bytes by weight differ by a quantum and a slice at most.
    """

    has_slices = True

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        # What each flow may still send at this visit, the flow whose turn it is first.
        self._deficits: OrderedDict[Flow, float] = OrderedDict()
        self._left = _Left()

    def enter(self, flow: Flow) -> None:
        """Put the flow last, with one quantum less what it had overdrawn: debts are kept, claims are not."""
        self._deficits[flow] = self._quantum_bytes * flow.weight + min(0.0, self._left.pop(flow.owner, 0.0))

    def leave(self, flow: Flow) -> None:
        """Take the flow out of the round."""
        self._left.note(flow.owner, self._deficits.pop(flow))

    def charge(self, flow: Flow, size: int) -> None:
        """Take the bytes off what the flow may send."""
        self._deficits[flow] -= size

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the first flow in the round that has something left of its visit; those that don't end theirs."""
        can_send = set(ready)
        while True:
            for flow in [each for each in self._deficits if each in can_send]:
                if self._deficits[flow] > 0:
                    return flow
                self._deficits.move_to_end(flow)
                self._deficits[flow] += self._quantum_bytes * flow.weight


class VtcPolicy(SendPolicy):
    """Virtual token counter (Sheng et al. 2024) in bytes: the flow that got least by weight is next.

    A flow lags behind the highest counter that was served by `_CREDIT_SLICES` at most. So it loses nothing between two
    requests, and saves up no more than that while it has nothing to send or its readers stall. A flow that is ahead of
    the others stays so when it leaves and comes back. One that is new begins at that highest counter.
    """

    has_slices = True

    def __init__(self, slice_bytes: int) -> None:
        self._credit_bytes = float(_CREDIT_SLICES * slice_bytes)
        self._served: dict[Flow, float] = {}
        self._left = _Left()
        self._highest = 0.0

    def enter(self, flow: Flow) -> None:
        """Go on where the flow left, or begin at the highest counter."""
        self._served[flow] = self._left.pop(flow.owner, self._highest)

    def leave(self, flow: Flow) -> None:
        """Remember the counter."""
        self._left.note(flow.owner, self._served.pop(flow))

    def charge(self, flow: Flow, size: int) -> None:
        """Count the bytes, each at one over the weight."""
        self._served[flow] = self._counter(flow) + size / flow.weight

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the flow of least counter, the one that came first among equals."""
        flow = min(ready, key=self._counter)
        self._highest = max(self._highest, self._served[flow])
        return flow

    def _counter(self, flow: Flow) -> float:
        return max(self._served[flow], self._highest - self._credit_bytes / flow.weight)


class _Left(dict[Owner, float]):
    """What owners without anything to send had, the last `_LEFT_OWNERS_MAX` that left."""

    def note(self, owner: Owner, value: float) -> None:
        self[owner] = value
        if len(self) > _LEFT_OWNERS_MAX:
            del self[next(iter(self))]


POLICIES: Mapping[str, Callable[[int, random.Random], SendPolicy]] = MappingProxyType(
    {
        "fifo": lambda slice_bytes, rng: FifoPolicy(),
        "lottery": lambda slice_bytes, rng: LotteryPolicy(rng),
        "drr": lambda slice_bytes, rng: DrrPolicy(slice_bytes),
        "vtc": lambda slice_bytes, rng: VtcPolicy(slice_bytes),
    }
)


def policy_named(name: str, slice_bytes: int, rng: random.Random) -> SendPolicy:
    """Make a policy. ValueError for an unknown name; the message lists the known ones."""
    if name not in POLICIES:
        raise ValueError(f"unknown send policy {name!r}, expected one of {', '.join(POLICIES)}")
    return POLICIES[name](slice_bytes, rng)
