"""The policies: two that send whole bodies (`fifo`, `lottery`) and two that share bytes by slices (`drr`, `vtc`)."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvtide.server.scheduler.base import Flow, SendPolicy

__all__ = ["POLICIES", "DrrPolicy", "FifoPolicy", "LotteryPolicy", "VtcPolicy", "policy_named"]

# Tenants without anything to send whose counter `VtcPolicy` still knows.
_LEFT_TENANTS_MAX = 1024
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
    client there is a tenant here. It counts requests, not bytes, and since the inverses lie in (0, 1], no one is more
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
    """Deficit round robin (Shreedhar and Varghese 1995): at each visit a flow may send a quantum times its weight.

    Between two flows that always have something to send, bytes by weight differ by one quantum and one slice at most.
    """

    has_slices = True

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        # What each flow may still send at this visit, the flow whose turn it is first.
        self._deficits: OrderedDict[Flow, float] = OrderedDict()

    def enter(self, flow: Flow) -> None:
        """Put the flow last, with one quantum: nothing is saved up from before."""
        self._deficits[flow] = self._quantum_bytes * flow.weight

    def leave(self, flow: Flow) -> None:
        """Forget the flow and what it may still have sent."""
        del self._deficits[flow]

    def charge(self, flow: Flow, size: int) -> None:
        """Take the bytes off what the flow may send."""
        self._deficits[flow] -= size

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the first flow in the round that may send its next slice; those that may not end their visit."""
        can_send = set(ready)
        while True:
            for flow in [each for each in self._deficits if each in can_send]:
                if self._deficits[flow] >= min(self._quantum_bytes, flow.head().unsent_bytes):
                    return flow
                self._deficits.move_to_end(flow)
                self._deficits[flow] += self._quantum_bytes * flow.weight


class VtcPolicy(SendPolicy):
    """Virtual token counter (Sheng et al. 2024) in bytes: the flow that got least by weight is next.

    A flow that comes back after it had nothing to send is lifted to the floor, the highest counter that was served, so
    that it can't claim what it did not ask for; one that is above keeps its debt. A flow whose clients were all busy
    lags behind the floor by `_CREDIT_SLICES` at most, so that a reader that stalls saves nothing up either.
    """

    has_slices = True

    def __init__(self, slice_bytes: int) -> None:
        self._credit = float(_CREDIT_SLICES * slice_bytes)
        self._served: dict[Flow, float] = {}
        # Counters of tenants that left, oldest first.
        self._left: dict[str, float] = {}
        self._floor = 0.0

    def enter(self, flow: Flow) -> None:
        """Lift the flow to the floor."""
        self._served[flow] = max(self._left.pop(flow.tenant, 0.0), self._floor)

    def leave(self, flow: Flow) -> None:
        """Remember the counter in case that it comes back before the others have caught up."""
        self._left[flow.tenant] = self._served.pop(flow)
        if len(self._left) > _LEFT_TENANTS_MAX:
            del self._left[next(iter(self._left))]

    def charge(self, flow: Flow, size: int) -> None:
        """Count the bytes, each at one over the weight."""
        lagging_at_most = self._floor - self._credit / flow.weight
        self._served[flow] = max(self._served[flow], lagging_at_most) + size / flow.weight

    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return the flow of least counter, the one that came first among equals."""
        flow = min(ready, key=self._served.__getitem__)
        self._floor = max(self._floor, self._served[flow])
        return flow


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
