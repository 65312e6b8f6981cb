"""Records that may change: generations of namespaces, aliases, profiles; in a file, kept like the centre's.

Invariant: a record is visible only when it is on the disk, and a generation never sinks, whoever says so. Everything
that the centre wrote before `as_of_s` is in the region's records, and the centre knows of every invalidation that the
region knew of when it met the centre of this epoch.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec.structs import replace

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.auth import Scope
from kvtide.server.http import Exchange, Resources
from kvtide.tier import LastingFault, Repeater
from kvtide.tier.files import Files
from kvtide.tier.http.records import RecordsClient, raise_to
from kvtide.types import Namespace
from kvtide.wire import protocol
from kvtide.wire.protocol import Header, Record, RecordKind, RecordList, RecordName, RecordsRoute

_log = logging.getLogger(__name__)

# Generations on the one hand, aliases and profiles on the other: so many in all and of a tenant. Who has less than the
# reserve may write though all are taken by others, up to twice as many.
RECORDS_MAX = 16_384
RECORDS_TENANT_MAX = 1024
RECORDS_RESERVED = 16
# Removed records that regions are still told of, and half of them at least.
REMOVED_MAX = 1024
# The file is written again when it has more lines than this.
LINES_MAX = 8 * RECORDS_MAX
_ALL_MAX = 4 * RECORDS_MAX + REMOVED_MAX
_SUM_CHARACTERS = 16
_FILE_BYTES_MAX = 1 << 30
# A line that stands in a file from which nothing is missing.
_COMPLETE = b'{"is_complete":true}'
_Result = TypeVar("_Result")

POLL_S = 1.0
# Whoever wants the latest while another compares all with a centre that has started over waits for that so long.
COMPARING_S_MAX = 2.0
# Starts of the centre while it is asked once.
EPOCHS_MAX = 3
# Answers of the centre that are about what the client said.
_PASSED_ON = frozenset({400, 403, 404, 409, 412, 413, 429, 503, 507})

# Headers by which a write depends on the record that is there, by its ETag.
_CONDITIONS = ("if-match", "if-none-match")
_UNCONDITIONAL: Mapping[str, str] = MappingProxyType({})


def _require(headers: Mapping[str, str], record: Record | None) -> None:
    """RequestRefused (412) if what a write depends on does not hold of the record."""
    tag, (match, none_match) = record.tag if record else "", (headers.get(name, "") for name in _CONDITIONS)
    if match and not (tag and any(each.strip() in {tag, "*"} for each in match.split(","))):
        raise RequestRefused(412, "the record is not what If-Match says")
    if none_match and tag and protocol.is_tag_matched(none_match, tag):
        raise RequestRefused(412, "the record is what If-None-Match says")


class Records:
    """All tenants' records. Thread-safe between `open` and `close`. Without a path they last as long as the process."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._lines = 0
        self._records: dict[tuple[str, RecordName], Record] = {}
        # How many a tenant has, of generations and of others.
        self._counts: Counter[tuple[str, bool]] = Counter()
        # The largest that a record here ever had.
        self.version = 0
        # Another one after each start, and when removed records are forgotten, so that regions compare what they know.
        self.epoch = secrets.token_hex(8)
        # All is here that was ever written: not with a new or damaged file, or none, until somebody says so.
        self.is_complete = False

    def open(self) -> None:
        """Read the file, and write it again without what is out of date. OSError if that can't be done."""
        if self._path is None:
            return
        with self._lock:
            data = Files().content(self._path, _FILE_BYTES_MAX) if self._path.exists() else b""
            damaged = 0
            for line in filter(None, data.splitlines()):
                record = _parsed(line)
                if line == _summed(_COMPLETE):
                    self.is_complete = True
                elif record is None:
                    damaged += 1
                elif not self._is_old(record):
                    self._keep(record)
            if damaged:
                # The last line may be torn by a crash; of others the centre, or whoever writes next, knows better.
                _log.warning("%d records of %s can't be read and are dropped", damaged, self._path)
                self.is_complete = False
            self._rewrite()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def generation(self, tenant: str, namespace: Namespace) -> int:
        """Return a namespace's generation: 0 before the first invalidation. Without the lock: it must not wait."""
        found = self._records.get((tenant, RecordName(RecordKind.GENERATION, namespace.hex())))
        return int(found.value) if found is not None else 0

    def get(self, tenant: str, name: RecordName) -> Record | None:
        """Return a record; a generation that nobody raised is 0, version 0."""
        found = self._present(tenant, name)
        if found is None and name.kind is RecordKind.GENERATION:
            return Record(tenant, name.kind, name.name, "0", 0)
        return found

    def write(self, tenant: str, name: RecordName, value: str, headers: Mapping[str, str] = _UNCONDITIONAL) -> Record:
        """Write a record, on the disk too, and return it; a generation that is higher already stays.

        RequestRefused: 412 if a condition in `headers` does not hold, 507 if the tenant or the server has too many.
        """
        with self._lock:
            found = self._present(tenant, name)
            _require(headers, found)
            if found is not None and name.kind is RecordKind.GENERATION and int(found.value) >= int(value):
                return found
            if found is None:
                self._require_room(tenant, name.kind)
            return self._written(tenant, name, value)

    def remove(self, tenant: str, name: RecordName, headers: Mapping[str, str] = _UNCONDITIONAL) -> Record | None:
        """Remove a record; return what tells others of it, None if it was not there.

        RequestRefused: 412 if a condition in `headers` does not hold, 409 for a generation.
        """
        if name.kind is RecordKind.GENERATION:
            raise RequestRefused(409, "a generation can't be removed: what it made invalid would be found again")
        with self._lock:
            found = self._present(tenant, name)
            _require(headers, found)
            return self._written(tenant, name, "") if found is not None else None

    def _present(self, tenant: str, name: RecordName) -> Record | None:
        found = self._records.get((tenant, name))
        return found if found is not None and found.value else None

    def _written(self, tenant: str, name: RecordName, value: str) -> Record:
        record = Record(tenant, name.kind, name.name, value, self._next_version())
        self._append([record])
        return record

    def _next_version(self) -> int:
        return max(self.version + 1, int(self._clock.wall_s() * 1e6))

    def _require_room(self, tenant: str, kind: RecordKind) -> None:
        is_generation = kind is RecordKind.GENERATION
        mine = self._counts[tenant, is_generation]
        count = sum(each for (_, of_generations), each in self._counts.items() if of_generations == is_generation)
        records_max = RECORDS_MAX if mine >= RECORDS_RESERVED else 2 * RECORDS_MAX
        if mine >= RECORDS_TENANT_MAX or count >= records_max:
            what = "generations" if is_generation else "aliases and profiles"
            raise RequestRefused(507, f"a tenant may have {RECORDS_TENANT_MAX} {what}, {RECORDS_MAX} in all")

    def adopt(self, records: Sequence[Record]) -> None:
        """Take over what the centre has written, as far as it is newer than what is here."""
        with self._lock:
            self._append(self._newer(records))

    def recover(self, records: Sequence[Record]) -> None:
        """Write the generations of these, which a region has, that are higher than what is here."""
        with self._lock:
            found = self._newer([each for each in records if each.kind is RecordKind.GENERATION])
            first = self._next_version()
            self._append([replace(each, version=first + n) for n, each in enumerate(found)])

    def _newer(self, records: Sequence[Record]) -> list[Record]:
        newer = [record for record in records if not self._is_old(record)]
        if len(self._records.keys() | set(map(_place, newer))) > _ALL_MAX:
            raise RequestRefused(507, f"another server has more than {_ALL_MAX} records")
        return newer

    def settle(self) -> None:
        """Note, in the file too, that nothing is missing. RequestRefused (503) if the disk won't."""
        with self._lock:
            if not self.is_complete:
                self._write(_summed(_COMPLETE) + b"\n")
                self.is_complete = True

    def begin_anew(self) -> None:
        """Count all that is here as older than what the centre, which lost its records, writes from now on."""
        with self._lock:
            self._records = {place: replace(record, version=0) for place, record in self._records.items()}
            self.version = 0
            if self._path is not None:
                with _answering():
                    self._rewrite()

    def all(self) -> list[Record]:
        """Return the records of all tenants, and those that say what was removed."""
        with self._lock:
            return list(self._records.values())

    def changes(self, is_shown: Callable[[str], bool], after: int) -> RecordList:
        """Return the records of these tenants that were written after a version, the oldest first."""
        with self._lock:
            found = [each for each in self._records.values() if each.version > after and is_shown(each.tenant)]
            version, epoch = self.version, self.epoch
        found.sort(key=lambda record: record.version)
        return RecordList(found[: protocol.CHANGES_MAX], len(found) <= protocol.CHANGES_MAX, version, epoch)

    def _is_old(self, record: Record) -> bool:
        found = self._records.get(_place(record))
        if found is not None and record.kind is RecordKind.GENERATION:
            return (int(record.value), record.version) <= (int(found.value), found.version)
        return found is not None and record.version <= found.version

    def _keep(self, record: Record) -> None:
        place = _place(record)
        more = bool(record.value) - (self._present(*place) is not None)
        self._counts[record.tenant, record.kind is RecordKind.GENERATION] += more
        self._records[place] = record
        self.version = max(self.version, record.version)
        if not record.value:
            removed = [(each.version, place) for place, each in self._records.items() if not each.value]
            if len(removed) > REMOVED_MAX:
                # Of what was removed longest ago nobody is told any more: who may not have heard of it compares all.
                for _, oldest in sorted(removed)[: len(removed) - REMOVED_MAX // 2]:
                    del self._records[oldest]
                self.epoch = secrets.token_hex(8)

    def _append(self, records: Sequence[Record]) -> None:
        """Write records after the others, then make them visible. RequestRefused (503) if the disk won't."""
        if self._file is not None and records:
            self._write(b"".join(map(_packed, records)))
            self._lines += len(records)
        for record in records:
            self._keep(record)
        if self._lines > LINES_MAX:
            with _answering():
                self._rewrite()

    def _write(self, lines: bytes) -> None:
        if self._file is None:
            return
        # The line's end first: whatever a fault left half written ends there.
        data = b"\n" + lines
        with _answering():
            if Files().is_unlinked(self._file.fileno()):
                # Another server, which may have ended since, has put its own there: nobody would find these lines.
                self._rewrite()
            size = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError:
                # A part of a line would count as damage at the next start, and a whole one as written.
                self._file.truncate(size)
                raise

    def _rewrite(self) -> None:
        """Write what is valid to a new file, rename it, and go on after it."""
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_name(self._path.name + ".new")
        complete = _summed(_COMPLETE) + b"\n" if self.is_complete else b""
        with Files().opened(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            Files().write_full(file, [complete + b"".join(map(_packed, self._records.values()))], 0)
            os.fsync(file)
        aside.replace(self._path)
        with Files().opened(self._path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
            os.fsync(folder)
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._lines = len(self._records)

    def check(self) -> None:
        """AssertionError if the accounting is off, or there are too many."""
        with self._lock:
            assert len(self._records) <= _ALL_MAX
            removed = [each for each in self._records.values() if not each.value]
            assert len(removed) <= REMOVED_MAX
            assert self._counts.total() == len(self._records) - len(removed)


@contextmanager
def _answering() -> Iterator[None]:
    """Answer with 503 where the disk fails."""
    try:
        yield
    except OSError as error:
        raise RequestRefused(503, f"records can't be written now: {error}", retry_after_s=1.0) from error


def _place(record: Record) -> tuple[str, RecordName]:
    return record.tenant, RecordName(record.kind, record.name)


def _packed(record: Record) -> bytes:
    return _summed(msgspec.json.encode(record)) + b"\n"


def _summed(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode() + text


def _parsed(line: bytes) -> Record | None:
    text = line[_SUM_CHARACTERS:]
    if line != _summed(text):
        return None
    try:
        return msgspec.json.decode(text, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Heard(NamedTuple):
    """The version of the last change that is here, of those of an epoch of the centre."""

    epoch: str
    after: int


class CentralRecords:
    """Keeps a region's records like the centre's, from `open` to `close`."""

    def __init__(self, client: RecordsClient, records: Records, clock: Clock) -> None:
        self._client, self._records, self._clock = client, records, clock
        self._asking = Repeater(self._ask, "kvtide-records")
        self.stop = self._asking.stop
        # Nothing after a restart of ours or of the centre: comparing all mends what a file lost, here or there.
        self._heard = _Heard("", 0)
        self._lock, self._comparing = threading.Lock(), threading.Lock()
        # When the centre was asked what is here, by the clock that never goes back; and for people, who read clocks.
        self._asked_s = float("-inf")
        # Wall time; None until the centre has answered once.
        self.as_of_s: float | None = None
        self._fault = LastingFault(_log, "the centre's records stay as they are")

    def open(self) -> None:
        """Begin to ask."""
        self._client.open()
        self._asking.open()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        self._client.close()

    def _ask(self) -> float:
        with self._fault.caught(TierUnavailable, RequestRefused, OSError):
            self.refresh()
        return POLL_S

    def refresh(self) -> None:
        """Take over what the centre has written until now. TierUnavailable or RequestRefused if it can't be asked."""
        asked_s, as_of_s = self._clock.monotonic_s(), self._clock.wall_s()
        for _ in range(EPOCHS_MAX):
            epoch = self._heard.epoch
            if self._follow() or self._meet(epoch):
                break
        else:
            raise TierUnavailable("the centre begins anew again and again")
        self._records.settle()
        if asked_s > self._asked_s:
            self._asked_s, self.as_of_s = asked_s, as_of_s

    def _follow(self) -> bool:
        """Take over what is new. False if the centre has started over: it may know less than it did."""
        epoch, after = self._heard
        if not epoch:
            return False
        found = self._client.changes(after, epoch)
        if found.epoch != epoch:
            return False
        self._records.adopt(found.records)
        after = found.records[-1].version if found.records else after
        with self._lock:
            if self._heard.epoch == epoch:
                self._heard = _Heard(epoch, max(self._heard.after, after))
        return True

    def _meet(self, epoch: str) -> bool:
        """Compare all with a centre of another epoch. False if another thread has: perhaps before we asked."""
        is_first = self._comparing.acquire(blocking=False)
        if not is_first and not self._comparing.acquire(timeout=COMPARING_S_MAX):
            raise TierUnavailable("all records are being compared with the centre's")
        try:
            if is_first and self._heard.epoch == epoch:
                self._compare()
                return True
        finally:
            self._comparing.release()
        if self._heard.epoch == epoch:
            raise TierUnavailable("all records could not be compared with the centre's")
        return False

    def _compare(self) -> None:
        """Take over all that the centre has, and tell it the generations that it lacks: no invalidation is undone.

        What else it lacks was removed there, unless it knows less than we do: it may have lost its file, or have an
        older one. What it has written since does not tell which.
        """
        found = self._client.changes()
        there, lost, gone = {_place(each): each for each in found.records}, list[Record](), list[Record]()
        for each in self._records.all():
            other = there.get(_place(each))
            if each.kind is RecordKind.GENERATION:
                lost += [each] if int(each.value) > int(other.value if other else 0) else []
            elif other is None and each.value and each.version < found.version:
                gone.append(replace(each, value="", version=found.version))
        if found.version < self._records.version:
            # Its clock may have been set back besides.
            self._records.begin_anew()
            gone = []
        for record in lost:
            try:
                name = RecordName(record.kind, record.name)
                raise_to(self._client, name, int(record.value), _whose(record.tenant))
            except RequestRefused as error:
                _log.warning("the centre does not take back the generation of %s: %s", record.name, error)
        self._records.adopt([*found.records, *gone])
        with self._lock:
            self._heard = _Heard(found.epoch, found.records[-1].version if found.records else 0)

    def require_latest(self) -> None:
        """Have all that the centre has written before this call. RequestRefused (503) if that can't be."""
        try:
            self.refresh()
        except (TierUnavailable, RequestRefused, OSError) as error:
            reason = f"the latest state was asked for and can't be had: {error}"
            raise RequestRefused(503, reason, retry_after_s=1.0) from error

    def write(self, tenant: str, name: RecordName, value: str, headers: Mapping[str, str]) -> Record:
        """Let the centre write a record, then have it here. RequestRefused: 503 if it is silent, else its answer."""
        written = self._asked(lambda: self._client.write(name, value, _passed(tenant, headers)))
        return self._adopted(tenant, written)

    def remove(self, tenant: str, name: RecordName, headers: Mapping[str, str]) -> Record | None:
        """Let the centre remove a record, then have that here; None if there was none. RequestRefused as in `write`."""
        removed = self._asked(lambda: self._client.remove(name, _passed(tenant, headers)))
        return self._adopted(tenant, removed) if removed is not None else None

    def latest(self, tenant: str, name: RecordName) -> Record | None:
        """Return a record as the centre has it now, None if it has none. RequestRefused as in `write`."""
        found = self._asked(lambda: self._client.read(name, headers=_whose(tenant)))
        return replace(found, tenant=tenant) if found is not None else None

    def _adopted(self, tenant: str, record: Record) -> Record:
        record = replace(record, tenant=tenant)
        self._records.adopt([record])
        return record

    def _asked(self, ask: Callable[[], _Result]) -> _Result:
        try:
            return ask()
        except TierUnavailable as error:
            reason = f"records are written at the centre, which can't be asked: {error}"
            raise RequestRefused(503, reason, retry_after_s=1.0) from error
        except RequestRefused as error:
            if error.status in _PASSED_ON:
                raise
            # Between the centre and us: the client can do nothing about it.
            raise RequestRefused(502, f"the centre does not do what it was asked for: {error}") from error

    def is_too_old_for(self, headers: Mapping[str, str]) -> bool:
        """True if a request wants the latest, or what is newer than we have. RequestRefused (400) for nonsense."""
        staleness_s_max = protocol.staleness_s(headers)
        is_stale = staleness_s_max is not None and self._clock.monotonic_s() - self._asked_s > staleness_s_max
        return is_stale or Header.FORCE in headers


def _whose(tenant: str) -> list[tuple[str, str]]:
    return [(Header.TENANT, tenant)] if tenant else []


def _passed(tenant: str, headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [*_whose(tenant), *((name, headers[name]) for name in _CONDITIONS if headers.get(name))]


@dataclass(eq=False)
class RecordRequests:
    """Answers for records. Runs on the event loop; what waits for the disk or the centre runs in the workers.

    `central` is None where no centre is behind us. Where records are not kept, none can be written.
    """

    _records: Records
    _central: CentralRecords | None
    _shared: Resources
    _are_kept: bool

    async def answer(self, exchange: Exchange, route: RecordName | RecordsRoute) -> None:
        """Answer GET, HEAD, PUT or DELETE. RequestRefused if that is an error."""
        if exchange.head.method in {"PUT", "DELETE"}:
            assert isinstance(route, RecordName)
            exchange.caller.require(Scope.WRITE)
            await (self._put if exchange.head.method == "PUT" else self._delete)(exchange, route)
            return
        exchange.caller.require(Scope.READ)
        central, tenant = self._central, exchange.caller.tenant
        if central is not None and central.is_too_old_for(exchange.head.headers):
            await self._shared.workers.read(exchange.owner, central.require_latest)
        if isinstance(route, RecordsRoute):
            await self._list(exchange, route)
            return
        record = self._records.get(tenant, route)
        if central is not None and Header.FORCE in exchange.head.headers and route.kind is not RecordKind.GENERATION:
            # It may have lost what we know; a generation never sinks.
            record = await self._shared.workers.read(exchange.owner, partial(central.latest, tenant, route))
        if central is not None and central.as_of_s is None and (record is None or not record.version):
            raise RequestRefused(503, "the centre, where records are, has not answered yet", retry_after_s=1.0)
        if record is None:
            raise RequestRefused(404, "no such record")
        if protocol.is_tag_matched(exchange.head.headers.get("if-none-match", ""), record.tag):
            await exchange.reply(304, headers=self._headers(record.tag))
        else:
            await self._reply(exchange, record)

    async def _list(self, exchange: Exchange, route: RecordsRoute) -> None:
        caller = exchange.caller
        look = partial(self._records.changes, caller.may_act_for, route.after)
        found = await self._shared.workers.read(exchange.owner, look)
        version = found.records[-1].version if found.records else route.after
        tag = f'"{found.epoch}.{version}"'
        is_known = not found.records and route.after <= found.version
        if is_known and protocol.is_tag_matched(exchange.head.headers.get("if-none-match", ""), tag):
            await exchange.reply(304, headers=self._headers(tag))
            return
        # The caller's own are nobody's in particular.
        shown = [replace(each, tenant="") if each.tenant == caller.tenant else each for each in found.records]
        body = msgspec.json.encode(replace(found, records=shown)) + b"\n"
        await exchange.reply(200, body, [*self._headers(tag), ("Content-Type", "application/json")])

    async def _reply(self, exchange: Exchange, record: Record) -> None:
        headers = [*self._headers(record.tag), ("Content-Type", "text/plain; charset=utf-8")]
        await exchange.reply(200, record.value.encode() + b"\n", headers)

    def _headers(self, tag: str) -> list[tuple[str, str]]:
        as_of_s = self._central.as_of_s if self._central is not None else None
        return [("ETag", tag)] if as_of_s is None else [("ETag", tag), (Header.AS_OF, f"{as_of_s:.3f}")]

    async def _put(self, exchange: Exchange, name: RecordName) -> None:
        caller, size = exchange.caller, exchange.head.content_length
        if size is None or size > protocol.RECORD_BYTES_MAX:
            raise RequestRefused(411 if size is None else 413, f"a record may have {protocol.RECORD_BYTES_MAX} bytes")
        if not self._are_kept:
            raise RequestRefused(409, "this server has no file for records and would forget them: --records PATH")
        body, pace = bytearray(size), self._shared.live.limits.pace(exchange.stream.now_s())
        await exchange.expect_body(pace)
        await exchange.stream.read_into(memoryview(body), pace)
        exchange.note_received(size)
        value = name.kind.checked(body)
        if name.kind is RecordKind.GENERATION:
            known = self._records.generation(caller.tenant, Namespace(bytes.fromhex(name.name)))
            most = caller.generation_step_max
            if int(value) > known + most:
                raise RequestRefused(409, f"the generation is {known}, and rises by {most} at once at most")
        write = partial((self._central or self._records).write, caller.tenant, name, value, exchange.head.headers)
        record = await self._shared.workers.write(exchange.owner, write)
        exchange.change = f"wrote {name.kind}/{name.name}: {value}"
        await self._reply(exchange, record)

    async def _delete(self, exchange: Exchange, name: RecordName) -> None:
        remove = partial((self._central or self._records).remove, exchange.caller.tenant, name, exchange.head.headers)
        removed = await self._shared.workers.write(exchange.owner, remove)
        if removed is None:
            raise RequestRefused(404, "no such record")
        exchange.change = f"removed {name.kind}/{name.name}"
        await exchange.reply(204, headers=self._headers(removed.tag))
