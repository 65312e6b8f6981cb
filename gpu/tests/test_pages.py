"""An engine's pages on a device: moved by kernels, decoded into, and a device that fails at every call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted
from tests.suites import block_meta, smooth_bits

from cases import fitted_groups, on_processor
from faulty import FaultyKernels, Switch
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec, CodecRegistry, LevelledCodec, LosslessCodec
from kvtide.codec.published import CachegenCodec
from kvtide.codec.tide import TideCodec
from kvtide.config import Limits
from kvtide.engines.paged.device import DevicePages
from kvtide.engines.paged.sequence import BlockRef, LoadOrder, StepCommands, StoreOrder
from kvtide.engines.paged.worker import WorkerHalf
from kvtide.errors import DeviceFault
from kvtide.store.cache import Cache, cache_for
from kvtide.types import Section
from kvtide_gpu.kernels import CudaKernels, Kernels
from kvtide_gpu.pages import KernelPages, proved_pages
from lying import Change, LyingKernels
from twin import needs_compiler

pytestmark = needs_compiler
PAGE_TOKENS = 8
LAYOUT = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
# Heads of 12 bytes: no whole 16 in them.
ODD = BlockLayout(layers=2, tokens=16, kv_heads=3, head_dim=6, dtype=KVDtype.FLOAT16)
WIDE = BlockLayout(layers=2, tokens=16, kv_heads=1, head_dim=4, dtype=KVDtype.FLOAT32)
CODEC = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 2).rounded()
# As little as takes every device call: emulation is slow.
SMALL = BlockLayout(layers=2, tokens=24, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
SMALL_PROFILE = fitted(SMALL, "light", 1)
SMALL_CODEC = TideCodec(SMALL_PROFILE, 8e-2, 1).rounded()
GROUPS_PROFILE = fitted_groups("cachegen", SMALL)
GROUPS_CODEC = CachegenCodec(2, 0, GROUPS_PROFILE)
TORCH = {KVDtype.BFLOAT16: torch.bfloat16, KVDtype.FLOAT16: torch.float16, KVDtype.FLOAT32: torch.float32}


def engine_layers(kernels: Kernels, layout: BlockLayout, axes: Sequence[int] = (4, 0, 1, 2, 3)) -> list[torch.Tensor]:
    """Zeroed layers (pages, heads, tokens, content) whose memory is in the order of `axes`; 4 is the layer."""
    sizes = (24, layout.kv_heads, PAGE_TOKENS, 2 * layout.head_dim, layout.layers)
    storage = torch.zeros([sizes[axis] for axis in axes], dtype=TORCH[layout.dtype], device=kernels.device)
    return list(storage.permute([axes.index(axis) for axis in (4, 0, 1, 2, 3)]))


@contextmanager
def pages_of(kernels: Kernels, layers: list[torch.Tensor], layout: BlockLayout = LAYOUT) -> Iterator[KernelPages]:
    pool = KernelPages(kernels, layers, layout)
    try:
        yield pool
    finally:
        pool.close()


def held(layers: list[torch.Tensor], layout: BlockLayout, pages: list[int]) -> BlockBits:
    return DevicePages.of_rows(layers, layout).capture(pages).block()


@pytest.mark.parametrize("layout", [LAYOUT, ODD, WIDE])
@pytest.mark.parametrize("axes", [(4, 0, 1, 2, 3), (4, 0, 2, 1, 3), (0, 4, 2, 1, 3), (4, 1, 0, 2, 3)])
def test_blocks_come_and_go_in_every_stride_order(kernels: Kernels, layout: BlockLayout, axes: Sequence[int]) -> None:
    layers, bits = engine_layers(kernels, layout, axes), smooth_bits(layout, 3)
    count = layout.tokens // PAGE_TOKENS
    first, second = [9, 1, 4, 7][:count], [3, 8, 2, 5][:count]
    with pages_of(kernels, layers, layout) as pool:
        pool.follow()
        pool.scatter(bits, first, 0)
        assert np.array_equal(held(layers, layout, first), bits)
        captured = pool.capture(first)
        captured.wait()
        for layer in layers:
            layer.zero_()
        assert np.array_equal(captured.block(), bits)
        # Otherwise a slow device may zero what has come in.
        pool.follow()
        captured.restore(second[1:], 1)
        found = held(layers, layout, second)
    assert np.array_equal(found[:, :, PAGE_TOKENS:], bits[:, :, PAGE_TOKENS:])
    others = [page for page in range(24) if page not in second[1:]]
    assert not any(layer[others].any() for layer in layers)


def test_memory_of_captured_blocks_is_taken_before_they_come(kernels: Kernels) -> None:
    layers, is_wanted = engine_layers(kernels, LAYOUT), iter([True, True, True, False])
    is_cuda = kernels.device.type == "cuda"
    with pages_of(kernels, layers) as pool:
        pool.capture(range(4)).wait()
        pool.reserve(8, lambda: next(is_wanted))
        assert next(is_wanted, None) is None
        pinned = torch.cuda.host_memory_stats()["num_host_alloc"] if is_cuda else 0
        captured = [pool.capture(range(4)) for _ in range(3)]
        assert not is_cuda or torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
        assert all(len(each.block()) == LAYOUT.layers for each in captured)
        assert pool.room_bytes >= LAYOUT.raw_bytes


def coded(
    position: int, layout: BlockLayout = LAYOUT, codec: Codec = CODEC
) -> tuple[BlockMeta, list[Section], BlockBits]:
    meta = block_meta(layout, 3, position)
    sections = codec.encode(meta, smooth_bits(layout, 40 + position))
    return meta, sections, on_processor(codec, meta, sections)


def test_blocks_of_many_callers_are_decoded_into_their_pages(kernels: Kernels) -> None:
    layers, blocks = engine_layers(kernels, LAYOUT), [coded(position) for position in range(5)]

    def decode(i: int) -> bool:
        meta, sections, _ = blocks[i]
        return pool.decode(CODEC, meta, sections, range(4 * i, 4 * i + 4), 0)

    with pages_of(kernels, layers) as pool, ThreadPoolExecutor(5) as callers:
        pool.follow()
        assert all(callers.map(decode, range(5), timeout=60))
    for i, (_, _, bits) in enumerate(blocks):
        assert np.array_equal(held(layers, LAYOUT, [*range(4 * i, 4 * i + 4)]), bits)
    assert not any(layer[20:].any() for layer in layers)


def test_what_can_not_be_decoded_is_left_to_the_processor(kernels: Kernels) -> None:
    layers = engine_layers(kernels, LAYOUT)
    meta, sections, _ = coded(0)
    bad = sections[0]._replace(data=bytes(sections[0].data)[:-2])
    with pages_of(kernels, layers) as pool:
        assert not pool.decode(LosslessCodec(), meta, sections, [0, 1, 2, 3], 0)
        assert not pool.decode(TideCodec(), meta, sections, [0, 1, 2, 3], 0)
        assert not pool.decode(CODEC, meta, [bad, *sections[1:]], [0, 1, 2, 3], 0)
    assert not any(layer.any() for layer in layers)


def test_paths_along_a_trellis_are_the_processors(kernels: Kernels) -> None:
    layers, codec = engine_layers(kernels, LAYOUT), TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 2)
    assert codec.steps.is_trellis
    meta, sections, _ = coded(0, codec=codec)
    rounded, bits = [coded(0)[1], smooth_bits(LAYOUT, 40)]
    with pages_of(kernels, layers) as pool:
        assert not pool.decode(codec, meta, sections, [0, 1, 2, 3], 0)
        assert not any(layer.any() for layer in layers)
        assert pool.encoder(codec).encode(meta, bits) == rounded
        # What is asked for is rounded levels' quality, too.
        assert pool.decode(codec, meta, rounded, [0, 1, 2, 3], 0)


class MissingKernels(CudaKernels):
    """A device that does not take the kernels, for a reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [ImportError("no cuda.bindings"), DeviceFault("old driver"), RuntimeError("CUDA")])
def test_torch_copies_where_the_kernels_can_not_be_had(error: Exception, kernels: Kernels) -> None:
    plain = DevicePages.of_rows(engine_layers(kernels, LAYOUT), LAYOUT)
    assert proved_pages(MissingKernels(error), plain, (), SystemClock(), is_asked_for=True) is plain
    assert plain.memory is None


CODECS: list[Codec] = [SMALL_CODEC, GROUPS_CODEC]


def less(kernel: str, at: int, by: int = 1) -> Change:
    """Make one of a kernel's fields less: by as much as keeps every access within."""
    return lambda name, args: [*args[:at], args[at] - by, *args[at + 1 :]] if name == kernel else args


def without(kernel: str) -> Change:
    return lambda name, args: None if name == kernel else args


LIES: dict[str, Change] = {
    "another direction": lambda name, args: [*args[:-1], 1 - args[-1]] if name == "block_copy" else args,
    "a layer less": less("block_copy", 3),
    "a token less": less("block_copy", 4),
    "a head less": less("block_copy", 5),
    "less of a head": less("block_copy", 6, 16),
    "another stride": less("block_copy", 7, 16),
    "one half less": less("groups_restore", 1),
    "one half less, encoded": less("groups_quantise", 1),
    **{f"no {each}": without(each) for each in ("block_copy", "groups_restore", "rans_decode", "tide_restore_ordered")},
    "no integers_encode": without("integers_encode"),
}


def proved(kernels: Kernels, change: Change, is_asked_for: bool = True, clock: Clock | None = None) -> tuple[Any, Any]:
    """Return what pages of made-up kernels are taken for, and torch's own."""
    plain = DevicePages.of_rows(engine_layers(kernels, SMALL), SMALL)
    lying: Any = LyingKernels(kernels, change)
    return proved_pages(lying, plain, CODECS, clock or SystemClock(), is_asked_for), plain


@pytest.mark.parametrize("lie", LIES)
def test_kernels_that_lie_are_not_used(kernels: Kernels, lie: str, caplog: Any) -> None:
    pool, plain = proved(kernels, LIES[lie])
    assert pool is plain
    assert "kernels failed their proof: " in caplog.text


def honest(name: str, args: list[int]) -> list[int]:
    return args


def test_kernels_that_are_asked_for_are_used_once_they_are_proved(kernels: Kernels) -> None:
    pool, plain = proved(kernels, honest)
    assert isinstance(pool, KernelPages) and not any(pool.is_wrong(codec) for codec in CODECS)
    assert not any(layer.pages.any() for layer in plain.layers)
    pool.close()


class _Strides(SystemClock):
    """Each step is as long as given: of a race, out and in, by kernels and then by torch."""

    def __init__(self, *steps_s: float) -> None:
        self._times = itertools.accumulate(itertools.chain([0.0], steps_s, itertools.repeat(0.0)))

    def monotonic_s(self) -> float:
        return next(self._times)


@pytest.mark.parametrize("kernels_s", [0.5, 2.0])
def test_kernels_that_nobody_asked_for_are_used_where_they_are_faster(kernels: Kernels, kernels_s: float) -> None:
    # From the start to the race, then three times each.
    clock = _Strides(*[9.0, kernels_s] * 3, *[9.0, 1.0] * 3)
    pool, plain = proved(kernels, honest, is_asked_for=False, clock=clock)
    assert (pool is not plain) == (kernels_s < 1.0)
    if pool is not plain:
        pool.close()


def test_codec_that_comes_later_is_proved_by_its_first_block(kernels: Kernels, caplog: Any) -> None:
    meta, sections, bits = coded(0, SMALL, GROUPS_CODEC)
    layers, wrong = engine_layers(kernels, SMALL), LIES["one half less"]
    lying: Any = LyingKernels(kernels, wrong)
    with pages_of(lying, layers, SMALL) as pool:
        assert not pool.decode(GROUPS_CODEC, meta, sections, [1, 2], 1)
        assert not pool.is_wrong(GROUPS_CODEC)
        assert not pool.decode(GROUPS_CODEC, meta, sections, [1, 2, 3], 0)
        assert pool.is_wrong(GROUPS_CODEC) and "otherwise than the processor" in caplog.text
    with pages_of(kernels, layers, SMALL) as pool:
        assert pool.decode(GROUPS_CODEC, meta, sections, [1, 2, 3], 0)
        assert np.array_equal(held(layers, SMALL, [1, 2, 3]), bits)


class Engine:
    """A worker half over a device's pages: blocks that were computed, then loaded into other pages."""

    def __init__(self, pool: KernelPages, layers: list[torch.Tensor], kept_bytes_max: int, codec: Codec) -> None:
        limits = Limits(device_bytes_max=1 << 20, memory_bytes_max=1 << 22, load_threads=1)
        profiles, codec = [SMALL_PROFILE, GROUPS_PROFILE], pool.encoder(codec)
        self.cache: Cache = cache_for("memory://", codec, CodecRegistry(profiles), limits, device=pool.memory)
        self.cache.open()
        self.layers = layers
        self.worker = WorkerHalf(self.cache, pool, 0, "", SystemClock(), kept_bytes_max)
        metas = [block_meta(SMALL, 3, position) for position in range(2)]
        self.blocks = tuple(BlockRef((meta.id,), (meta.parent,), meta.start) for meta in metas)

    def compute(self) -> None:
        for position in range(2):
            bits = smooth_bits(SMALL, 40 + position)
            DevicePages.of_rows(self.layers, SMALL).scatter(bits, range(3 * position, 3 * position + 3), 0)
        stores = tuple(StoreOrder("a", block, tuple(range(3 * i, 3 * i + 3))) for i, block in enumerate(self.blocks))
        orders = StepCommands(1, (), stores, is_idle=False)
        self.worker.start(orders)
        self.worker.store(orders)
        assert self.cache.flush(100)

    def load(self, request: str, pages: list[int]) -> set[int]:
        """Return the pages that were not filled."""
        self.worker.start(StepCommands(2, (LoadOrder(request, self.blocks, tuple(pages), 0, 30.0),), (), is_idle=True))
        for _ in range(6000):
            outcome = self.worker.ended([], is_idle=True)
            if outcome.requests:
                assert outcome.requests == {request}
                return outcome.failed_pages
        raise AssertionError("the load never ended")


EXACT = [smooth_bits(SMALL, 40 + position) for position in range(2)]
LOSSY = {codec.codec_id: [coded(i, SMALL, codec)[2] for i in range(2)] for codec in (SMALL_CODEC, GROUPS_CODEC)}


def scenario(kernels: Kernels, kept_bytes_max: int, codec: Codec = SMALL_CODEC) -> int:
    """Store and load; every page that is said to be filled holds its block. Returns how many were."""
    layers, filled = engine_layers(kernels, SMALL), 0
    with pages_of(kernels, layers, SMALL) as pool:
        engine = Engine(pool, layers, kept_bytes_max, codec)
        engine.compute()
        for request, pages in (("b", list(range(6, 12))), ("c", list(range(12, 18)))):
            failed = engine.load(request, pages)
            for position in range(2):
                mine = pages[3 * position : 3 * position + 3]
                if failed.isdisjoint(mine):
                    found, filled = held(layers, SMALL, mine), filled + 3
                    assert any(np.array_equal(found, bits[position]) for bits in (EXACT, LOSSY[codec.codec_id]))
        engine.worker.check()
        engine.worker.close()
    return filled


@pytest.mark.parametrize(("codec", "kept_bytes_max"), [(SMALL_CODEC, 0), (SMALL_CODEC, 1 << 22), (GROUPS_CODEC, 0)])
@pytest.mark.parametrize("is_lost", [False, True])
def test_device_that_fails_at_any_call_fails_no_request(
    kernels: Kernels, is_lost: bool, codec: Codec, kept_bytes_max: int, fault_factor: int
) -> None:
    """Every call with --nightly; else eight, others for a fault that passes than for one that stays."""
    switch = Switch()
    assert scenario(FaultyKernels(kernels, switch), kept_bytes_max, codec) == 12
    # The first calls are those of a pool being made, which falls back as a whole.
    step = max(3, switch.calls // 8)
    for number in range(4, switch.calls) if fault_factor > 1 else range(4 + is_lost * step // 2, switch.calls, step):
        switch = Switch(number, is_lost)
        filled = scenario(FaultyKernels(kernels, switch), kept_bytes_max, codec)
        assert is_lost or filled >= 6, (number, switch.failed)


@pytest.mark.parametrize("codec", [SMALL_CODEC, GROUPS_CODEC])
def test_decoding_and_encoding_are_the_device_s(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the processor does it")

    # The processor decodes the first block too.
    monkeypatch.setattr(KernelPages, "_is_as_the_processors", lambda *args: True)
    for each in (TideCodec, CachegenCodec):
        monkeypatch.setattr(each, "decode", refuse)
        monkeypatch.setattr(each, "encode", refuse)
    # What is held to its promise is decoded again by the processor, on purpose: one block in many.
    monkeypatch.setattr(TideCodec, "check_decoded", lambda *args: None)
    assert scenario(kernels, 0, codec) == 12


def test_coarser_levels_are_encoded_on_the_device_too(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, bits = block_meta(SMALL), smooth_bits(SMALL, 5)
    coarser = CachegenCodec(4, 0, GROUPS_PROFILE)
    expected = coarser.encode(meta, bits)
    with pages_of(kernels, engine_layers(kernels, SMALL), SMALL) as pool:
        codec = pool.encoder(CachegenCodec(2, 0, GROUPS_PROFILE, [coarser]))
        assert isinstance(codec, LevelledCodec)
        monkeypatch.setattr(CachegenCodec, "encode", None)
        assert [level.encode(meta, bits) for level in codec.coarser] == [expected]


@pytest.mark.parametrize(("codec", "numbers"), [(GROUPS_CODEC, range(4, 64)), (SMALL_CODEC, range(4, 240, 17))])
def test_blocks_are_encoded_as_the_processor_does_it_whenever_the_device_fails(
    kernels: Kernels, codec: Codec, numbers: range
) -> None:
    layers, meta, bits = engine_layers(kernels, SMALL), block_meta(SMALL), smooth_bits(SMALL, 5)
    expected, failed = codec.encode(meta, bits), []
    for number in numbers:
        switch = Switch(number)
        with pages_of(FaultyKernels(kernels, switch), layers, SMALL) as pool:
            found = pool.encoder(codec)
            # What the first left behind on the device, the second would use.
            assert found.encode(meta, bits) == expected
            assert found.encode(meta, bits) == expected
        assert found.encode(meta, bits) == expected
        failed += switch.failed
    launches = {"launch rans_tables", "launch integers_encode", "launch pack"} if codec is GROUPS_CODEC else set()
    assert {"queue", *launches} <= set(failed)
    assert isinstance(pool.encoder(LosslessCodec()), LosslessCodec)
