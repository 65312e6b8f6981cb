"""Tide decoded and encoded by the kernels: the bits in the pages and the objects are the processor's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from tests.codec.tide_profiles import fitted
from tests.suites import block_meta, smooth_bits

from cases import EMULATED, TideCase, bits_of, on_processor, tide_cases, untouched
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.tide import Steps, TideCodec
from kvtide.codec.tide.coding import apart_tokens, first_apart
from kvtide.codec.tide.model import TideModel
from kvtide.codec.tide.promise import check_promise
from kvtide.engines.paged.device import DevicePages
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section
from kvtide.wire import parse_object
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.targets import PageTarget, StoredBlock, block_target, page_target
from kvtide_gpu.tide import DeviceTide
from kvtide_gpu.tide_encode import DeviceTideEncoder, PagedBlock
from kvtide_gpu.tide_model import DeviceModel
from twin import needs_compiler

pytestmark = needs_compiler
GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
LAYOUT = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
CODEC = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 2).rounded()
OTHER = TideModel(fitted(BlockLayout(2, 32, 2, 8, KVDtype.BFLOAT16), "layer", 1))


def device_model(kernels: Kernels, codec: TideCodec = CODEC) -> DeviceModel:
    assert codec.model is not None
    return DeviceModel(kernels, codec.model)


def decoded(kernels: Kernels, codec: TideCodec, meta: BlockMeta, sections: list[Section]) -> BlockBits:
    block = untouched(meta.layout, kernels.device)
    target = block_target(block, meta.layout)
    stored = StoredBlock(meta, sections, target.token_starts([0]))
    assert DeviceTide(device_model(kernels, codec), target).decode([stored], kernels.follow) == [True]
    return bits_of(block, meta.layout)


def encoded(
    kernels: Kernels, codec: TideCodec, meta: BlockMeta, bits: BlockBits
) -> list[Section] | UnencodableBlock | None:
    signed: Any = bits.view(f"<i{bits.itemsize}")
    block = torch.from_numpy(signed.copy()).to(kernels.device)
    source = block_target(block, meta.layout)
    encoder = DeviceTideEncoder(device_model(kernels, codec), source, codec.steps)
    (found,) = encoder.encode([PagedBlock(meta, source.token_starts([0]))])
    return found


# Decoding


@given(tide_cases)
@settings(EMULATED, max_examples=8)
def test_blocks_are_those_of_the_processor(kernels: Kernels, case: TideCase) -> None:
    try:
        sections = case.codec.encode(case.meta, case.bits)
    except UnencodableBlock:
        reject()
    expected = on_processor(case.codec, case.meta, sections)
    assert np.array_equal(decoded(kernels, case.codec, case.meta, sections), expected)


def test_values_beyond_the_range_become_its_largest_as_on_the_processor(kernels: Kernels) -> None:
    wide = BlockLayout(2, 24, 2, 8, KVDtype.FLOAT32)
    values = smooth_bits(wide, 5).view(np.float32).copy()
    # Two loud tokens, kept apart, and what of the others turns with them; both signs.
    values[:, :, 3], values[:, :, 9] = 1e5, -3e5
    codec = TideCodec(fitted(wide, "layer", 1), 1e-3, 1).rounded()
    sections = codec.encode(block_meta(wide, 0, 1), values.view(np.uint32))
    meta = block_meta(BlockLayout(*wide.shape[:1], *wide.shape[2:], KVDtype.FLOAT16), 0, 1)
    found = decoded(kernels, codec, meta, sections)
    assert {0x7BFF, 0xFBFF} <= set(found.reshape(-1).tolist())
    assert np.array_equal(found, on_processor(codec, meta, sections))


def test_golden_object_decodes_to_its_bits(kernels: Kernels) -> None:
    codec = TideCodec(Profile.parse((GOLDEN / "tide.kvprofile").read_bytes()))
    stored = parse_object((GOLDEN / "tide.kvt").read_bytes())
    sections = stored.sections()
    assert np.array_equal(decoded(kernels, codec, stored.meta, sections), on_processor(codec, stored.meta, sections))


def pages(count: int, device: torch.device) -> tuple[list[torch.Tensor], PageTarget]:
    """Pages of 8 tokens in one storage, heads outside of tokens, as some of vLLM's kernels like it."""
    storage = torch.zeros((LAYOUT.layers, 2, count, 8, 16), dtype=torch.int16, device=device)
    layers = [layer.permute(1, 0, 2, 3) for layer in storage]
    return layers, page_target(layers, LAYOUT)


def read_pages(layers: list[torch.Tensor], order: list[int]) -> BlockBits:
    return DevicePages.of_rows([layer.view(torch.bfloat16) for layer in layers], LAYOUT).capture(order).block()


def test_many_blocks_go_to_their_pages_and_nowhere_else(kernels: Kernels) -> None:
    layers, target = pages(14, kernels.device)
    metas = [block_meta(LAYOUT, 3, position) for position in range(3)]
    coded = [CODEC.encode(meta, smooth_bits(LAYOUT, 40 + i)) for i, meta in enumerate(metas)]
    orders = [[9, 2, 0, 13], [4, 5, 6, 7], [1, 3, 8]]
    starts = [target.token_starts(order, 4 - len(order)) for order in orders]
    blocks = [StoredBlock(*each) for each in zip(metas, coded, starts, strict=True)]
    assert DeviceTide(device_model(kernels), target).decode(blocks, kernels.follow) == [True] * 3
    for meta, sections, order in zip(metas, coded, orders, strict=True):
        found = read_pages(layers, (order * 4)[-4:] if len(order) < 4 else order)
        expected = on_processor(CODEC, meta, sections)
        assert np.array_equal(found[:, :, -8 * len(order) :], expected[:, :, -8 * len(order) :])
    assert not any(layer[[10, 11, 12]].any() for layer in layers)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_refinements_improve_what_is_written_as_they_arrive(kernels: Kernels, order: tuple[int, ...]) -> None:
    meta, block = block_meta(LAYOUT, 0, 1), untouched(LAYOUT, kernels.device)
    target = block_target(block, LAYOUT)
    tide = DeviceTide(device_model(kernels), target)
    sections, under_way = CODEC.encode(meta, smooth_bits(LAYOUT, 8)), tide.block(meta, target.token_starts([0]))
    here: list[Section] = []
    for refinement in order:
        new = [section for section in sections if section.id.refinement == refinement]
        here += new
        tide.feed([(under_way, new)])
        kernels.follow()
        tide.write([under_way])
        assert tide.check([under_way]) == [None]
        assert np.array_equal(bits_of(block, LAYOUT), on_processor(CODEC, meta, here))


def spoiled(data: bytearray, change: str) -> bytes:
    if change == "word":
        data[-40] ^= 4
    elif change == "short":
        del data[-2:]
    elif change == "planes":
        data[:2] = (-480).to_bytes(2, "little", signed=True)
    else:
        data[0] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("which", "change"), [(0, "word"), (0, "short"), (0, "planes"), (1, "word"), (1, "step"), (2, "word")]
)
def test_spoiled_block_is_refused_and_its_neighbour_is_not(kernels: Kernels, which: int, change: str) -> None:
    layers, target = pages(8, kernels.device)
    meta = block_meta(LAYOUT, 0, 1)
    good = CODEC.encode(meta, smooth_bits(LAYOUT, 8))
    bad = [*good]
    bad[which] = bad[which]._replace(data=spoiled(bytearray(bad[which].data), change))
    tide = DeviceTide(device_model(kernels), target)
    blocks = [tide.block(meta, target.token_starts(order)) for order in ([0, 1, 2, 3], [4, 5, 6, 7])]
    tide.feed([*zip(blocks, (bad, good), strict=True)])
    kernels.follow()
    tide.write(blocks)
    faults = tide.check(blocks)
    assert isinstance(faults[0], CorruptPayload) and faults[1] is None
    assert not any(layer[:4].any() for layer in layers)
    assert np.array_equal(read_pages(layers, [4, 5, 6, 7]), on_processor(CODEC, meta, good))


def test_block_without_all_bases_is_not_written(kernels: Kernels) -> None:
    block = untouched(LAYOUT, kernels.device)
    target = block_target(block, LAYOUT)
    stored = StoredBlock(block_meta(LAYOUT, 0, 1), [], target.token_starts([0]))
    assert DeviceTide(device_model(kernels), target).decode([stored], kernels.follow) == [False]
    assert torch.equal(block, untouched(LAYOUT, kernels.device))


def test_bad_targets_are_refused(kernels: Kernels) -> None:
    _, target = pages(4, kernels.device)
    with pytest.raises(ValueError, match="a block has 4 pages"):
        target.token_starts([0, 1, 2], 2)
    with pytest.raises(ValueError, match="contiguous"):
        block_target(torch.zeros(LAYOUT.shape, dtype=torch.int16).transpose(0, 1), LAYOUT)
    with pytest.raises(ValueError, match="are not of"):
        page_target([torch.zeros((4, 2, 8, 12), dtype=torch.int16)] * 4, LAYOUT)
    with pytest.raises(ValueError, match="stand together"):
        page_target([torch.zeros((4, 2, 8, 32), dtype=torch.int16)[..., ::2]] * 4, LAYOUT)
    with pytest.raises(ValueError, match="profile"):
        DeviceTide(DeviceModel(kernels, OTHER), target)
    with pytest.raises(ValueError, match="a place for each"):
        DeviceTide(device_model(kernels), target).block(block_meta(LAYOUT), np.zeros(3, dtype=np.int64))


# Encoding


@given(tide_cases)
@settings(EMULATED, max_examples=6)
def test_objects_are_those_of_the_processor(kernels: Kernels, case: TideCase) -> None:
    # Sinks behind the first tokens are found by the processor alone.
    assume(np.array_equal(apart_tokens(case.meta, case.bits), first_apart(case.meta)))
    found = encoded(kernels, *case)
    try:
        assert found == case.codec.encode(case.meta, case.bits)
    except UnencodableBlock:
        assert isinstance(found, UnencodableBlock)


def test_loud_tokens_stand_apart_as_on_the_processor(kernels: Kernels) -> None:
    meta, bits = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 5)
    bits[2, 1, 7, 1, 3] = 0x6000  # 2^65
    bits[0, 0, 9] = 0x4480  # 1024
    assert encoded(kernels, CODEC, meta, bits) == CODEC.encode(meta, bits)


@pytest.mark.parametrize("cost", ["light", "layer", "deep"])
def test_profile_is_judged_by_what_it_is_on_the_processor(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, cost: str
) -> None:
    layout = BlockLayout(5, 40, 2, 8, KVDtype.FLOAT32)
    codec = TideCodec(fitted(layout, cost, 1), 1e-3, 1).rounded()
    meta, bits = block_meta(layout), smooth_bits(layout, 5)
    # One token is halved to fit, one is too loud in a group that comes last.
    values = bits.view(np.float32)
    values[:, :, 20] *= 30
    values[4, 1, 30] *= 1e6
    seen: list[list[tuple[Any, Any]]] = []

    def take(fit: list[tuple[Any, Any]], tokens: int) -> int:
        seen.append(fit)
        return 0

    for module in ("kvtide_gpu.tide_encode", "kvtide.codec.tide.codec"):
        monkeypatch.setattr(f"{module}.check_promise", take)
    assert encoded(kernels, codec, meta, bits) == codec.encode(meta, bits)
    device, processor = seen
    assert len(device) == len(processor) > 0
    for (promise, found), (wanted_promise, wanted) in zip(device, processor, strict=True):
        assert promise == wanted_promise
        if found.tokens == wanted.tokens:
            assert found == pytest.approx(wanted, rel=1e-6)
    assert any(found.tokens == wanted.tokens for (_, found), (_, wanted) in zip(device, processor, strict=True))


def test_blocks_that_the_profile_does_not_fit_are_refused(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide_gpu.tide_encode.check_promise", check_promise)
    bits = smooth_bits(LAYOUT, 5)
    noise = np.random.default_rng(3).permutation(bits.reshape(-1)).reshape(bits.shape)
    for other in (np.full_like(bits, 0x3F80), noise):
        found = encoded(kernels, CODEC, block_meta(LAYOUT), other)
        assert isinstance(found, UnencodableBlock) and "profile does not fit" in str(found)


def test_block_that_needs_a_finer_step_is_left_to_the_processor(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide_gpu.tide_encode.check_promise", lambda fit, tokens: 1)
    assert encoded(kernels, CODEC, block_meta(LAYOUT), smooth_bits(LAYOUT, 5)) is None


def test_values_that_are_not_finite_are_refused(kernels: Kernels) -> None:
    bits = smooth_bits(LAYOUT, 5)
    bits[1, 0, 3, 1, 2] = 0x7F80
    found = encoded(kernels, CODEC, block_meta(LAYOUT), bits)
    assert isinstance(found, UnencodableBlock) and "not finite" in str(found)


def test_many_blocks_are_read_from_their_pages(kernels: Kernels) -> None:
    storage = torch.zeros((LAYOUT.layers, 9, 2, 8, 16), dtype=torch.int16, device=kernels.device)
    pool = DevicePages.of_rows([layer.view(torch.bfloat16) for layer in storage], LAYOUT)
    source = page_target(list(storage), LAYOUT)
    metas = [block_meta(LAYOUT, 2, position) for position in range(2)]
    blocks = [smooth_bits(LAYOUT, 20 + i) for i in range(2)]
    orders = [[8, 1, 0, 5], [2, 3, 7, 4]]
    for bits, order in zip(blocks, orders, strict=True):
        pool.scatter(bits, order, 0)
    paged = [PagedBlock(meta, source.token_starts(order)) for meta, order in zip(metas, orders, strict=True)]
    encoder = DeviceTideEncoder(device_model(kernels), source, CODEC.steps)
    assert encoder.encode(paged) == [CODEC.encode(meta, bits) for meta, bits in zip(metas, blocks, strict=True)]


def test_bad_sources_are_refused(kernels: Kernels) -> None:
    block = untouched(LAYOUT, kernels.device)
    source = block_target(block, LAYOUT)
    encoder = DeviceTideEncoder(device_model(kernels), source, CODEC.steps)
    assert encoder.encode([]) == []
    with pytest.raises(ValueError, match="a place for each"):
        encoder.encode([PagedBlock(block_meta(LAYOUT), np.full(32, -1))])
    with pytest.raises(ValueError, match="profile"):
        DeviceTideEncoder(DeviceModel(kernels, OTHER), source, CODEC.steps)


def test_objects_of_ever_more_steps_take_no_more_of_the_device(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide_gpu.tide.PLANS_MAX", 2)
    meta, block, kept = block_meta(LAYOUT, 0, 1), untouched(LAYOUT, kernels.device), []
    target = block_target(block, LAYOUT)
    device = DeviceTide(device_model(kernels), target)
    for units in range(-20, -12):
        sections = CODEC.with_steps(Steps(units, 0)).encode(meta, smooth_bits(LAYOUT, 8))
        assert device.decode([StoredBlock(meta, sections, target.token_starts([0]))], kernels.follow) == [True]
        del sections
        gc.collect()
        kept.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    assert len(set(kept[3:])) == 1
