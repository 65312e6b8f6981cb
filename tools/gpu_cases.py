"""The cases that tools/gpu.py times, on a GPU or, at small sizes and without times, on the kernels' twin."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_swap import KernelSwapper
from kvtide.block import BlockLayout, KVDtype
from kvtide.codec.entropy import RansTables, Runs, Streams
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.memory import DevicePiece
from kvtide_gpu.pages import KernelPages
from rans_calls import prepare_decode, prepare_encode
from twin import TwinKernels

REPEATS, WARM_UPS = 9, 2
GIB = 1 << 30
# As `kvtide-lab bench codec-speed` has them.
TABLES, RUN_SYMBOLS, STREAM_SYMBOLS = 128, 256, 1 << 16


class Size(NamedTuple):
    """The amount of timing: data several times the device's L2, or as little as shows that it works."""

    streams: int
    blocks: int
    swap_bytes: int
    matrix: int


FULL = Size(streams=16_384, blocks=192, swap_bytes=GIB, matrix=8192)
DRY = Size(streams=4, blocks=1, swap_bytes=1 << 16, matrix=64)


def is_real(kernels: Kernels) -> bool:
    """Tell whether these run on a GPU."""
    return not isinstance(kernels, TwinKernels)


def seconds(kernels: Kernels, work: Callable[[], object]) -> float | None:
    """Return the median time of `work` on the kernels' stream; in a dry run do it once and return None."""
    if not is_real(kernels):
        work()
        return None
    times: list[float] = []
    for repeat in range(WARM_UPS + REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with kernels.queue():
            start.record()
        work()
        with kernels.queue():
            stop.record()
        kernels.finish()
        if repeat >= WARM_UPS:
            times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def rate(amount: float, took_s: float | None, unit: float) -> float | None:
    """Return so many units a second, None if it was not timed."""
    return None if took_s is None else amount / took_s / unit


def ratio(value: float | None, whole: float | None) -> float | None:
    """Return the quotient of two figures, None if one is."""
    return None if value is None or whole is None else value / whole


def copy_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """A copy inside the device, of as much as decoding writes."""
    count = 2 * size.streams * STREAM_SYMBOLS if is_real(kernels) else 1024
    with kernels.queue():
        source = torch.randint(-128, 128, (count,), dtype=torch.int8, device=kernels.device)
        target = torch.empty_like(source)

    def copy() -> None:
        with kernels.queue():
            target.copy_(source)

    took = seconds(kernels, copy)
    return {"memcpy_gb_s": rate(2 * count, took, 1e9), "memcpy_bytes": count}


def rans_data(count: int) -> tuple[RansTables, Runs, np.ndarray]:
    """Symbols of 128 tables of many spreads, about 2.6 bits each, a table for 256 symbols."""
    rng = np.random.default_rng(5)
    spreads = np.geomspace(0.5, 4.0, TABLES)
    counts = 1 + 1e5 * np.exp(-np.abs(np.arange(32) - 15) / spreads[:, None])
    tables = RansTables.build(counts.astype(np.uint64))
    run_tables = rng.integers(0, TABLES, (count, STREAM_SYMBOLS // RUN_SYMBOLS), dtype=np.uint16)
    shares = np.cumsum(tables.rows, axis=1)
    draws = rng.integers(0, 4096, (count, STREAM_SYMBOLS // RUN_SYMBOLS, RUN_SYMBOLS))
    symbols = (draws[..., None] >= shares[run_tables][:, :, None, :]).sum(axis=-1, dtype=np.uint8)
    return tables, Runs(run_tables, RUN_SYMBOLS), symbols.reshape(count, STREAM_SYMBOLS)


def rans_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """rANS alone: symbols to fp16 and back, checked against the processor's streams."""
    distinct = min(32, size.streams)
    tables, runs, symbols = rans_data(distinct)
    coded = tables.encode(symbols, runs)
    times = size.streams // distinct
    many = Streams(bytes(coded.data) * times, list(coded.sizes) * times)
    many_runs = Runs(np.tile(runs.tables, (times, 1)), RUN_SYMBOLS)
    values = np.tile(np.arange(32, dtype=np.uint16), (TABLES, 1))
    decode = prepare_decode(kernels, tables, many, many_runs, values, STREAM_SYMBOLS)
    total = size.streams * STREAM_SYMBOLS
    decode_s = seconds(kernels, decode.launch)
    # All of it: a copy may be wrong only under load.
    assert np.array_equal(
        decode.result().reshape(times, *symbols.shape), np.broadcast_to(symbols, (times, *symbols.shape))
    )
    del decode
    encode = prepare_encode(kernels, tables, np.tile(symbols, (times, 1)), many_runs)
    encode_s = seconds(kernels, encode.launch)
    pack_s = seconds(kernels, encode.pack)
    assert encode.result().data == many.data
    return {
        "symbols": total,
        "bits": 8 * sum(coded.sizes) / symbols.size,
        "decode_tsym_s": rate(total, decode_s, 1e12),
        "decode_fp16_tb_s": rate(2 * total, decode_s, 1e12),
        "encode_tsym_s": rate(total, encode_s, 1e12),
        "encode_packed_tsym_s": None if encode_s is None or pack_s is None else total / (encode_s + pack_s) / 1e12,
    }


def host_seconds(kernels: Kernels, work: Callable[[], object]) -> float | None:
    """Return the median time of `work`, which waits for what it queues; in a dry run do it once and return None."""
    times = []
    for _ in range(WARM_UPS + 5 if is_real(kernels) else 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[WARM_UPS:]) if is_real(kernels) else None


def swap_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """Scattered pages of 64 KiB out and in, beside one copy of the same bytes and torch's copies page by page."""
    page_bytes, layer_count = (64 << 10, 32) if is_real(kernels) else (1024, 4)
    count = size.swap_bytes // page_bytes // layer_count
    with kernels.queue():
        shape = (2 * count, page_bytes)
        layers = [torch.randint(-128, 128, shape, dtype=torch.int8, device=kernels.device) for _ in range(layer_count)]
    kernels.finish()
    pages = np.random.default_rng(1).permutation(2 * count)[:count].tolist()
    slots = list(range(count))
    pin = is_real(kernels)
    host = torch.empty(count * layer_count * page_bytes, dtype=torch.int8, pin_memory=pin)
    whole = torch.empty_like(host, device=kernels.device)

    def waited(action: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            action()
            if pin:
                torch.cuda.synchronize()

        return run

    def by_page() -> None:
        room = host.view(count, layer_count, page_bytes)
        for slot, page in enumerate(pages):
            for layer, data in enumerate(layers):
                room[slot, layer].copy_(data[page], non_blocking=True)

    out_limit = host_seconds(kernels, waited(lambda: host.copy_(whole, non_blocking=True)))
    in_limit = host_seconds(kernels, waited(lambda: whole.copy_(host, non_blocking=True)))
    torch_out = host_seconds(kernels, waited(by_page))
    before = [layer[pages].clone() for layer in layers]
    with KernelSwapper(kernels, layers, count) as swapper:
        out = host_seconds(kernels, lambda: swapper.swap_out(pages, slots).wait())
        for layer in layers:
            layer.zero_()
        into = host_seconds(kernels, lambda: swapper.swap_in(slots, pages).wait())
    assert all(torch.equal(layer[pages], old) for layer, old in zip(layers, before, strict=True))
    total = count * layer_count * page_bytes
    return {
        "bytes": total,
        "pinned_out_gb_s": rate(total, out_limit, 1e9),
        "pinned_in_gb_s": rate(total, in_limit, 1e9),
        "swap_out_of_pinned": ratio(out_limit, out),
        "swap_in_of_pinned": ratio(in_limit, into),
        "torch_by_page_out_of_pinned": ratio(out_limit, torch_out),
    }


def overlap_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """By what factor a swap of 1 GiB slows products of bf16 matrices on an engine's stream that goes first.

    Out of pages in large pieces; and, as vLLM's worker does it, blocks out of scattered pages and into others.
    """
    page_bytes, layer_count = (64 << 10, 32) if is_real(kernels) else (1024, 4)
    count = size.swap_bytes // page_bytes // layer_count
    dtype = torch.bfloat16 if is_real(kernels) else torch.float32
    a, b = (torch.randn(size.matrix, size.matrix, device=kernels.device).to(dtype) for _ in range(2))
    layers = [torch.zeros((count, page_bytes), dtype=torch.int8, device=kernels.device) for _ in range(layer_count)]
    # About as long as the swap takes: a longer loop would hide it.
    repeats = 15 if is_real(kernels) else 1
    stream = torch.cuda.Stream(priority=-1) if is_real(kernels) else None
    if stream is not None:
        torch.cuda.synchronize()

    def products(begin: Callable[[], Callable[[], object]] | None) -> float:
        start = time.perf_counter()
        wait = begin() if begin else None
        if stream is None:
            torch.mm(a, b)
        else:
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    torch.mm(a, b)
            stream.synchronize()
        took = time.perf_counter() - start
        if wait is not None:
            wait()
        return took

    def slowdown(begin: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        pairs = [(products(None), products(begin)) for _ in range(7 if is_real(kernels) else 1)]
        alone, beside = median(pair[0] for pair in pairs[-5:]), median(pair[1] for pair in pairs[-5:])
        return alone, beside / alone

    pages = list(range(count))
    with KernelSwapper(kernels, layers, count) as swapper:
        alone, of_pieces = slowdown(lambda: swapper.swap_out(pages, pages).wait)
    with ThreadPoolExecutor(1) as worker, engine_pages(kernels) as engine:
        blocks = max(1, size.swap_bytes // (2 * engine.pool.layout.raw_bytes))

        def turn() -> None:
            for _ in range(blocks):
                engine.pool.capture(engine.first).restore(engine.second, 0)

        _, of_blocks = slowdown(lambda: worker.submit(turn).result)
        assert np.array_equal(engine.pool.capture(engine.second).block(), engine.pool.capture(engine.first).block())
    if not is_real(kernels):
        return {"gemm_slowdown": None, "gemm_slowdown_of_blocks": None}
    return {
        "gemm_s": alone,
        "gemm_tflop_s": repeats * 2 * size.matrix**3 / alone / 1e12,
        "gemm_slowdown": of_pieces,
        "gemm_slowdown_of_blocks": of_blocks,
    }


class EnginePages(NamedTuple):
    """An engine's pages, and those of two blocks among them, scattered."""

    pool: KernelPages
    first: list[int]
    second: list[int]


@contextmanager
def engine_pages(kernels: Kernels) -> Iterator[EnginePages]:
    """Pages of an 8B model's shape, with any values."""
    layers, heads, head_dim = (32, 8, 128) if is_real(kernels) else (2, 2, 8)
    layout = BlockLayout(layers, 256 if is_real(kernels) else 32, heads, head_dim, KVDtype.BFLOAT16)
    count = layout.tokens // 16
    with kernels.queue():
        rooms = torch.randn((layers, 3 * count, heads, 16, 2 * head_dim), device=kernels.device).to(torch.bfloat16)
    kernels.finish()
    order = np.random.default_rng(2).permutation(3 * count).tolist()
    pool = KernelPages(kernels, list(rooms), layout)
    try:
        yield EnginePages(pool, order[:count], order[count : 2 * count])
    finally:
        pool.close()


def pages_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """Blocks between scattered pages and this machine, bytes to the device's memory and back, as vLLM's worker does."""
    with engine_pages(kernels) as (pool, first, second):
        bits = pool.capture(first).block().copy()
        out_s = host_seconds(kernels, lambda: pool.capture(first).wait())
        in_s = host_seconds(kernels, lambda: pool.scatter(bits, second, 0))
        assert np.array_equal(pool.capture(second).block(), bits)
        room, read = pool.memory.reserve(bits.nbytes), np.empty_like(bits)
        write_s = host_seconds(kernels, lambda: room.write([DevicePiece(0, bits.reshape(-1).view(np.uint8).data)]))
        read_s = host_seconds(kernels, lambda: room.read([DevicePiece(0, read.reshape(-1).view(np.uint8).data)]))
        assert np.array_equal(read, bits)
        room.close()
    return {
        "block_bytes": bits.nbytes,
        "block_out_gb_s": rate(bits.nbytes, out_s, 1e9),
        "block_in_gb_s": rate(bits.nbytes, in_s, 1e9),
        "tier_write_gb_s": rate(bits.nbytes, write_s, 1e9),
        "tier_read_gb_s": rate(bits.nbytes, read_s, 1e9),
    }
