"""Tide decoded by the kernels, run by the kernels, against the processor's codec: the same bits in the pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from tests.codec.tide_profiles import fitted
from tests.gpu.tide_cases import TideCase, tide_cases
from tests.gpu.twin import needs_compiler

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.model import TideModel
from kvtide.engines.paged.device import DevicePages
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.testing import block_meta, smooth_bits
from kvtide.types import Section
from kvtide.wire import parse_object
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.targets import PageTarget, block_target, page_target
from kvtide_gpu.tide import DeviceTide
from kvtide_gpu.tide_model import DeviceModel

pytestmark = needs_compiler
QUICK = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
GOLDEN = Path(__file__).parent.parent / "golden"
INT = {2: torch.int16, 4: torch.int32}


def on_processor(codec: TideCodec, meta: BlockMeta, sections: list[Section]) -> BlockBits:
    out = np.empty(meta.layout.shape, meta.layout.bits_dtype)
    codec.decode(meta, sections, out)
    return out


def empty_block(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    return torch.full(layout.shape, 0x55, dtype=INT[layout.dtype.item_bytes], device=device)


def bits_of(block: torch.Tensor, layout: BlockLayout) -> BlockBits:
    return block.cpu().numpy().view(layout.bits_dtype)


def tide_on(kernels: Kernels, layout: BlockLayout, cost: str, target: PageTarget) -> DeviceTide:
    return DeviceTide(DeviceModel(kernels, TideModel(fitted(layout, cost, 1))), target)


@given(tide_cases)
@QUICK
def test_blocks_are_those_of_the_processor(kernels: Kernels, case: TideCase) -> None:
    layout = case.meta.layout
    try:
        sections = case.codec.encode(case.meta, case.bits)
    except UnencodableBlock:
        reject()
    block = empty_block(layout, kernels.device)
    target = block_target(block, layout)
    tide = tide_on(kernels, layout, case.cost, target)
    under_way = tide.block(case.meta, target.token_starts([0]))
    tide.feed([(under_way, sections)])
    kernels.follow()
    tide.write([under_way])
    assert tide.check([under_way]) == [None]
    assert np.array_equal(bits_of(block, layout), on_processor(case.codec, case.meta, sections))


def test_values_beyond_the_range_become_its_largest_as_on_the_processor(kernels: Kernels) -> None:
    wide = BlockLayout(2, 24, 2, 8, KVDtype.FLOAT32)
    values = smooth_bits(wide, 5).view(np.float32).copy()
    # Two loud tokens, kept apart, and what of the others turns with them; both signs.
    values[:, :, 3], values[:, :, 9] = 1e5, -3e5
    codec = TideCodec(fitted(wide, "layer", 1), 1e-3, 1).rounded()
    sections = codec.encode(block_meta(wide, 0, 1), values.view(np.uint32))
    layout = BlockLayout(*wide.shape[:1], *wide.shape[2:], KVDtype.FLOAT16)
    meta, block = block_meta(layout, 0, 1), empty_block(layout, kernels.device)
    target = block_target(block, layout)
    tide = tide_on(kernels, wide, "layer", target)
    under_way = tide.block(meta, target.token_starts([0]))
    tide.feed([(under_way, sections)])
    kernels.follow()
    tide.write([under_way])
    assert tide.check([under_way]) == [None]
    found = bits_of(block, layout)
    assert {0x7BFF, 0xFBFF} <= set(found.reshape(-1).tolist())
    assert np.array_equal(found, on_processor(codec, meta, sections))


def test_golden_object_decodes_to_its_bits(kernels: Kernels) -> None:
    profile = Profile.parse((GOLDEN / "tide.kvprofile").read_bytes())
    stored = parse_object((GOLDEN / "tide.kvt").read_bytes())
    layout = stored.meta.layout
    block = empty_block(layout, kernels.device)
    target = block_target(block, layout)
    tide = DeviceTide(DeviceModel(kernels, TideModel(profile)), target)
    under_way = tide.block(stored.meta, target.token_starts([0]))
    tide.feed([(under_way, stored.sections())])
    kernels.follow()
    tide.write([under_way])
    assert tide.check([under_way]) == [None]
    assert np.array_equal(bits_of(block, layout), on_processor(TideCodec(profile), stored.meta, stored.sections()))


LAYOUT = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
CODEC = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 2).rounded()


def pages(count: int, device: torch.device) -> tuple[list[torch.Tensor], PageTarget]:
    """Pages of 8 tokens in one storage, heads outside of tokens, as some of vLLM's kernels like it."""
    storage = torch.zeros((LAYOUT.layers, 2, count, 8, 16), dtype=torch.int16, device=device)
    layers = [layer.permute(1, 0, 2, 3) for layer in storage]
    return layers, page_target(layers, LAYOUT)


def read_pages(layers: list[torch.Tensor], order: list[int]) -> BlockBits:
    return DevicePages([layer.view(torch.bfloat16) for layer in layers], LAYOUT).capture(order).block()


def test_many_blocks_go_to_their_pages_and_nowhere_else(kernels: Kernels) -> None:
    layers, target = pages(14, kernels.device)
    tide = tide_on(kernels, LAYOUT, "layer", target)
    metas = [block_meta(LAYOUT, 3, position) for position in range(3)]
    coded = [CODEC.encode(meta, smooth_bits(LAYOUT, 40 + i)) for i, meta in enumerate(metas)]
    orders = [[9, 2, 0, 13], [4, 5, 6, 7], [1, 3, 8]]
    starts = [target.token_starts(order, 4 - len(order)) for order in orders]
    blocks = [tide.block(meta, start) for meta, start in zip(metas, starts, strict=True)]
    tide.feed(list(zip(blocks, coded, strict=True)))
    kernels.follow()
    tide.write(blocks)
    assert tide.check(blocks) == [None] * 3
    for meta, sections, order in zip(metas, coded, orders, strict=True):
        expected = on_processor(CODEC, meta, sections)
        found = read_pages(layers, (order * 4)[-4:] if len(order) < 4 else order)
        assert np.array_equal(found[:, :, -8 * len(order) :], expected[:, :, -8 * len(order) :])
    assert not any(layer[[10, 11, 12]].any() for layer in layers)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_refinements_improve_what_is_written_as_they_arrive(kernels: Kernels, is_reversed: bool) -> None:
    meta = block_meta(LAYOUT, 0, 1)
    sections = CODEC.encode(meta, smooth_bits(LAYOUT, 8))
    block = empty_block(LAYOUT, kernels.device)
    target = block_target(block, LAYOUT)
    tide = tide_on(kernels, LAYOUT, "layer", target)
    under_way = tide.block(meta, target.token_starts([0]))
    here: list[Section] = []
    for refinement in (0, 2, 1) if is_reversed else (0, 1, 2):
        new = [section for section in sections if section.id.refinement == refinement]
        here += new
        tide.feed([(under_way, new)])
        kernels.follow()
        tide.write([under_way])
        assert tide.check([under_way]) == [None]
        assert np.array_equal(bits_of(block, LAYOUT), on_processor(CODEC, meta, here))


def spoiled(sections: list[Section], which: int, change: str) -> list[Section]:
    section = sections[which]
    data = bytearray(section.data)
    if change == "word":
        data[-40] ^= 4
    elif change == "short":
        data = data[:-2]
    elif change == "step":
        data[0] ^= 1
    return [*sections[:which], section._replace(data=bytes(data)), *sections[which + 1 :]]


@pytest.mark.parametrize(("which", "change"), [(0, "word"), (0, "short"), (1, "word"), (1, "step"), (2, "word")])
def test_spoiled_block_is_refused_and_its_neighbour_is_not(kernels: Kernels, which: int, change: str) -> None:
    layers, target = pages(8, kernels.device)
    tide = tide_on(kernels, LAYOUT, "layer", target)
    meta = block_meta(LAYOUT, 0, 1)
    sections = CODEC.encode(meta, smooth_bits(LAYOUT, 8))
    good, bad = (tide.block(meta, target.token_starts(order)) for order in ([4, 5, 6, 7], [0, 1, 2, 3]))
    tide.feed([(bad, spoiled(sections, which, change)), (good, sections)])
    kernels.follow()
    tide.write([bad, good])
    faults = tide.check([bad, good])
    assert faults[1] is None
    assert isinstance(faults[0], CorruptPayload)
    assert not any(layer[:4].any() for layer in layers)
    assert np.array_equal(read_pages(layers, [4, 5, 6, 7]), on_processor(CODEC, meta, sections))


def test_block_without_all_bases_is_not_written(kernels: Kernels) -> None:
    block = empty_block(LAYOUT, kernels.device)
    target = block_target(block, LAYOUT)
    tide = tide_on(kernels, LAYOUT, "layer", target)
    meta = block_meta(LAYOUT, 0, 1)
    under_way = tide.block(meta, target.token_starts([0]))
    kernels.follow()
    tide.write([under_way])
    (fault,) = tide.check([under_way])
    assert isinstance(fault, CorruptPayload)
    assert torch.equal(block, empty_block(LAYOUT, kernels.device))


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
    other = BlockLayout(2, 32, 2, 8, KVDtype.BFLOAT16)
    with pytest.raises(ValueError, match="profile"):
        DeviceTide(DeviceModel(kernels, TideModel(fitted(other, "layer", 1))), target)
    with pytest.raises(ValueError, match="a place for each"):
        tide_on(kernels, LAYOUT, "layer", target).block(block_meta(LAYOUT), np.zeros(3, dtype=np.int64))
