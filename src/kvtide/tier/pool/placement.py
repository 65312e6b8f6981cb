"""Placement of blocks on a pool's servers: every client and server computes it alike, without asking anybody.

A key falls into a slot; the servers are ranked for the slot by weighted rendezvous hashing, and the first `replicas` of
them own it. Invariant: adding or removing a server moves only what it gets or had; maps with one epoch are equal.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.tier.base import host_and_port
from kvtide.types import BlockKey

SLOTS = 1 << 14
SLOTS_MAX = 1 << 22
SERVERS_MAX = 1 << 14
_NAME_MAX = 256
_WORD = (1 << 64) - 1

Table = NDArray[np.uint16]
Words = NDArray[np.uint64]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_NAME_MAX)]


class PlacementKind(StrEnum):
    """The way from a key to its servers. `mod`: the key modulo the number of servers."""

    RENDEZVOUS = "rendezvous"
    MOD = "mod"


class PoolServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server. `name` decides what it owns; clients on `host` use `socket_path`, others `address` by `scheme`.

    ValueError for an address that can't be one, so that a map with it is refused whole and never met half-way.
    """

    name: _Name
    address: _Name
    weight: float = 1.0
    host: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)] = ""
    socket_path: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)] = ""
    scheme: Literal["http", "https"] = "http"

    def __post_init__(self) -> None:
        host_and_port(self.address)
        # It refuses names in brackets and odd letters.
        urlsplit(self.origin)
        if self.socket_path and not self.socket_path.startswith("/"):
            raise ValueError(f"a socket's path begins with /, got {self.socket_path!r}")

    @property
    def origin(self) -> str:
        """Scheme and address, as URLs begin."""
        return f"{self.scheme}://{self.address}"


class PoolMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pool at one epoch. A larger epoch replaces a smaller one. ValueError for one that can't be used."""

    epoch: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    servers: tuple[PoolServer, ...]
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    slots: int = SLOTS
    kind: PlacementKind = PlacementKind.RENDEZVOUS

    def __post_init__(self) -> None:
        names = {server.name for server in self.servers}
        if not 0 < len(names) == len(self.servers) <= SERVERS_MAX:
            raise ValueError(f"a pool has 1 to {SERVERS_MAX} servers with different names, got {len(self.servers)}")
        if not all(math.isfinite(server.weight) and server.weight > 0 for server in self.servers):
            raise ValueError("the weights of a pool's servers are positive")
        if not 0 < self.slots <= SLOTS_MAX or self.slots & (self.slots - 1):
            raise ValueError(f"the number of slots is a power of two up to {SLOTS_MAX}, got {self.slots}")


def mix(words: Words) -> Words:
    """Scramble 64-bit words, one to one (splitmix64)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Placement:
    """A map made ready for look-ups."""

    def __init__(self, pool: PoolMap) -> None:
        self.map = pool
        self.replicas = min(pool.replicas, len(pool.servers))
        self._table = _ranked(pool, self.replicas) if pool.kind is PlacementKind.RENDEZVOUS else None

    def slot(self, key: BlockKey) -> int:
        """Return the slot of a key."""
        # What `mix` does to one word, without the price of an array.
        word = int.from_bytes(key[:8], "little")
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
        return (word ^ (word >> 31)) & (self.map.slots - 1)

    def owners(self, key: BlockKey) -> tuple[int, ...]:
        """Return the positions in `map.servers` of a key's servers, best first."""
        if self._table is not None:
            return tuple(self._table[self.slot(key)].tolist())
        return tuple(self.owners_of(np.frombuffer(key, "<u8", 1))[0].tolist())

    def owners_of(self, heads: Words) -> Table:
        """Return the owners of many keys, (keys, replicas). A key is its first eight bytes, little-endian."""
        if self._table is not None:
            return self._table[(mix(heads) & np.uint64(self.map.slots - 1)).astype(np.intp)]
        count = np.uint64(len(self.map.servers))
        first = heads[:, None] + np.arange(self.replicas, dtype=np.uint64)[None, :]
        return (first % count).astype(np.uint16)


def _ranked(pool: PoolMap, replicas: int) -> Table:
    """Return the best servers of each slot by weighted rendezvous hashing: (slots, replicas).

    One pass over the servers, so that thousands will do: past the first few, few slots have a place for another.
    """
    numbers = mix(np.arange(1, pool.slots + 1, dtype=np.uint64))
    table, best = np.zeros((replicas, pool.slots), np.uint16), np.full((replicas, pool.slots), -1.0)
    for position, server in enumerate(pool.servers):
        seed = np.uint64(int.from_bytes(hashlib.sha256(server.name.encode()).digest()[:8], "little"))
        # A share of 1 after rounding would have no logarithm to divide by.
        share = np.minimum((mix(numbers ^ seed).astype(np.float64) + 1) / 2**64, 1 - 2**-53)
        score = -server.weight / np.log(share)
        slots = np.flatnonzero(score > best[-1])
        score, owner = score[slots], np.full(len(slots), position, np.uint16)
        for rank in range(replicas):
            old_score, old_owner = best[rank, slots], table[rank, slots]
            is_better = score > old_score
            best[rank, slots] = np.where(is_better, score, old_score)
            table[rank, slots] = np.where(is_better, owner, old_owner)
            score, owner = np.where(is_better, old_score, score), np.where(is_better, old_owner, owner)
    return np.ascontiguousarray(table.T)
