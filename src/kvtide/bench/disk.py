"""The disk tier beside fio: the same pattern, the same file system, alternating within one run.

Our side counts whole objects: found by id, record header checked, every section's checksum verified.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.keys import NamespaceSpec, block_keys
from kvtide.tier import DiskTier
from kvtide.tier.buffers import aligned_buffer, copy_bytes
from kvtide.types import BlockKey, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object, parse_object

__all__ = ["DiskBenchResult", "DiskBenchRow", "run", "table"]

_SIZES = (512 << 10, 2 << 20, 4 << 20, 16 << 20)
_SEED = 5
_LAYERS = 8
# Writing is one object at a time, so is fio's: `numjobs=1`, one request in flight.
_FIO_ARGUMENTS = ("--ioengine=psync", "--direct=1", "--numjobs=1", "--output-format=json", "--randrepeat=1")


class DiskBenchRow(msgspec.Struct, frozen=True):
    """One object size; medians over the rounds. Ratios are None without fio."""

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
    fio_cpu_s_per_gb_read: float | None


class DiskBenchResult(msgspec.Struct, frozen=True):
    """All sizes. The ratios are the lowest of the rows, the CPU time is the highest; `note` says what is missing."""

    read_vs_fio: float | None
    write_vs_fio: float | None
    cpu_s_per_gb_read: float
    folder: str
    rounds: int
    fio: str | None
    note: str
    rows: list[DiskBenchRow]


class _Round(NamedTuple):
    write_gb_s: float
    read_gb_s: float
    cpu_s_per_gb: float
    fio_write_gb_s: float | None
    fio_read_gb_s: float | None
    fio_cpu_s_per_gb: float | None


def run(quick: bool, folder: Path | None = None, clock: Clock | None = None) -> DiskBenchResult:
    """Measure every object size in a directory under `folder` (default: the system's temporary one), then remove it.

    Quick means fewer rounds and bytes. ValueError if the folder is no directory. It needs 3 GB there, quick 1 GB.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"expected a directory to measure in, got {folder}")
    clock, rounds, total_bytes = clock or SystemClock(), 3 if quick else 7, (256 if quick else 1024) << 20
    fio = shutil.which("fio")
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=folder) as made:
        rows = [_measure(size, total_bytes, rounds, Path(made), fio, clock) for size in _SIZES]
    reads = [row.read_vs_fio for row in rows if row.read_vs_fio is not None]
    writes = [row.write_vs_fio for row in rows if row.write_vs_fio is not None]
    return DiskBenchResult(
        read_vs_fio=min(reads, default=None),
        write_vs_fio=min(writes, default=None),
        cpu_s_per_gb_read=max(row.cpu_s_per_gb_read for row in rows),
        folder=str(folder or tempfile.gettempdir()),
        rounds=rounds,
        fio=_fio_version(fio) if fio else None,
        note="" if fio else "fio is not installed (Debian: apt-get install fio): no ratios",
        rows=rows,
    )


def _measure(size: int, total_bytes: int, rounds: int, folder: Path, fio: str | None, clock: Clock) -> DiskBenchRow:
    done = [_round(size, total_bytes // size, folder, fio, clock, number) for number in range(rounds)]
    writes, reads = [each.write_gb_s for each in done], [each.read_gb_s for each in done]
    fio_writes = [each.fio_write_gb_s for each in done if each.fio_write_gb_s is not None]
    fio_reads = [each.fio_read_gb_s for each in done if each.fio_read_gb_s is not None]
    write_ratios = [ours / theirs for ours, theirs in zip(writes, fio_writes, strict=False)]
    read_ratios = [ours / theirs for ours, theirs in zip(reads, fio_reads, strict=False)]
    return DiskBenchRow(
        object_bytes=size,
        write_gb_s=statistics.median(writes),
        read_gb_s=statistics.median(reads),
        fio_write_gb_s=_median(fio_writes),
        fio_read_gb_s=_median(fio_reads),
        write_vs_fio=_median(write_ratios),
        read_vs_fio=_median(read_ratios),
        write_vs_fio_spread=_spread(write_ratios),
        read_vs_fio_spread=_spread(read_ratios),
        cpu_s_per_gb_read=statistics.median(each.cpu_s_per_gb for each in done),
        fio_cpu_s_per_gb_read=_median([each.fio_cpu_s_per_gb for each in done if each.fio_cpu_s_per_gb is not None]),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _spread(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _round(size: int, count: int, folder: Path, fio: str | None, clock: Clock, number: int) -> _Round:
    """Measure both once, ours first in every second round: whoever comes second meets a disk that is still busy."""
    theirs: list[float | None] = [None, None, None]
    if fio and number % 2 == 0:
        theirs = _theirs(fio, size, count, folder / "fio")
    ours = _ours(size, count, folder / "store", clock)
    if fio and number % 2 == 1:
        theirs = _theirs(fio, size, count, folder / "fio")
    return _Round(*ours, *theirs)


def _ours(size: int, count: int, store: Path, clock: Clock) -> list[float]:
    """Return GB/s written, GB/s read and CPU seconds for each GB read."""
    objects = _objects(size, count)
    memory, buffer = aligned_buffer(size), aligned_buffer(size)
    tier = DiskTier(store, 64 * size * count, clock, lambda key: False)
    tier.open()
    write_s = 0.0
    for object_id, packed in objects:
        # Filling the buffer is the encoder's work, not the disk's.
        copy_bytes(memory, packed)
        started_s = clock.monotonic_s()
        tier.put_from(object_id, memory)
        write_s += clock.monotonic_s() - started_s
    order = [object_id for object_id, _ in objects]
    random.Random(_SEED).shuffle(order)
    cpu_s, started_s = _cpu_s(), clock.monotonic_s()
    for object_id in order:
        came = tier.get_into(object_id, buffer)
        assert came == size, f"{object_id} was stored and is not here"
        parse_object(buffer, object_id).sections()
    read_s, cpu_s = clock.monotonic_s() - started_s, _cpu_s() - cpu_s
    tier.close()
    shutil.rmtree(store)
    total = size * count / 1e9
    return [total / write_s, total / read_s, cpu_s / total]


def _objects(size: int, count: int) -> list[tuple[ObjectId, bytearray]]:
    """Return objects of exactly `size` bytes that share their content but not their names."""
    layout = BlockLayout(layers=_LAYERS, tokens=16, kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT16)
    space = NamespaceSpec(b"bench", layout.dtype, "bench", layout.tokens, b"").digest()
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
        made.append((object_id, pack_object(meta, "raw-1", sections)))
    assert len(made[0][1]) == size
    return made


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _theirs(fio: str, size: int, count: int, path: Path) -> list[float | None]:
    """Return fio's GB/s written and read and its CPU seconds for each GB read."""
    path.unlink(missing_ok=True)
    write, _ = _fio(fio, "write", size, count, path)
    return [write, *_fio(fio, "randread", size, count, path)]


def _fio(fio: str, pattern: str, size: int, count: int, path: Path) -> tuple[float, float]:
    """Return GB/s and CPU seconds a GB for the same number of transfers of the same size as ours."""
    arguments = [f"--name={pattern}", f"--filename={path}", f"--rw={pattern}", f"--bs={size}", f"--size={size * count}"]
    command = [fio, *arguments, "--fallocate=posix", *_FIO_ARGUMENTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    job = json.loads(found.stdout)["jobs"][0]
    gb_s = float(job["write" if pattern == "write" else "read"]["bw_bytes"]) / 1e9
    return gb_s, (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100 / gb_s


def _fio_version(fio: str) -> str:
    return subprocess.run([fio, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def table(result: DiskBenchResult) -> Table:
    """Return the result as people read it."""
    title = f"disk tier beside {result.fio or 'nothing'}, medians of {result.rounds} rounds in {result.folder}"
    shown = Table(
        "object",
        "write GB/s",
        "fio",
        "ratio",
        "read + verify GB/s",
        "fio",
        "ratio",
        "CPU s/GB read",
        "fio",
        title=title,
    )
    for row in result.rows:
        write, read = (row.write_gb_s, row.fio_write_gb_s), (row.read_gb_s, row.fio_read_gb_s)
        figures = (*write, row.write_vs_fio, *read, row.read_vs_fio, row.cpu_s_per_gb_read, row.fio_cpu_s_per_gb_read)
        shown.add_row(f"{row.object_bytes / 2**20:g} MiB", *(_figure(value) for value in figures))
    shown.caption = result.note or None
    return shown


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
