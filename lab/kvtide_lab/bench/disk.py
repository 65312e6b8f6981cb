"""The disk tier beside fio: the same pattern, the same file system, taking turns within one run.

Our side counts whole objects: found by id, record header checked, every section's checksum verified. The floor of the
CPU time is what any reader in this process pays: one plain preadv of the same size and one xxh3-128 over it, by the
same number of threads. `seal_vs_plain` is the same reading from a store with `?seal=`, in turns with the plain one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.keys import block_keys, namespace_digest
from kvtide.tier import Tier
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.tier.disk import DiskTier
from kvtide.types import BlockKey, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object, parse_object
from kvtide_lab.measuring import extremes

_Place = TypeVar("_Place")

_SIZES = (512 << 10, 2 << 20, 4 << 20, 16 << 20)
_SEED = 5
# Readings of each side in a round: a virtual disk's speed changes by a factor of two within a minute.
_READS = 2
_LAYERS = 8
# Objects are written one at a time and read as a cache loads them: so many threads, one request each. So does fio.
_READERS = 2
_FIO_ARGUMENTS = ("--ioengine=psync", "--direct=1", "--group_reporting", "--output-format=json", "--randrepeat=1")


class DiskBenchRow(msgspec.Struct, frozen=True):
    """One object size; medians over the rounds. Ratios are None without fio, or without what seals."""

    object_bytes: int
    write_gb_s: float
    read_gb_s: float
    fio_write_gb_s: float | None
    fio_read_gb_s: float | None
    write_vs_fio: float | None
    read_vs_fio: float | None
    write_vs_fio_spread: tuple[float, float] | None
    read_vs_fio_spread: tuple[float, float] | None
    cpu_s_per_gb_read: float
    cpu_floor_s_per_gb: float
    fio_cpu_s_per_gb_read: float | None
    seal_vs_plain: float | None
    seal_vs_plain_spread: tuple[float, float] | None
    sealed_write_vs_plain: float | None


class DiskBenchResult(msgspec.Struct, frozen=True):
    """All sizes. The ratios are the lowest of the rows, the CPU times the highest; `note` says what is missing."""

    read_vs_fio: float | None
    write_vs_fio: float | None
    cpu_s_per_gb_read: float
    cpu_floor_s_per_gb: float
    seal_vs_plain: float | None
    folder: str
    rounds: int
    fio: str | None
    note: str
    rows: list[DiskBenchRow]


class _Pass(NamedTuple):
    """All bytes once."""

    gb_s: float
    cpu_s_per_gb: float


class _Round(NamedTuple):
    """One writing and several readings of each side, in turns; the lists of fio are empty without it."""

    write: _Pass
    reads: list[_Pass]
    floors: list[_Pass]
    fio_write: list[_Pass]
    fio_reads: list[_Pass]
    sealed_write: list[_Pass]
    sealed_reads: list[_Pass]


def run(quick: bool, folder: Path | None = None, clock: Clock | None = None) -> DiskBenchResult:
    """Measure every object size in a directory under `folder` (default: the system's temporary one), then remove it.

    Quick means fewer rounds and bytes. ValueError if the folder is no directory. It needs 4 GB there, quick 1.3 GB.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"expected a directory to measure in, got {folder}")
    clock, rounds, total_bytes = clock or SystemClock(), 3 if quick else 5, (256 if quick else 1024) << 20
    fio = shutil.which("fio")
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=folder) as made:
        rows = [_measure(size, total_bytes, rounds, Path(made), fio, clock) for size in _SIZES]
    reads = [row.read_vs_fio for row in rows if row.read_vs_fio is not None]
    writes = [row.write_vs_fio for row in rows if row.write_vs_fio is not None]
    return DiskBenchResult(
        read_vs_fio=min(reads, default=None),
        write_vs_fio=min(writes, default=None),
        cpu_s_per_gb_read=max(row.cpu_s_per_gb_read for row in rows),
        cpu_floor_s_per_gb=max(row.cpu_floor_s_per_gb for row in rows),
        seal_vs_plain=min((row.seal_vs_plain for row in rows if row.seal_vs_plain is not None), default=None),
        folder=str(folder or tempfile.gettempdir()),
        rounds=rounds,
        fio=_fio_version(fio) if fio else None,
        note="" if fio else "fio is not installed (Debian: apt-get install fio): no ratios",
        rows=rows,
    )


def _measure(size: int, total_bytes: int, rounds: int, folder: Path, fio: str | None, clock: Clock) -> DiskBenchRow:
    done = [_round(size, total_bytes // size, folder, fio, clock, number) for number in range(rounds)]
    reads = [each for each_round in done for each in each_round.reads]
    fio_reads = [each for each_round in done for each in each_round.fio_reads]
    fio_writes = [each for each_round in done for each in each_round.fio_write]
    writes = [each.write for each in done]
    write_ratios = [ours.gb_s / theirs.gb_s for ours, theirs in zip(writes, fio_writes, strict=False)]
    read_ratios = [ours.gb_s / theirs.gb_s for ours, theirs in zip(reads, fio_reads, strict=False)]
    sealed_reads = [each for each_round in done for each in each_round.sealed_reads]
    seal_ratios = [sealed.gb_s / plain.gb_s for sealed, plain in zip(sealed_reads, reads, strict=False)]
    sealed_writes = [sealed.gb_s / each.write.gb_s for each in done for sealed in each.sealed_write]
    return DiskBenchRow(
        object_bytes=size,
        write_gb_s=statistics.median(each.gb_s for each in writes),
        read_gb_s=statistics.median(each.gb_s for each in reads),
        fio_write_gb_s=_median([each.gb_s for each in fio_writes]),
        fio_read_gb_s=_median([each.gb_s for each in fio_reads]),
        write_vs_fio=_median(write_ratios),
        read_vs_fio=_median(read_ratios),
        write_vs_fio_spread=extremes(write_ratios) if write_ratios else None,
        read_vs_fio_spread=extremes(read_ratios) if read_ratios else None,
        cpu_s_per_gb_read=statistics.median(each.cpu_s_per_gb for each in reads),
        cpu_floor_s_per_gb=statistics.median(each.cpu_s_per_gb for item in done for each in item.floors),
        fio_cpu_s_per_gb_read=_median([each.cpu_s_per_gb for each in fio_reads]),
        seal_vs_plain=_median(seal_ratios),
        seal_vs_plain_spread=extremes(seal_ratios) if seal_ratios else None,
        sealed_write_vs_plain=_median(sealed_writes),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _round(size: int, count: int, folder: Path, fio: str | None, clock: Clock, number: int) -> _Round:
    """Write once and read several times on both sides; who goes first changes, since the second meets a busy disk."""
    objects = made_objects(size, count)
    path, store = folder / "fio", folder / "store"
    tier = DiskTier(store, 64 * size * count, clock, lambda key: False)
    sealed = _sealed(folder / "sealed", 64 * size * count, clock)
    done = _Round(_Pass(0.0, 0.0), [], [], [], [], [], [])
    tier.open()
    sides: list[Callable[[], object]] = [lambda: done.reads.append(_read(tier, objects, size, clock))]
    if sealed is not None:
        sealed.open()
        sides.append(lambda: done.sealed_reads.append(_read(sealed, objects, size, clock)))
    if fio:
        sides.append(lambda: done.fio_reads.append(_fio(fio, "randread", _READERS, size, count, path)))
        path.unlink(missing_ok=True)
        if number % 2:
            done.fio_write.append(_fio(fio, "write", 1, size, count, path))
    done = done._replace(write=_write(tier, objects, size, clock))
    if sealed is not None:
        done.sealed_write.append(_write(sealed, objects, size, clock))
    if fio and not number % 2:
        done.fio_write.append(_fio(fio, "write", 1, size, count, path))
    for turn in range(_READS):
        for side in sides if (turn + number) % 2 else reversed(sides):
            side()
        done.floors.append(_floor(store, size, count, clock))
    tier.close()
    if sealed is not None:
        sealed.close()
    for made in (store, folder / "sealed"):
        shutil.rmtree(made, ignore_errors=sealed is None)
    return done


def _sealed(store: Path, bytes_max: int, clock: Clock) -> Tier | None:
    """Return a sealed disk tier; None if kvtide[seal] is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        return None
    from kvtide.tier.seal import sealed

    store.mkdir()
    (store / "keys").write_text("5e" * 32)
    return sealed(DiskTier(store, bytes_max, clock, lambda key: False), f"file:{store / 'keys'}", clock)


def _write(tier: Tier, objects: Sequence[tuple[ObjectId, bytearray]], size: int, clock: Clock) -> _Pass:
    memory, write_s = _scratch(size), 0.0
    for object_id, packed in objects:
        # Filling the buffer is the encoder's work, not the disk's.
        copy_bytes(memory, packed)
        started_s = clock.monotonic_s()
        tier.put_from(object_id, memory)
        write_s += clock.monotonic_s() - started_s
    return _Pass(size * len(objects) / 1e9 / write_s, 0.0)


def _scratch(size: int) -> memoryview:
    """Return what a reader reads objects of this size into: as a cache does, memory for the largest one."""
    return aligned_buffer(max(_SIZES))[:size]


def _read(tier: Tier, objects: Sequence[tuple[ObjectId, bytearray]], size: int, clock: Clock) -> _Pass:
    order = [object_id for object_id, _ in objects]
    random.Random(_SEED).shuffle(order)

    def read_share(share: Sequence[ObjectId]) -> None:
        buffer = _scratch(size)
        for object_id in share:
            came = tier.get_into(object_id, buffer)
            assert came == size, f"{object_id} was stored and is not here"
            parse_object(buffer, object_id).sections()

    return _timed(read_share, order, size, clock)


def _floor(store: Path, size: int, count: int, clock: Clock) -> _Pass:
    """Read pieces of the same size from the same files and hash them, by one system call and one hash for each."""
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sorted((store / "segments").iterdir())]
    # What is reserved and not yet written costs the disk nothing.
    written = [os.lseek(file, 0, os.SEEK_HOLE) for file in files]
    places = [(file, at) for file, stop in zip(files, written, strict=True) for at in range(0, stop - size, size)]
    order = random.Random(_SEED).choices(places, k=count)

    def read_share(share: Sequence[tuple[int, int]]) -> None:
        buffer = _scratch(size)
        for file, start in share:
            os.preadv(file, [buffer], start)
            xxhash.xxh3_128_digest(buffer)

    try:
        return _timed(read_share, order, size, clock)
    finally:
        for file in files:
            os.close(file)


def _timed(read_share: Callable[[Sequence[_Place]], None], order: Sequence[_Place], size: int, clock: Clock) -> _Pass:
    """Let _READERS threads read their shares of the places; return what all of it took."""
    total = size * len(order) / 1e9
    with ThreadPoolExecutor(_READERS) as readers:
        cpu_s, started_s = _cpu_s(), clock.monotonic_s()
        for done in [readers.submit(read_share, order[first::_READERS]) for first in range(_READERS)]:
            done.result()
        took_s, cpu_s = clock.monotonic_s() - started_s, _cpu_s() - cpu_s
    return _Pass(total / took_s, cpu_s / total)


def made_objects(size: int, count: int) -> list[tuple[ObjectId, bytearray]]:
    """Return objects of exactly `size` bytes that share their content but not their names."""
    layout = BlockLayout(layers=_LAYERS, tokens=16, kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT16)
    space = namespace_digest(b"bench", layout.dtype, "bench", layout.tokens, b"")
    keys = [BlockKey(space), *block_keys(space, range(count * layout.tokens), layout.tokens)]
    body = np.random.default_rng(_SEED).bytes(size - 256 - 48 * _LAYERS)
    cuts = [len(body) * layer // _LAYERS for layer in range(_LAYERS + 1)]
    sections = [
        Section(SectionId(SectionKind.DATA, 0, layer, layer + 1), memoryview(body)[cuts[layer] : cuts[layer + 1]])
        for layer in range(_LAYERS)
    ]
    made = []
    for position in range(count):
        object_id = ObjectId(space, keys[position + 1])
        meta = BlockMeta(object_id, keys[position], position * layout.tokens, layout, "bench")
        made.append((object_id, bytearray(pack_object(meta, "raw-1", sections))))
    assert len(made[0][1]) == size
    return made


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _fio(fio: str, pattern: str, jobs: int, size: int, count: int, path: Path) -> _Pass:
    """Let fio do the same number of transfers of the same size as ours, each job in its part of the file."""
    part = size * (count // jobs)
    arguments = [f"--name={pattern}", f"--filename={path}", f"--rw={pattern}", f"--bs={size}", f"--numjobs={jobs}"]
    places = [f"--size={part}", f"--offset_increment={part}", "--fallocate=posix"]
    command = [fio, *arguments, *places, *_FIO_ARGUMENTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    job = json.loads(found.stdout)["jobs"][0]
    gb_s = float(job["write" if pattern == "write" else "read"]["bw_bytes"]) / 1e9
    # Shares of one core, the mean over the jobs.
    return _Pass(gb_s, jobs * (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100 / gb_s)


def _fio_version(fio: str) -> str:
    return subprocess.run([fio, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
