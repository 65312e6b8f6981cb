"""Tiers that are open, one that is slow, and looks into a store directory behind the tier's back."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvtide.clock import Clock, ManualClock
from kvtide.tier import Tier
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.disk import DiskTier
from kvtide.tier.disk.segment import RecordHeader, RecordState, scan_segment, segment_number
from kvtide.tier.files import Files
from kvtide.tier.ram import MemoryTier
from kvtide.types import ObjectId
from kvtide_lab.wrapped import Sleep, Watched

_Tier = TypeVar("_Tier", bound=Tier)


def nothing_pinned(key: bytes) -> bool:
    return False


def open_memory(bytes_max: int = 64 << 20) -> MemoryTier:
    tier = MemoryTier(bytes_max, ManualClock(), nothing_pinned)
    tier.open()
    return tier


def open_disk(
    store: Path, bytes_max: int = 1 << 30, files: Files | None = None, clock: Clock | None = None, **options: Any
) -> DiskTier:
    tier = DiskTier(store, bytes_max, clock or ManualClock(1000.0), nothing_pinned, files, **options)
    tier.open()
    return tier


def read_object(tier: Tier, object_id: ObjectId) -> bytearray:
    """Read an object that is there, one of 8 MiB at most."""
    buffer = bytearray(8 << 20)
    size = tier.get_into(object_id, memoryview(buffer))
    assert size is not None
    return buffer[:size]


@contextmanager
def opened(tier: _Tier) -> Iterator[_Tier]:
    """Open a tier; in the end its accounting is right, and it is closed."""
    tier.open()
    try:
        yield tier
        tier.check()
    finally:
        tier.close()


class StoredRecord(NamedTuple):
    """A live record and the file that it is in."""

    path: Path
    header: RecordHeader

    def body(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.header.offset + ALIGN_BYTES)
            return file.read(self.header.size)

    def write_body(self, data: bytes) -> None:
        """Put other bytes in the body's place, zeros behind them."""
        descriptor = os.open(self.path, os.O_WRONLY)
        padded = data[: self.header.size].ljust(self.header.size, b"\0")
        os.pwrite(descriptor, padded, self.header.offset + ALIGN_BYTES)
        os.close(descriptor)


def stored_records(store: Path) -> list[StoredRecord]:
    """Return every live record, ordered by key."""
    found = []
    for path in sorted((store / "segments").glob("*.seg")):
        number = segment_number(path.name)
        assert number is not None
        scan = scan_segment(Files(), path, number)
        found += [StoredRecord(path, header) for header in scan.records if header.state is RecordState.LIVE]
    return sorted(found, key=lambda record: record.header.id.key)


def flip_bytes(store: Path, first: int = 40_000, step: int = 1 << 16) -> int:
    """Change a byte in every so many of every segment, where it lies; return how many."""
    flipped = 0
    for segment in (store / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        for offset in range(first, len(data), step):
            data[offset] ^= 0x55
            flipped += 1
        with segment.open("r+b") as file:
            file.write(data)
    return flipped


def disk_bytes(store: Path) -> int:
    """Return what a directory takes on the disk, as du counts it."""
    total = 0
    for path in [store, *store.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class Slow(Watched):
    def __init__(self, tier: Tier, sleep: Sleep, latency_s: float) -> None:
        super().__init__(tier)
        self._sleep = sleep
        self._latency_s = latency_s

    def before(self, verb: str) -> None:
        self._sleep(self._latency_s)
