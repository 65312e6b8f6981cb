"""What is scheduled, and what the scheduler asks of a policy.

A **send** is one response body on its way to one client, a **slice** the part of it that holds a send slot, a **flow**
all that one owner has to send: a tenant, or a client's address on a server that asks nobody for a token. Policies
choose between flows and never see clients: connections do not buy a share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Owner(NamedTuple):
    """Who shares the send slots: a tenant, or an address where nobody shows a token and `tenant` tells nobody apart."""

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
    """What one owner has to send. Lives from its first send until it has none left.

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
        """Whether some client could be sent to."""
        return bool(self._heads)

    def head(self) -> Send:
        """Return the send to go on with: highest priority first, then in turn. Only when ready."""
        return min(self._heads.values(), key=lambda send: (-send.priority, send.turn))

    def add(self, send: Send) -> None:
        """Queue a send behind its client's others."""
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
