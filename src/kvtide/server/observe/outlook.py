"""What a server knows of the servers around it: its pool's members, its centre or its regions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from kvtide.clock import Clock
from kvtide.server.member import Member
from kvtide.server.regions import Region
from kvtide.tier.pool import PoolServer

_PROBE_S_MAX = 1.0
# Members that are looked at; of a larger pool every server shows its first ones.
MEMBERS_MAX = 64


class MemberStatus(msgspec.Struct, frozen=True):
    """One server of the pool; `share` of the slots is its, at any rank. `is_up` says whether it takes connections."""

    name: str
    address: str
    weight: float
    share: float
    is_here: bool
    is_up: bool | None


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool's map as this server has it."""

    epoch: int
    replicas: int
    members: list[MemberStatus]


class RegionStatus(msgspec.Struct, frozen=True):
    """A region and its centre, or a centre (`is_centre`), of which the other figures are nothing.

    `behind_s` is how long ago all that the centre wrote was known here, None if it never was.
    """

    is_centre: bool
    behind_s: float | None
    waiting_objects: int
    sent_objects: int
    sent_bytes: int
    given_up_objects: int


class Outlook:
    """Looks around. Runs on the event loop."""

    def __init__(self, member: Member | None, region: Region | None, clock: Clock) -> None:
        self._member = member
        self._region = region
        self._clock = clock
        self._up: dict[str, bool] = {}

    async def look(self) -> None:
        """Find out which members of the pool take connections."""
        servers = self._servers()
        found = await asyncio.gather(*(_is_up(server.address) for server in servers))
        self._up = {server.name: is_up for server, is_up in zip(servers, found, strict=True)}

    def _servers(self) -> Sequence[PoolServer]:
        placement = self._member.placement if self._member is not None else None
        return placement.map.servers[:MEMBERS_MAX] if placement is not None else ()

    def pool(self) -> PoolStatus | None:
        """Return the pool; None for a server of none, or without a map."""
        placement = self._member.placement if self._member is not None else None
        if self._member is None or placement is None:
            return None
        slots = placement.map.slots
        members = [
            MemberStatus(
                server.name,
                server.origin,
                server.weight,
                len(placement.slots_of(position)) / slots,
                server.name == self._member.name,
                self._up.get(server.name),
            )
            for position, server in enumerate(self._servers())
        ]
        return PoolStatus(placement.map.epoch, placement.replicas, members)

    def region(self) -> RegionStatus | None:
        """Return what is known of other regions; None for a server without any."""
        region = self._region
        if region is None:
            return None
        sync, as_of_s = region.synchroniser, region.as_of_s()
        behind_s = None if as_of_s is None else max(0.0, self._clock.wall_s() - as_of_s)
        if region.central is None or sync is None:
            return RegionStatus(True, None, 0, 0, 0, 0)
        return RegionStatus(False, behind_s, sync.waiting, sync.sent_objects, sync.sent_bytes, sync.given_up)


async def _is_up(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S_MAX):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
