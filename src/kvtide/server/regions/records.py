"""Records that may change, in a file: generations of namespaces, aliases, profiles. Read from memory, without waiting.

Invariant: a record is visible only when it is on the disk, and a generation never sinks, whoever says so.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from kvtide.clock import Clock
from kvtide.errors import RequestRefused
from kvtide.tier.files import Files
from kvtide.types import Namespace
from kvtide.wire.protocol import CHANGES_MAX, Record, RecordKind, RecordList, RecordName

_log = logging.getLogger(__name__)

# Generations on the one hand, aliases and profiles on the other: so many in all and of a tenant. Who has less than the
# reserve may write though all are taken by others, up to twice as many.
RECORDS_MAX = 16_384
RECORDS_TENANT_MAX = 1024
RECORDS_RESERVED = 16
# Removed records that regions are still told of.
REMOVED_MAX = 1024
# The file is written again when it has more lines than this.
LINES_MAX = 8 * RECORDS_MAX
_ALL_MAX = 4 * RECORDS_MAX + REMOVED_MAX
_SUM_CHARACTERS = 16
_FILE_BYTES_MAX = 1 << 30
# A line that stands in a file from which nothing is missing.
_COMPLETE = b'{"is_complete":true}'


class WriteCondition(NamedTuple):
    """The condition of a write on the record that is there, as ETags: If-Match and If-None-Match."""

    if_match: str = ""
    if_none_match: str = ""

    def require(self, record: Record | None) -> None:
        """RequestRefused (412) if it does not hold."""
        tag = record.tag if record else ""
        if self.if_match and not (tag and _names(self.if_match, tag)):
            raise RequestRefused(412, "the record is not what If-Match says")
        if self.if_none_match and tag and _names(self.if_none_match, tag):
            raise RequestRefused(412, "the record is what If-None-Match says")


def _names(tags: str, tag: str) -> bool:
    return any(each.strip() in {tag, "*"} for each in tags.split(","))


class Records:
    """All tenants' records. Thread-safe between `open` and `close`. Without a path they last as long as the process."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._lines = 0
        self._records: dict[tuple[str, RecordName], Record] = {}
        # The same as the records of that kind say, to be read without the lock.
        self._generations: dict[tuple[str, Namespace], int] = {}
        # How many a tenant has, of generations and of others.
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._version = 0
        # Another one after each start, so that regions compare what they know.
        self.epoch = secrets.token_hex(8)
        # Whether all is here that was ever written: not with a new or damaged file, or none, until somebody says so.
        self.is_complete = False
        # Told of a namespace whose generation has risen; from any thread.
        self.on_raised: Callable[[Namespace], None] = lambda namespace: None

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
        """Return a namespace's generation: 0 before the first invalidation."""
        return self._generations.get((tenant, namespace), 0)

    def get(self, tenant: str, name: RecordName) -> Record | None:
        """Return a record; a generation that nobody raised is 0, version 0."""
        found = self._records.get((tenant, name))
        if found is None and name.kind is RecordKind.GENERATION:
            return Record(tenant, name.kind, name.name, "0", 0)
        return found if found is not None and found.value else None

    def write(self, tenant: str, name: RecordName, value: str, condition: WriteCondition | None = None) -> Record:
        """Write a record and return it; a generation that is higher already stays. It is on the disk afterwards.

        RequestRefused: 412 if the condition does not hold, 507 if the tenant or the server has too many.
        """
        with self._lock:
            found = self._present(tenant, name)
            (condition or WriteCondition()).require(found)
            if found is not None and name.kind is RecordKind.GENERATION and int(found.value) >= int(value):
                return found
            if found is None:
                self._require_room(tenant, name.kind)
            record = self._next(tenant, name, value)
            self._append([record])
        self._tell([record])
        return record

    def remove(self, tenant: str, name: RecordName, condition: WriteCondition | None = None) -> Record | None:
        """Remove a record; return what tells others of it, None if it was not there.

        RequestRefused: 412 if the condition does not hold, 409 for a generation.
        """
        if name.kind is RecordKind.GENERATION:
            raise RequestRefused(409, "a generation can't be removed: what it made invalid would be found again")
        with self._lock:
            found = self._present(tenant, name)
            (condition or WriteCondition()).require(found)
            if found is None:
                return None
            record = self._next(tenant, name, "")
            self._append([record])
        return record

    def _present(self, tenant: str, name: RecordName) -> Record | None:
        found = self._records.get((tenant, name))
        return found if found is not None and found.value else None

    def _next(self, tenant: str, name: RecordName, value: str) -> Record:
        return Record(tenant, name.kind, name.name, value, self._next_version())

    def _next_version(self) -> int:
        return max(self._version + 1, int(self._clock.wall_s() * 1e6))

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
            newer = self._newer(records)
            self._append(newer)
        self._tell(newer)

    def recover(self, records: Sequence[Record]) -> None:
        """Write the generations of these, which a region has, that are higher than what is here."""
        with self._lock:
            found = self._newer([each for each in records if each.kind is RecordKind.GENERATION])
            first = self._next_version()
            raised = [msgspec.structs.replace(each, version=first + n) for n, each in enumerate(found)]
            self._append(raised)
        self._tell(raised)

    def _newer(self, records: Sequence[Record]) -> list[Record]:
        newer = [record for record in records if not self._is_old(record)]
        known = {(record.tenant, RecordName(record.kind, record.name)) for record in newer} | self._records.keys()
        if len(known) > _ALL_MAX:
            raise RequestRefused(507, f"another server has more than {_ALL_MAX} records")
        return newer

    def settle(self) -> None:
        """Note, in the file too, that nothing is missing. RequestRefused (503) if the disk won't."""
        with self._lock:
            if not self.is_complete:
                self._write(_summed(_COMPLETE) + b"\n")
                self.is_complete = True

    @property
    def version(self) -> int:
        """Return the largest version that a record here ever had."""
        return self._version

    def begin_anew(self) -> None:
        """Count all that is here as older than what the centre, which has lost its records, writes from now on."""
        with self._lock:
            for place, record in self._records.items():
                self._records[place] = msgspec.structs.replace(record, version=0)
            self._version = 0
            if self._path is not None:
                with _answering():
                    self._rewrite()

    def generations(self) -> list[Record]:
        """Return the generations of all tenants."""
        with self._lock:
            return [each for each in self._records.values() if each.kind is RecordKind.GENERATION]

    def changes(self, is_shown: Callable[[str], bool], after: int) -> RecordList:
        """Return the records of these tenants that were written after a version, the oldest first."""
        with self._lock:
            found = [each for each in self._records.values() if each.version > after and is_shown(each.tenant)]
            version = self._version
        found.sort(key=lambda record: record.version)
        return RecordList(found[:CHANGES_MAX], len(found) <= CHANGES_MAX, version, self.epoch)

    def _is_old(self, record: Record) -> bool:
        found = self._records.get((record.tenant, RecordName(record.kind, record.name)))
        if found is None:
            return False
        if record.kind is RecordKind.GENERATION:
            return int(record.value) <= int(found.value)
        return record.version <= found.version

    def _keep(self, record: Record) -> None:
        name, is_generation = RecordName(record.kind, record.name), record.kind is RecordKind.GENERATION
        was_present = self._present(record.tenant, name) is not None
        self._counts[record.tenant, is_generation] += bool(record.value) - was_present
        self._records[record.tenant, name] = record
        self._version = max(self._version, record.version)
        if is_generation:
            self._generations[record.tenant, Namespace(bytes.fromhex(record.name))] = int(record.value)
        elif not record.value:
            self._forget_removed()

    def _forget_removed(self) -> None:
        """Tell no more of what was removed longest ago, if there is too much."""
        removed = [(each.version, place) for place, each in self._records.items() if not each.value]
        for _, place in sorted(removed)[: max(0, len(removed) - REMOVED_MAX)]:
            del self._records[place]

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
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    def _tell(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.kind is RecordKind.GENERATION:
                self.on_raised(Namespace(bytes.fromhex(record.name)))

    def _rewrite(self) -> None:
        """Write what is valid to a new file, rename it, and go on after it."""
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_name(self._path.name + ".new")
        complete = _summed(_COMPLETE) + b"\n" if self.is_complete else b""
        with os.fdopen(Files().open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(complete + b"".join(map(_packed, self._records.values())))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._lines = len(self._records)

    def check(self) -> None:
        """AssertionError if generations and records differ, or there are too many."""
        with self._lock:
            raised = [each for each in self._records.values() if each.kind is RecordKind.GENERATION]
            assert len(raised) == len(self._generations)
            for each in raised:
                assert self._generations[each.tenant, Namespace(bytes.fromhex(each.name))] == int(each.value)
            assert len(self._records) <= _ALL_MAX
            present = [(owner, name.kind is RecordKind.GENERATION) for owner, name in self._records]
            removed = [each for each in self._records.values() if not each.value]
            assert len(removed) <= REMOVED_MAX
            assert sum(self._counts.values()) == len(present) - len(removed)


@contextmanager
def _answering() -> Iterator[None]:
    """Answer with 503 where the disk fails."""
    try:
        yield
    except OSError as error:
        raise RequestRefused(503, f"records can't be written now: {error}", retry_after_s=1.0) from error


def _packed(record: Record) -> bytes:
    return _summed(msgspec.json.encode(record)) + b"\n"


def _summed(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode() + text


def _parsed(line: bytes) -> Record | None:
    text = line[_SUM_CHARACTERS:]
    if line[:_SUM_CHARACTERS] != xxhash.xxh3_64_hexdigest(text).encode():
        return None
    try:
        return msgspec.json.decode(text, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
