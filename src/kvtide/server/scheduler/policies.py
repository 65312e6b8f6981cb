"""Units of scheduling, and policies that say whose turn it is.

A **send** is one response body on its way to one client, a **slice** the part of it that holds a send slot, a **flow**
all that one owner has to send: a tenant, or a client's address on a server that asks nobody for a token. Policies
choose between flows and never see clients: connections do not buy a share.
Two policies send whole bodies (`fifo`, `lottery`), two share bytes by slices (`drr`, `vtc`).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

# Owners without anything to send of which a policy still knows something.
_LEFT_OWNERS_MAX = 1024
_CREDIT_SLICES = 8


class Owner(NamedTuple):
    """A sharer of the send slots: a tenant, or an address where nobody shows a token."""

    tenant: str
    address: str = ""


@dataclass(slots=True, eq=False)
class Send:
    """One body to send. The scheduler changes it; others read it.

    `turn` orders the sends of an owner: its arrival, and after each slice the next free number, so that they rotate.
    """

    owner: Owner
    client: str
    size: int
    priority: int
    enqueued_s: float
    turn: int
    started_s: float | None = None
    ended_s: float | None = None
    sent_bytes: int = 0
    is_in_flight: bool = False
    is_cancelled: bool = False

    @property
    def tenant(self) -> str:
        """The tenant whose body it is; empty where nobody shows a token."""
        return self.owner.tenant

    @property
    def wait_s(self) -> float:
        """Seconds from `enqueue` to the first slice. Only after that."""
        assert self.started_s is not None
        return self.started_s - self.enqueued_s

    @property
    def unsent_bytes(self) -> int:
        """Bytes that are still to be sent, those in flight included."""
        return self.size - self.sent_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Bytes `[offset, offset + size)` of a send that may go out now. Holds a slot until `finish`."""

    send: Send
    offset: int
    size: int


class Flow:
    """One owner's sends that wait. Lives from its first send until it has none left.

    A client's sends keep their order and one of them is under way at a time, so that bodies never mix on a connection.
    """

    def __init__(self, owner: Owner, weight: float) -> None:
        self.owner = owner
        self.weight = weight
        self.in_flight = 0
        self.sends = 0
        # Each client's sends, oldest first.
        self.queues: dict[str, deque[Send]] = {}
        # The oldest send of each client that has no slice in flight.
        self._heads: dict[str, Send] = {}

    @property
    def waiting(self) -> int:
        """Sends without a slice in flight."""
        return self.sends - self.in_flight

    @property
    def unsent_bytes(self) -> int:
        """Bytes of all sends that are still to be sent."""
        return sum(send.unsent_bytes for queue in self.queues.values() for send in queue)

    @property
    def is_ready(self) -> bool:
        """True if some client could be sent to."""
        return bool(self._heads)

    def head(self) -> Send:
        """Return the send to go on with: highest priority first, then in turn. Only when ready."""
        return min(self._heads.values(), key=lambda send: (-send.priority, send.turn))

    def add(self, send: Send) -> None:
        """Queue a send after its client's others."""
        self.sends += 1
        self.queues.setdefault(send.client, deque()).append(send)
        self._refresh(send.client)

    def remove(self, send: Send) -> None:
        """Drop a send that is done or cancelled and not in flight."""
        assert not send.is_in_flight
        self.sends -= 1
        self.queues[send.client].remove(send)
        if not self.queues[send.client]:
            del self.queues[send.client]
        self._refresh(send.client)

    def start(self, send: Send) -> None:
        """Note that a slice of the head is in flight."""
        assert self._heads[send.client] is send
        send.is_in_flight = True
        self.in_flight += 1
        self._refresh(send.client)

    def stop(self, send: Send) -> None:
        """Note that its slice is not in flight any more."""
        assert send.is_in_flight
        send.is_in_flight = False
        self.in_flight -= 1
        self._refresh(send.client)

    def _refresh(self, client: str) -> None:
        queue = self.queues.get(client)
        if queue and not queue[0].is_in_flight:
            self._heads[client] = queue[0]
        else:
            self._heads.pop(client, None)

    def check(self) -> None:
        """Assert that counts and heads are what the queues say."""
        sends = [send for queue in self.queues.values() for send in queue]
        assert self.sends == len(sends) > 0
        assert self.in_flight == sum(send.is_in_flight for send in sends)
        assert all(not send.is_in_flight for queue in self.queues.values() for send in list(queue)[1:])
        heads = {client: queue[0] for client, queue in self.queues.items() if not queue[0].is_in_flight}
        assert self._heads == heads


class SendPolicy(ABC):
    """Chooses whose turn it is. Knows flows from `enter` to `leave`; weights are theirs."""

    # Whether bodies are cut into slices; without, a body is one slice.
    has_slices: bool

    @abstractmethod
    def pick(self, ready: Sequence[Flow]) -> Flow:
        """Return one of the flows that could send now, never none."""

    def enter(self, flow: Flow) -> None:  # noqa: B027  (most policies have nothing to note)
        """Note that an owner that had nothing to send has something now."""

    def leave(self, flow: Flow) -> None:  # noqa: B027
        """Note that an owner has nothing left to send."""

    def charge(self, flow: Flow, size: int) -> None:  # noqa: B027
        """Note that so many bytes of a flow have been granted, or, if negative, were granted and not sent."""


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
        self._left = _Absent()

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
        self._left = _Absent()
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


class _Absent(dict[Owner, float]):
    """Credits of owners without anything to send, the last `_LEFT_OWNERS_MAX` that left."""

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
