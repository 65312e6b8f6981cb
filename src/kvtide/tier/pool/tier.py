"""kvtide servers as one tier, without anybody between: each block is kept by the few servers that the map names.

Invariant: a map decides where to look, never what is true: an object may be read from any server that has it, and one
that nobody has is a miss.
"""

from __future__ import annotations

import logging
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable, WrongServer
from kvtide.evict import Hint
from kvtide.outcomes import Decided
from kvtide.tier.background import Background
from kvtide.tier.base import Buffer, CountingTier, ObjectInfo, RangeRead, Take, Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http import PeerSettings, http_tier
from kvtide.tier.pool.membership import ETCD_OPTIONS, Membership, Watcher, membership_of
from kvtide.tier.pool.placement import Placement, PoolMap, PoolServer
from kvtide.tier.source import read_from_any, read_ranges
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Servers that are asked at the same time, and that get copies.
ASKED_MAX, WRITERS = 16, 4
# Copies that wait to be put where the map says, in the background.
REPAIR_BYTES_MAX = 64 << 20
# Where a block was before the latest changes of the map is remembered so long, and for so many changes.
MOVED_S_MAX = 600.0
MOVED_MAPS_MAX = 4
# A replica is the second try, and a server that fails twice is left alone for a second.
_PEER = PeerSettings(tries_max=1, faults_max=2, open_s=1.0)
OPERATION_S_MAX = 2.0
_OPTIONS = frozenset({"replicas", "kind", "scheme", *ETCD_OPTIONS})


class _Member(NamedTuple):
    """A server of the pool and the tier that reaches it."""

    server: PoolServer
    tier: Tier


class _State(NamedTuple):
    """One map with its members in the map's order, and those that came before it."""

    placement: Placement
    members: tuple[_Member, ...]
    earlier: tuple[tuple[float, Placement, tuple[_Member, ...]], ...]


@dataclass(eq=False, repr=False)
class PoolTier(CountingTier):
    """A tier over servers that `connect` makes tiers of. `here` names this machine: its own server is read first."""

    name = "pool"
    is_batched = takes_advice = can_replace = True
    looks_in_regions = True

    source: InitVar[Membership]
    _connect: Callable[[PoolServer], Tier]
    _here: str
    _clock: Clock
    takes_evicted: bool = False

    def __post_init__(self, source: Membership) -> None:
        super().__init__()
        self._watcher = Watcher(source, self._adopt)
        self._state: _State | None = None
        # Bytes that each server has sent us, and those that it is sending.
        self._loads: defaultdict[str, int] = defaultdict(int)
        self._writers: ThreadPoolExecutor | None = None
        self._repairer = Background(WRITERS, "kvtide-repair", REPAIR_BYTES_MAX)
        # Copies that were put where the map says.
        self.repairs = 0

    def open(self) -> None:
        """Get the map and connect. Without a map everything is a fault until there is one."""
        self._writers = ThreadPoolExecutor(ASKED_MAX, thread_name_prefix="kvtide-pool")
        self._repairer.open()
        self._watcher.open()

    def close(self) -> None:
        self._watcher.close()
        self._repairer.close()
        if self._writers is not None:
            self._writers.shutdown(wait=True)
            self._writers = None
        with self._lock:
            state, self._state = self._state, None
        for member in _all_members(state):
            member.tier.close()

    @property
    def epoch(self) -> int | None:
        """The map's epoch; None as long as there is no map."""
        state = self._state
        return state.placement.map.epoch if state else None

    def _adopt(self, pool: PoolMap) -> None:
        """Take a new map. Servers that no remembered map names any more are let go."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            old = self._state
            known = {member.server: member for member in _all_members(old)}
            members = tuple(known.get(server) or self._joined(server) for server in pool.servers)
            earlier = ((now_s, old.placement, old.members), *old.earlier)[:MOVED_MAPS_MAX] if old else ()
            self._state = new = _State(Placement(pool), members, earlier)
            self._loads.clear()
        kept = {member.server for member in _all_members(new)}
        for member in known.values():
            if member.server not in kept:
                member.tier.close()
        _log.info("pool of %d servers at epoch %d", len(members), pool.epoch)

    def _joined(self, server: PoolServer) -> _Member:
        tier = self._connect(server)
        tier.open()
        return _Member(server, tier)

    def _now(self) -> _State:
        state = self._state
        if state is None:
            raise TierUnavailable("the pool's map is not known yet")
        return state

    def _owners(self, state: _State, key: BlockKey) -> list[_Member]:
        """Return who keeps a block, whom to read from first: this machine's own server, else the less loaded one."""
        owners = [state.members[position] for position in state.placement.owners(key)]
        with self._lock:
            return sorted(owners, key=lambda each: (each.server.host != self._here, self._loads[each.server.name]))

    def _askable(self, state: _State, key: BlockKey) -> list[_Member]:
        """Return who may have a block: its owners, then those under the maps before this one."""
        found = self._owners(state, key)
        fresh_s = self._clock.monotonic_s() - MOVED_S_MAX
        for at_s, placement, members in state.earlier:
            if at_s >= fresh_s:
                found += [each for position in placement.owners(key) if (each := members[position]) not in found]
        return found

    def _maps(self) -> Iterator[_State]:
        """Yield the map, and then one that is newer, if a server has told of it meanwhile."""
        yield (state := self._now())
        if self._state is not state:
            yield self._now()

    def contains(self, object_id: ObjectId) -> bool:
        for state in self._maps():
            waiting = {object_id: self._askable(state, object_id.key)}
            if any(is_here for _, is_here in self._rounds(waiting, lambda _, each: each.tier.contains(object_id))):
                return True
        return False

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Ask the first owners, all at the same time, each once for all of its objects; of one that fails the next."""
        found, waiting = set[ObjectId](), {each: self._owners(self._now(), each.key) for each in object_ids}
        for ids, count in self._rounds(waiting, lambda ids, member: member.tier.count_leading(ids)):
            found.update(ids[:count])
            for object_id in ids:
                del waiting[object_id]
        return next((number for number, each in enumerate(object_ids) if each not in found), len(object_ids))

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask as `count_leading` does, and for what the first owners lack whoever else may have it."""
        waiting = {object_id: self._askable(self._now(), object_id.key) for object_id in object_ids}
        for ids, present in self._rounds(waiting, lambda ids, member: member.tier.contains_each(ids)):
            for object_id in compress(ids, present):
                del waiting[object_id]
        return [object_id not in waiting for object_id in object_ids]

    def _rounds(
        self, waiting: Mapping[ObjectId, list[_Member]], ask: Callable[[list[ObjectId], _Member], _Result]
    ) -> Iterator[tuple[list[ObjectId], _Result]]:
        """Ask who comes next for what still waits, each for a part of the caller's time; yield ids with each answer."""
        while any(waiting.values()) and (left_s := caller_deadline_s() - self._clock.monotonic_s()) > 0:
            asked = defaultdict[_Member, list[ObjectId]](list)
            for object_id in filter(waiting.get, waiting):
                asked[waiting[object_id].pop(0)].append(object_id)
            # Not until the caller's deadline: who is silent for longer has failed, and is left alone.
            answers = [self._begun(partial(ask, ids), member) for member, ids in asked.items()]
            wait(answers, min(left_s / (2 + max(map(len, waiting.values()))), OPERATION_S_MAX))
            for ids, answer in zip(asked.values(), answers, strict=True):
                if answer.done() and not isinstance(found := answer.result(), TierUnavailable):
                    yield ids, found

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Tell those who are asked first for blocks of the prompt, each of its own. TierUnavailable if nobody hears."""
        waiting = {each: self._owners(self._now(), each.key)[:1] for each in object_ids}
        if not list(self._rounds(waiting, lambda ids, member: member.tier.advise(ids, hint))):
            raise TierUnavailable("no server of the pool heard what a prompt advises")

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the first owner that has the object; one that lacks it gets it in the background."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        sizes = self.get_ranges_into(object_id, [RangeRead(offset, buffer)])
        return sizes[0] if sizes else None

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read from the first owner that has the object, by one request where it takes so many."""
        asked, read = list[tuple[_Member, list[int] | None]](), partial(self._read_from, object_id, ranges)
        for state in self._maps():
            with suppress(WrongServer):
                asked = self._each(self._askable(state, object_id.key), read, until=bool)
                break
        sizes, (offset, buffer) = asked[-1][1] if asked else None, ranges[0]
        if sizes is not None and offset == 0 and sizes[0] < len(buffer):
            owners = self._owners(self._now(), object_id.key)
            lacking = [member for member, found in asked if found is None and member in owners]
            self._repair(object_id, buffer[: sizes[0]], lacking)
        self._note(is_hit=sizes is not None)
        return sizes

    def _read_from(self, object_id: ObjectId, ranges: Sequence[RangeRead], member: _Member) -> list[int] | None:
        name, wanted = member.server.name, sum(len(buffer) for _, buffer in ranges)
        with self._lock:
            self._loads[name] += wanted
        # What fails stays on the account: a server that fails is not the first to be asked again.
        sizes = read_ranges(member.tier, object_id, ranges)
        with self._lock:
            self._loads[name] += sum(sizes or []) - wanted
        return sizes

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range from the first owner that has it, going on at the next where one breaks off."""
        members = self._askable(self._now(), object_id.key)
        reads = [partial(each.tier.read_range, object_id) for each in members]
        return read_from_any(reads, start, stop, take, lambda at, error: self._fault_of(members[at], error))

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store at every owner, at the same time. True if one has it."""
        for state in self._maps():
            outcomes = self._put_to_owners(state, object_id, buffer)
            if not any(isinstance(each, WrongServer) for each in outcomes):
                break
        if True in outcomes:
            return True
        errors = [each for each in outcomes if isinstance(each, TierUnavailable)]
        if errors:
            raise next((each for each in errors if isinstance(each, TierFull)), errors[0])
        return False

    # A server puts it in the place of a coarser one.
    replace = put_from

    def _put_to_owners(self, state: _State, object_id: ObjectId, buffer: Buffer) -> list[bool | TierUnavailable]:
        (first, *others), put = self._owners(state, object_id.key), partial(_put, object_id, buffer)
        pending = [self._begun(partial(copy_context().run, put), member) for member in others]
        return [self._outcome(put, first), *(future.result() for future in pending)]

    def _outcome(self, ask: Callable[[_Member], _Result], member: _Member) -> _Result | TierUnavailable:
        try:
            return ask(member)
        except TierUnavailable as error:
            self._fault_of(member, error)
            return error

    def _begun(self, ask: Callable[[_Member], _Result], member: _Member) -> Future[_Result | TierUnavailable]:
        if self._writers is None:
            raise TierUnavailable("the pool is closed")
        try:
            return self._writers.submit(self._outcome, ask, member)
        except RuntimeError:  # a process that ends has no threads, and stores what waits all the same
            (done := Future[_Result | TierUnavailable]()).set_result(self._outcome(ask, member))
            return done

    def _repair(self, object_id: ObjectId, data: memoryview, members: Sequence[_Member]) -> None:
        """Put copies where the map says that they belong, later; as many as the bound lets in."""
        if members and self._repairer.reserve(len(data)):
            self.repairs += len(members)
            copy = bytes(data)
            self._repairer.submit(partial(self._each, members, partial(_put, object_id, copy)), len(copy))

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        asked = self._each(self._askable(self._now(), object_id.key), lambda each: each.tier.delete(object_id, reason))
        return any(is_deleted for _, is_deleted in asked)

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Tell one server that answers; the pool's figures are the sums over its servers."""
        members = self._now().members
        self._each(members, lambda member: member.tier.note_decisions(namespace, counts), until=lambda result: True)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        state = self._state
        owners = self._owners(state, object_id.key) if state else []
        return next(filter(None, (member.tier.removed_reason(object_id) for member in owners)), None)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what any server lists, each object once; those of a server that is down from its copies."""
        listed = self._each(self._now().members, lambda member: list(member.tier.objects()))
        yield from {info.id: info for _, infos in listed for info in infos}.values()

    def stats(self) -> TierStats:
        """Return the servers' sums divided by the number of copies, and this process's counters."""
        state = self._state
        total = TierStats.sum_of(self.name, [member.tier.stats() for member in state.members] if state else [])
        copies = state.placement.replicas if state else 1
        sizes = (total.objects // copies, total.used_bytes // copies, total.bytes_max // copies)
        with self._lock:
            counters = (self._hits, self._misses, total.evictions // copies, self._faults)
        return TierStats(self.name, *sizes, *counters)

    def _each(
        self,
        members: Sequence[_Member],
        ask: Callable[[_Member], _Result],
        until: Callable[[_Result], bool] = lambda result: False,
    ) -> list[tuple[_Member, _Result]]:
        """Ask in turn until an answer will do. WrongServer if sent away without one, TierUnavailable if all failed."""
        answers: list[tuple[_Member, _Result]] = []
        problem: TierUnavailable | None = None
        for member in members:
            answer = self._outcome(ask, member)
            if isinstance(answer, TierUnavailable):
                problem = problem if isinstance(problem, WrongServer) else answer
                continue
            answers.append((member, answer))
            if until(answer):
                return answers
        if problem is not None and (not answers or isinstance(problem, WrongServer)):
            raise problem
        return answers

    def _fault_of(self, member: _Member, error: Exception) -> None:
        _log.debug("%s: %s", member.server.name, error)
        self._note_fault(error)
        if isinstance(error, WrongServer):
            # It has a newer map than we have.
            self._watcher.refresh()


def _all_members(state: _State | None) -> list[_Member]:
    if state is None:
        return []
    return [*dict.fromkeys([*state.members, *(member for _, _, members in state.earlier for member in members)])]


def _put(object_id: ObjectId, buffer: Buffer, member: _Member) -> bool:
    return member.tier.put_from(object_id, buffer)


def pool_tier(url: str, clock: Clock) -> PoolTier:
    """Return the tier of a pool's URL, not yet opened. ValueError for a bad one.

    Options: `replicas` (2), `kind` (rendezvous, mod), `scheme` (http, https) where the map does not say; `etcd_…` for
    etcd under TLS (`pool+etcds://`) and with a user; the others are those of http://.
    """
    passed = _passed_options(url)
    connect = partial(_connect, options=passed, clock=clock)
    # Bad options are the user's mistake now, not a fault of each server later.
    if passed.keys() & {"ca_file", "cert_file"}:
        connect(PoolServer("probe", "127.0.0.1:1", scheme="https"), here="")
    takes_evicted = connect(PoolServer("probe", "127.0.0.1:1"), here="").takes_evicted
    here = platform.node()
    return PoolTier(membership_of(url), partial(connect, here=here), here, clock, takes_evicted)


def server_urls(url: str) -> list[str]:
    """Return the URL of each server that a pool has now. ValueError for a bad URL, TierUnavailable without a map."""
    return [_url(server.origin, _passed_options(url)) for server in membership_of(url).read().servers]


def _passed_options(url: str) -> Mapping[str, str]:
    """Return the options of a pool's URL that are those of each server."""
    options = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    return {name: value for name, value in options if name not in _OPTIONS}


def _connect(server: PoolServer, options: Mapping[str, str], here: str, clock: Clock) -> Tier:
    """Return a tier on one server: through its socket if it runs on this machine, else over the network."""
    is_here = bool(here) and server.host == here and bool(server.socket_path)
    url = _url(f"http+unix://{quote(server.socket_path)}" if is_here else server.origin, options)
    return http_tier(url, clock, _PEER, OPERATION_S_MAX)


def _url(place: str, options: Mapping[str, str]) -> str:
    return place + (f"?{urlencode(options)}" if options else "")
