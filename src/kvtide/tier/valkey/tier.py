"""Objects as strings of a Valkey or Redis server, or of a cluster of them: one key, one value, one owner.

Bodies go past redis-py, straight between the socket and the caller's memory. Invariant: an answer is used only if its
length is what the object's length and the caller's range give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Buffer, CountingTier, ObjectInfo, RangeRead, host_and_port
from kvtide.tier.valkey.nodes import FAULTS, ValkeyAddress, ValkeyNodes, parse_valkey_url
from kvtide.tier.valkey.resp import Refusal, pack_command
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

REDIRECTS_MAX = 5
SCAN_COUNT = 1000
# Shorter buffers are for headers and the like, before any object was seen.
_RANGE_BYTES = 64 << 10
_NAME = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})")
_BODY_COMMANDS = frozenset({b"GET", b"GETRANGE"})
_WRITES = frozenset({b"SET", b"UNLINK"})
# Answers of a server that can't serve now, or that no longer owns the key.
_STALE_MAP = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN"})


class ValkeyTier(CountingTier):
    """A tier on servers that others may use too: what it stores begins with the URL's prefix.

    The servers evict by their own `maxmemory-policy`. ValueError for a bad URL (nodes.py has its form).
    """

    name = "valkey"
    is_batched = can_replace = True

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__()
        target = parse_valkey_url(url)
        self._options = target.options
        self._shown = target.shown
        self._prefix = self._options.prefix.encode() + b":"
        self._nodes = ValkeyNodes(target, clock)
        self._clock = clock
        # A buffer that is longer than any object seen so far is for a whole object: the server sends that without
        # copying it first, as it must for a range.
        self._longest_bytes = _RANGE_BYTES
        self._evicted_before = 0

    def open(self) -> None:
        """Connect; a server that can't be reached now is tried again when somebody needs it."""
        self._nodes.open()
        self._evicted_before = self._counts()[3]

    def close(self) -> None:
        self._nodes.close()

    def contains(self, object_id: ObjectId) -> bool:
        return self._ask(object_id, [b"EXISTS"])[0] == 1

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read the object whole, or a range of it with its length in the same round trip."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        if offset == 0 and len(buffer) > self._longest_bytes:
            total = size = self._ask(object_id, [b"GET"], buffers=[buffer])[0]
        else:
            bounds = (b"%d" % offset, b"%d" % (offset + len(buffer) - 1)) if len(buffer) else (b"1", b"0")
            total, size = self._ask(object_id, [b"STRLEN"], [b"GETRANGE", *bounds], buffers=[buffer])
        expected = max(0, min(len(buffer), (total or 0) - offset))
        # An empty or shortened answer: the object is not here, or went away between the two commands.
        is_hit = bool(total) and size is not None and size >= expected
        self._longest_bytes = max(self._longest_bytes, total or 0)
        self._note(is_hit)
        return expected if is_hit else None

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        parts = [[b"GETRANGE", b"%d" % start, b"%d" % (start + len(buffer) - 1)] for start, buffer in ranges]
        total, *came = self._ask(object_id, [b"STRLEN"], *parts, buffers=[buffer for _, buffer in ranges])
        sizes = [max(0, min(len(buffer), (total or 0) - start)) for start, buffer in ranges]
        is_hit = bool(total) and all(got is not None and got >= size for got, size in zip(came, sizes, strict=True))
        self._note(is_hit)
        return sizes if is_hit else None

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask each owner once; objects of one that can't serve now are absent. TierUnavailable if no owner can."""
        owned: dict[ValkeyAddress, dict[ObjectId, bytes]] = {}
        for object_id in object_ids:
            key = self._key(object_id)
            owned.setdefault(self._nodes.owner(key), {})[object_id] = key
        present, problems = set[ObjectId](), list[TierUnavailable]()
        for address, keys in owned.items():
            try:
                replies = self._exchange(address, [(b"EXISTS", key) for key in keys.values()], False, ())
                for object_id, reply in zip(keys, replies, strict=True):
                    # A refusal says where to ask instead.
                    if reply == 1 or (isinstance(reply, Refusal) and self.contains(object_id)):
                        present.add(object_id)
            except TierUnavailable as error:
                problems.append(error)
                self._note_fault(error)
        if problems and len(problems) == len(owned):
            raise problems[0]
        return [object_id in present for object_id in object_ids]

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object unless it is here. TierFull if it is larger than the URL allows or the server full."""
        return self._put(object_id, buffer, b"NX")

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        return self._put(object_id, buffer, b"XX")

    def _put(self, object_id: ObjectId, buffer: Buffer, condition: bytes) -> bool:
        if len(buffer) > self._options.value_bytes_max:
            limit = self._options.value_bytes_max
            raise TierFull(f"{object_id} has {len(buffer)} bytes, a value of the valkey tier may have {limit}")
        if not len(buffer):
            return False
        expiry = [b"EX", b"%d" % self._options.ttl_s] if self._options.ttl_s else []
        # The length tells whether what is here already can be an object.
        is_set, _ = self._ask(object_id, [b"SET", buffer, condition, *expiry], [b"STRLEN"])
        return is_set is not None or condition == b"NX"

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        is_deleted = self._ask(object_id, [b"UNLINK"])[0] == 1
        if is_deleted:
            with self._lock:
                self._removals[object_id] = reason
        return is_deleted

    def _key(self, object_id: ObjectId) -> bytes:
        return self._prefix + object_id.namespace.hex().encode() + b":" + object_id.key.hex().encode()

    def _ask(
        self, object_id: ObjectId, *commands: Sequence[Buffer], buffers: Sequence[memoryview] = ()
    ) -> list[int | None]:
        """Send commands on one key to its owner, in one round trip, following redirections; return a reply to each.

        A command is its name and what comes after the key; strings in reply come into `buffers`. A key that holds no
        string is no object: it is removed, and the commands are sent again.
        """
        key = self._key(object_id)
        request = [(name, key, *rest) for name, *rest in commands]
        with self._faults_noted():
            owner = self._nodes.primary if commands[0][0] in _WRITES else self._nodes.owner
            address, is_asking = owner(key), False
            for _ in range(REDIRECTS_MAX):
                replies = self._exchange(address, request, is_asking, buffers)
                refusal = next((each for each in replies if isinstance(each, Refusal)), None)
                if refusal is None:
                    return [each for each in replies if not isinstance(each, Refusal)]
                if refusal.code == "WRONGTYPE":
                    self._exchange(address, [(b"UNLINK", key)], is_asking, ())
                    continue
                address, is_asking = self._redirected(refusal, address)
            raise TierUnavailable(f"{object_id}: redirected more than {REDIRECTS_MAX} times, to {address} at last")

    def _exchange(
        self,
        address: ValkeyAddress,
        request: Sequence[Sequence[Buffer]],
        is_asking: bool,
        buffers: Sequence[memoryview],
    ) -> list[int | Refusal | None]:
        with self._nodes.connection(address) as connection:
            asking = pack_command(b"ASKING") if is_asking else []
            connection.send([part for words in request for part in (*asking, *pack_command(*words))])
            replies, into = [], iter(buffers)
            for name, *_ in request:
                if is_asking:
                    connection.receive()
                replies.append(connection.receive(next(into) if name in _BODY_COMMANDS else None))
            return replies

    def _redirected(self, refusal: Refusal, address: ValkeyAddress) -> tuple[ValkeyAddress, bool]:
        """Return whom to ask instead, and whether with ASKING. TierUnavailable if the refusal is final."""
        if refusal.code == "MOVED" or refusal.code in _STALE_MAP:
            self._nodes.refresh_soon()
        words = refusal.text.split()
        if refusal.code in {"MOVED", "ASK"} and len(words) == 3:
            place = f"{address.host}{words[2]}" if words[2].startswith(":") else words[2]
            with suppress(ValueError):
                return ValkeyAddress(*host_and_port(place)), refusal.code == "ASK"
        kind = TierFull if refusal.code == "OOM" else TierUnavailable
        raise kind(f"{address}: {refusal.text}")

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is stored under the prefix, server by server. Not for the hot path: it walks all keys."""
        now_s = self._clock.wall_s()
        # A scan may name a key twice, and so may two servers between which it moves.
        seen: set[bytes] = set()
        clients = self._nodes.clients()
        if not clients:
            raise TierUnavailable(f"can't list: {self._shown} was not reached yet")
        try:
            for client in clients:
                cursor = -1
                while cursor:
                    cursor, keys = client.scan(max(cursor, 0), self._prefix.decode() + "*", SCAN_COUNT)
                    new = {key for key in keys if _NAME.fullmatch(key, len(self._prefix))} - seen
                    seen |= new
                    yield from _infos(client, list(new), len(self._prefix), now_s)
        except FAULTS as error:
            raise TierUnavailable(f"can't list: {error}") from error

    def stats(self) -> TierStats:
        """Return the servers' own figures (zeros while they can't be reached) and this process's counters."""
        objects, used, total, evicted = self._counts()
        evictions = max(0, evicted - self._evicted_before)
        return TierStats(self.name, objects, used, total, self._hits, self._misses, evictions, self._faults)

    def _counts(self) -> tuple[int, int, int, int]:
        infos: list[dict[str, Any]] = []
        try:
            for client in self._nodes.clients():
                infos.append({**client.info("memory"), **client.info("stats"), "keys": client.dbsize()})
        except FAULTS:
            return 0, 0, 0, 0
        return (
            sum(_figure(each, "keys") for each in infos),
            sum(_figure(each, "used_memory_dataset") for each in infos),
            sum(_figure(each, "maxmemory") or _figure(each, "total_system_memory") for each in infos),
            sum(_figure(each, "evicted_keys") for each in infos),
        )


def _figure(said: Mapping[str, Any], name: str) -> int:
    """Return a figure that a server says of itself, 0 if it does not: proxies and look-alikes know fewer."""
    value = said.get(name)
    return value if isinstance(value, int) else 0


def _infos(client: Any, keys: Sequence[bytes], prefix_bytes: int, now_s: float) -> Iterator[ObjectInfo]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.strlen(key)
        # Refused under an LFU policy: then nobody knows.
        pipeline.object("idletime", key)
    replies = pipeline.execute(raise_on_error=False)
    for key, size, idle_s in zip(keys, replies[::2], replies[1::2], strict=True):
        name = _NAME.fullmatch(key, prefix_bytes)
        if name and isinstance(size, int) and size:
            namespace, block = (bytes.fromhex(digits.decode()) for digits in name.groups())
            last_use_s = now_s - idle_s if isinstance(idle_s, int) else 0.0
            yield ObjectInfo(ObjectId(Namespace(namespace), BlockKey(block)), size, last_use_s)
