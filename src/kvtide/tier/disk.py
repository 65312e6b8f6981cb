"""Objects as files in a directory that several processes may share (docs/format.md, "Store directory").

Invariant: an object's file name appears only when all its bytes are in the file (written aside, then renamed).
There is no lock that a killed process could leave behind: locks are the kernel's (flock) and die with their holder.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Buffer, IsPinned, ObjectInfo, TierStats
from kvtide.tier.journal import RemovalJournal
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace, ObjectId

__all__ = ["DiskTier"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Another process may write to the same directory: our count of its bytes is at most this old.
RESCAN_S = 5.0
ASIDE_TRIES_MAX = 1000
_SUFFIX = ".kvt"


class DiskTier:
    """One file an object under `root`, least recently used out first once `bytes_max` is reached."""

    name = "disk"

    def __init__(self, root: Path, bytes_max: int, clock: Clock, is_pinned: IsPinned) -> None:
        if bytes_max <= 0:
            raise ValueError(f"bytes_max of the disk tier must be positive, got {bytes_max}")
        self._root = root
        self._bytes_max = bytes_max
        self._clock = clock
        self._is_pinned = is_pinned
        self._journal = RemovalJournal(root / "removed.log")
        self._aside_numbers = itertools.count()
        self._lock = threading.Lock()
        # One writer at a time: making room and filling it must not be torn apart, or the cap would not hold.
        self._write_lock = threading.Lock()
        self._used_bytes = 0
        self._scanned_s = float("-inf")
        self._hits = self._misses = self._evictions = self._faults = 0

    def open(self) -> None:
        """Make the directory if need be and clear away what killed writers left.

        TierUnavailable if it is no directory or can't be made; one that can only be read opens.
        """
        try:
            (self._root / "objects").mkdir(parents=True, exist_ok=True)
            (self._root / "aside").mkdir(exist_ok=True)
        except OSError as error:
            if not (self._root / "objects").is_dir():
                raise TierUnavailable(f"store directory {self._root} can't be used: {error}") from error
        self._clear_abandoned()

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def contains(self, object_id: ObjectId) -> bool:
        """Tell whether the object's file is here now."""
        return self._path(object_id).is_file()

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the object's file; a file replaced or removed meanwhile is read as it was."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        return self._guarded("read", lambda: self._read(object_id, buffer, offset))

    def _read(self, object_id: ObjectId, buffer: memoryview, offset: int) -> int | None:
        try:
            descriptor = os.open(self._path(object_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._count(misses=1)
            return None
        try:
            done = 0
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
            self._count(hits=1)
            self._touch(descriptor)
        finally:
            os.close(descriptor)
        return done

    def _touch(self, descriptor: int) -> None:
        # Last use is the file's modification time, so that every process sees it. A read-only store keeps none.
        try:
            os.utime(descriptor)
        except OSError as error:
            _log.debug("last use not noted: %s", error)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Write the object aside and rename it into place."""
        size = len(buffer)
        if size > self._bytes_max:
            raise TierFull(f"{object_id} has {size} bytes, the disk tier may hold {self._bytes_max}")
        with self._write_lock:
            return self._guarded("write", lambda: self._write(object_id, buffer))

    def _write(self, object_id: ObjectId, buffer: Buffer) -> bool:
        path = self._path(object_id)
        if path.exists():
            return True
        self._make_room(len(buffer))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = self._create_aside()
        try:
            # Held while the file is written: whoever finds it and gets the lock knows that its writer is dead.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rest = memoryview(buffer)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            aside.rename(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            self._used_bytes += len(buffer)
        return True

    def _create_aside(self) -> tuple[int, Path]:
        # Containers that share a directory may share process ids: a name that is taken is passed over.
        for number in itertools.islice(self._aside_numbers, ASIDE_TRIES_MAX):
            path = self._root / "aside" / f"{os.getpid()}-{number}.part"
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path
            except FileExistsError:
                continue
        raise FileExistsError(f"{ASIDE_TRIES_MAX} names in {self._root / 'aside'} are taken")

    def _make_room(self, size: int) -> None:
        if self._clock.monotonic_s() - self._scanned_s > RESCAN_S:
            self._scan()
        if self._used_bytes + size <= self._bytes_max:
            return
        for info in sorted(self._scan(), key=lambda info: info.last_use_s):
            if self._used_bytes + size <= self._bytes_max:
                return
            if not self._is_pinned(info.id.key) and self.delete(info.id, "evicted"):
                self._count(evictions=1)
        if self._used_bytes + size > self._bytes_max:
            raise TierFull(f"no room for {size} bytes in {self._root}: what it holds is in use")

    def _scan(self) -> list[ObjectInfo]:
        infos = list(self.objects())
        with self._lock:
            self._used_bytes = sum(info.size for info in infos)
            self._scanned_s = self._clock.monotonic_s()
        return infos

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove the object's file and note why."""
        return self._guarded("delete", lambda: self._delete(object_id, reason))

    def _delete(self, object_id: ObjectId, reason: str) -> bool:
        path = self._path(object_id)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return False
        with self._lock:
            self._used_bytes = max(0, self._used_bytes - size)
        self._journal.append(object_id, reason, self._clock.wall_s())
        return True

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return the reason in the journal, which all processes on this directory share."""
        return self._journal.reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield every object file; files that are not ours are passed over."""
        for path in self._root.glob(f"objects/*/*/*{_SUFFIX}"):
            try:
                key = BlockKey(bytes.fromhex(path.stem))
                namespace = Namespace(bytes.fromhex(path.parent.parent.name))
                stat = path.stat()
            except (OSError, ValueError) as error:
                _log.debug("passed over %s: %s", path, error)
                continue
            if len(key) == len(namespace) == DIGEST_BYTES:
                yield ObjectInfo(ObjectId(namespace, key), stat.st_size, stat.st_mtime)

    def stats(self) -> TierStats:
        """Return the counters; objects and bytes are counted anew."""
        infos = self._scan()
        counts = (self._hits, self._misses, self._evictions, self._faults)
        return TierStats(self.name, len(infos), self._used_bytes, self._bytes_max, *counts)

    def _path(self, object_id: ObjectId) -> Path:
        key = object_id.key.hex()
        return self._root / "objects" / object_id.namespace.hex() / key[:2] / f"{key}{_SUFFIX}"

    def _clear_abandoned(self) -> None:
        for path in (self._root / "aside").glob("*.part"):
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("left %s: %s", path, error)

    def _count(self, hits: int = 0, misses: int = 0, evictions: int = 0) -> None:
        with self._lock:
            self._hits += hits
            self._misses += misses
            self._evictions += evictions

    def _guarded(self, verb: str, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except OSError as error:
            with self._lock:
                self._faults += 1
            raise TierUnavailable(f"can't {verb} in store directory {self._root}: {error}") from error
