"""Speed of the entropy coders: one pinned core, 128 tables switching every 256 symbols, fp16 out, DRAM to DRAM.

Speed is in 10^9 symbols a second, median of repeats with the 10th and 90th percentile beside it.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.entropy import EntropyTables, RansTables, Runs, Streams, rans_paths
from kvtide.codec.published.integers import PrefixTables
from kvtide.codec.tide import TideCodec
from kvtide_lab.judge.quality import block_metas, capture_blocks

TABLES = 128
RUN_SYMBOLS = 256
STREAM_SYMBOLS = 65536
SEED = 20251121
# Output far beyond any cache, so that decode_vs_memcpy compares memory with memory.
STREAMS_FULL, STREAMS_QUICK = 1024, 512
SECONDS_FULL, SECONDS_QUICK = 6.0, 1.0


class PathSpeed(msgspec.Struct, frozen=True):
    """One coder on one instruction set."""

    path: str
    coder: str
    decode_gsym_s: float
    decode_spread: tuple[float, float]
    encode_gsym_s: float
    encode_spread: tuple[float, float]
    decode_vs_memcpy: float
    size_over_entropy: float
    size_over_rans: float


class TideSpeed(msgspec.Struct, frozen=True):
    """One profile, all refinements decoded; 10^9 elements in a second of CPU, median, 10th and 90th percentile.

    `decode_over_prefill` is decoding on one core over prefill on all, `encode_over_decode` the time of encoding over
    that of decoding.
    """

    profile: str
    kv_dtype: str
    quality: float
    refinements: int
    bits_per_element: float
    decode_gelem_s: float
    decode_spread: tuple[float, float]
    encode_gelem_s: float
    encode_spread: tuple[float, float]
    decode_s_per_token: float
    prefill_s_per_token: float
    decode_over_prefill: float
    encode_over_decode: float


class CodecSpeed(msgspec.Struct, frozen=True):
    """Best rANS path on top, every path and coder in `rows`, whole blocks through tide in `tide`.

    `tide_decode_gelem_s` is each profile's fastest object.
    """

    decode_gsym_s: float
    decode_vs_memcpy: float
    encode_gsym_s: float
    size_over_entropy: float
    two_core_scaling: float | None
    has_avx512: bool
    path: str
    memcpy_gb_s: float
    tables: int
    run_symbols: int
    stream_symbols: int
    output_mb: float
    rows: list[PathSpeed]
    tide_decode_gelem_s: dict[str, float] = {}
    tide: list[TideSpeed] = []


class Workload(NamedTuple):
    """Symbols of bell-shaped tables, and what they decode to."""

    symbols: NDArray[np.uint8]
    runs: Runs
    counts: NDArray[np.uint64]
    values: NDArray[np.uint16]
    out: NDArray[np.uint16]


class MeasuredRate(NamedTuple):
    """Median and spread of a rate."""

    median: float
    spread: tuple[float, float]


def run(quick: bool) -> CodecSpeed:
    """Measure everything on one core, then rANS decoding on two. Takes about 20 s quick, 2 minutes in full."""
    seconds = SECONDS_QUICK if quick else SECONDS_FULL
    work = make_workload(STREAMS_QUICK if quick else STREAMS_FULL)
    with pinned():
        memcpy = measure_memcpy(work.out, seconds)
        rows: list[PathSpeed] = []
        for path in rans_paths():
            for coder in (RansTables, PrefixTables):
                rows.append(
                    measure_path(coder.name, path, coder.build(work.counts, path), work, memcpy.median, seconds, rows)
                )
    best = max((row for row in rows if row.coder == "rans"), key=lambda row: row.decode_gsym_s)
    return CodecSpeed(
        decode_gsym_s=best.decode_gsym_s,
        decode_vs_memcpy=best.decode_vs_memcpy,
        encode_gsym_s=max(row.encode_gsym_s for row in rows if row.coder == "rans"),
        size_over_entropy=best.size_over_entropy,
        two_core_scaling=measure_two_cores(RansTables.build(work.counts, best.path), work, seconds),
        has_avx512=any(path.startswith("avx512") for path in rans_paths()),
        path=best.path,
        memcpy_gb_s=round(memcpy.median * work.out.itemsize, 3),
        tables=TABLES,
        run_symbols=RUN_SYMBOLS,
        stream_symbols=STREAM_SYMBOLS,
        output_mb=round(work.out.nbytes / 1e6, 1),
        rows=rows,
    )


def with_tide(result: CodecSpeed, rows: list[TideSpeed]) -> CodecSpeed:
    """Return the result with what was measured of tide."""
    best: dict[str, float] = {}
    for row in rows:
        best[row.profile] = max(row.decode_gelem_s, best.get(row.profile, 0.0))
    return msgspec.structs.replace(result, tide_decode_gelem_s=best, tide=rows)


def make_workload(streams: int) -> Workload:
    """Return symbols of two-sided geometric tables from 1.5 to 3.3 bits. Rows repeat after 32 streams."""
    rng = np.random.default_rng(SEED)
    deviations = np.geomspace(0.75, 2.7, TABLES)
    shares = np.exp(-np.abs(np.arange(32) - 15)[None] / deviations[:, None])
    shares /= shares.sum(axis=1, keepdims=True)
    runs_per_stream = STREAM_SYMBOLS // RUN_SYMBOLS
    run_tables = np.tile((np.arange(runs_per_stream) % TABLES).astype(np.uint16), (streams, 1))
    distinct = min(streams, 32)
    drawn = np.empty((distinct, runs_per_stream, RUN_SYMBOLS), dtype=np.uint8)
    counts = np.zeros((TABLES, 32), dtype=np.uint64)
    for table in range(TABLES):
        part = rng.choice(32, size=(distinct, runs_per_stream // TABLES, RUN_SYMBOLS), p=shares[table])
        drawn[:, table::TABLES] = part
        counts[table] = np.bincount(part.ravel(), minlength=32)
    symbols = np.resize(drawn.reshape(distinct, STREAM_SYMBOLS), (streams, STREAM_SYMBOLS))
    values = rng.normal(size=(TABLES, 32)).astype(np.float16).view(np.uint16)
    out = np.zeros((streams, STREAM_SYMBOLS), dtype=np.uint16)
    return Workload(symbols, Runs(run_tables, RUN_SYMBOLS), counts, values, out)


def measure_path(
    coder: str,
    path: str,
    tables: EntropyTables,
    work: Workload,
    memcpy_gsym_s: float,
    seconds: float,
    earlier: list[PathSpeed],
) -> PathSpeed:
    """Return a coder's row. `earlier` holds the same path's rANS row, if there is one."""
    streams = tables.encode(work.symbols, work.runs)
    decode_all = decoder(tables, streams, work, work.out)
    decode_all()
    assert np.array_equal(work.out[0, :RUN_SYMBOLS], work.values[0][work.symbols[0, :RUN_SYMBOLS]])
    decode = measure(decode_all, work.symbols.size, seconds)
    some, some_runs = work.symbols[:64], Runs(work.runs.tables[:64], RUN_SYMBOLS)
    encode = measure(lambda: tables.encode(some, some_runs), some.size, seconds)
    entropy_bytes = entropy_bits(work.counts) / 8 * len(work.symbols) / min(len(work.symbols), 32)
    size = sum(streams.sizes)
    over_entropy = size / entropy_bytes - 1
    rans = next((row.size_over_entropy for row in earlier if row.path == path and row.coder == "rans"), over_entropy)
    return PathSpeed(
        path=path,
        coder=coder,
        decode_gsym_s=decode.median,
        decode_spread=decode.spread,
        encode_gsym_s=encode.median,
        encode_spread=encode.spread,
        decode_vs_memcpy=round(decode.median / memcpy_gsym_s, 3),
        size_over_entropy=round(over_entropy, 5),
        size_over_rans=round((1 + over_entropy) / (1 + rans) - 1, 5),
    )


def entropy_bits(counts: NDArray[np.uint64]) -> float:
    """Return the bits of all counted symbols under their own tables' exact shares."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(-np.where(counts > 0, counts * np.log2(shares), 0).sum())


def decoder(tables: EntropyTables, streams: Streams, work: Workload, out: NDArray[np.uint16]) -> Callable[[], None]:
    """Return a call that decodes all streams into `out`."""
    return lambda: tables.decode(streams, work.runs, work.values, out)


def measure_memcpy(out: NDArray[np.uint16], seconds: float) -> MeasuredRate:
    """Return the rate of copying as many bytes as decoding writes, in 10^9 elements a second."""
    source = np.arange(out.size, dtype=np.uint16).reshape(out.shape)
    return measure(lambda: np.copyto(out, source), out.size, seconds)


def measure(
    call: Callable[[], object], symbols: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> MeasuredRate:
    """Return 10^9 symbols a second over at least 5 calls and about `seconds`, after one call that does not count.

    clock: what a call is timed by.
    """
    call()
    rates: list[float] = []
    stop = time.perf_counter() + seconds
    while len(rates) < 5 or time.perf_counter() < stop:
        start = clock()
        call()
        rates.append(symbols / (clock() - start) / 1e9)
    low, *_, high = statistics.quantiles(rates, n=10)
    return MeasuredRate(round(statistics.median(rates), 4), (round(low, 4), round(high, 4)))


def measure_two_cores(tables: EntropyTables, work: Workload, seconds: float) -> float | None:
    """Return how much more two threads on two cores decode than one, or None with one core.

    Outputs of 4 MB a thread: whether cores scale is asked here, not whether the memory does.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return None
    rows = 32
    streams = tables.encode(work.symbols[:rows], Runs(work.runs.tables[:rows], RUN_SYMBOLS))
    part = work._replace(runs=Runs(work.runs.tables[:rows], RUN_SYMBOLS))
    # Alternating, so that a busy moment hurts both alike.
    ratios = []
    for _ in range(5):
        one = decode_on(cores[:1], tables, streams, part, rows, seconds / 4)
        two = decode_on(cores, tables, streams, part, rows, seconds / 4)
        ratios.append(two / one)
    return round(statistics.median(ratios), 3)


def decode_on(
    cores: list[int], tables: EntropyTables, streams: Streams, work: Workload, rows: int, seconds: float
) -> float:
    """Return calls a second of one thread pinned to each core, all together; each makes at least one."""
    rates = [0.0] * len(cores)
    barrier = threading.Barrier(len(cores) + 1)
    done = threading.Event()

    def decode_until_done(index: int) -> None:
        os.sched_setaffinity(0, {cores[index]})
        out = np.zeros((rows, STREAM_SYMBOLS), dtype=np.uint16)
        decode = decoder(tables, streams, work, out)
        decode()
        barrier.wait()
        calls, start = 0, time.perf_counter()
        while calls == 0 or not done.is_set():
            decode()
            calls += 1
        rates[index] = calls / (time.perf_counter() - start)

    threads = [threading.Thread(target=decode_until_done, args=(index,)) for index in range(len(cores))]
    for thread in threads:
        thread.start()
    barrier.wait()
    time.sleep(seconds)
    done.set()
    for thread in threads:
        thread.join()
    return sum(rates)


@contextmanager
def pinned() -> Iterator[None]:
    """Keep this thread on the last of its cores, the one that interrupts like least, until the block ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


QUALITY = 5e-3
REFINEMENTS = (0, 1, 2)
PREFILL_TOKENS = 1024
TIDE_SECONDS_QUICK = 0.7


class _Work(NamedTuple):
    meta: BlockMeta
    bits: BlockBits


def tide_speeds(
    model: Any, ids: Sequence[int], layout: BlockLayout, profiles: Sequence[Profile], quick: bool
) -> list[TideSpeed]:
    """Measure every tide profile that fits on the text's third block, as bfloat16. ValueError for a shorter text."""
    if len(ids) < PREFILL_TOKENS:
        raise ValueError(f"the text must have {PREFILL_TOKENS} tokens, got {len(ids)}")
    ids = ids[:PREFILL_TOKENS]
    prefill_s = _prefill_s_per_token(lambda: capture_blocks(model, ids, layout))
    block = capture_blocks(model, ids, layout)[2]
    narrow = BlockLayout(layout.layers, layout.tokens, layout.kv_heads, layout.head_dim, KVDtype.BFLOAT16)
    work = _Work(block_metas(ids, narrow)[2], _bfloat(block))
    seconds = TIDE_SECONDS_QUICK if quick else SECONDS_FULL
    with pinned():
        return [
            _measured(profile, refinements, work, prefill_s, seconds)
            for profile in profiles
            if profile.kind.startswith("tide") and profile.fits(narrow)
            for refinements in REFINEMENTS
        ]


def _prefill_s_per_token(prefill: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        prefill()
        times.append(time.perf_counter() - start)
    return median(times) / PREFILL_TOKENS


def _bfloat(bits: NDArray[Any]) -> BlockBits:
    """Return float32 patterns as bfloat16 ones, cut: what is measured is speed."""
    return (bits >> np.uint32(16)).astype(np.uint16)


def _measured(profile: Profile, refinements: int, work: _Work, prefill_s: float, seconds: float) -> TideSpeed:
    codec, (meta, bits) = TideCodec(profile, QUALITY, refinements), work
    sections, out = codec.encode(meta, bits), np.empty_like(bits)
    # One thread: its CPU time is what it takes on a core of its own, whatever else runs.
    decode = measure(lambda: codec.decode(meta, sections, out), bits.size, seconds, time.thread_time)
    encode = measure(lambda: codec.encode(meta, bits), bits.size, seconds, time.thread_time)
    decode_s = bits.size / meta.layout.tokens / (decode.median * 1e9)
    return TideSpeed(
        profile=profile.kind,
        kv_dtype=meta.layout.dtype.value,
        quality=QUALITY,
        refinements=refinements,
        bits_per_element=8 * sum(len(section.data) for section in sections) / bits.size,
        decode_gelem_s=decode.median,
        decode_spread=decode.spread,
        encode_gelem_s=encode.median,
        encode_spread=encode.spread,
        decode_s_per_token=decode_s,
        prefill_s_per_token=prefill_s,
        decode_over_prefill=decode_s / prefill_s,
        encode_over_decode=decode.median / encode.median,
    )
