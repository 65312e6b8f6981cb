"""Tide encoded by the kernels against the processor's codec: the same objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from tests.codec.tide_profiles import fitted
from tests.gpu.tide_cases import TideCase, tide_cases
from tests.gpu.twin import needs_compiler

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.model import TideModel
from kvtide.codec.tide.promise import check_promise
from kvtide.engines.paged.device import DevicePages
from kvtide.errors import UnencodableBlock
from kvtide.testing import block_meta, smooth_bits
from kvtide.types import Section
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.targets import block_target, page_target
from kvtide_gpu.tide_encode import DeviceTideEncoder, PagedBlock
from kvtide_gpu.tide_model import DeviceModel

pytestmark = needs_compiler
QUICK = settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LAYOUT = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)


def on_device(bits: BlockBits, device: torch.device) -> torch.Tensor:
    signed: Any = bits.view(f"<i{bits.itemsize}")
    return torch.from_numpy(signed.copy()).to(device)


def encoded(
    kernels: Kernels, codec: TideCodec, cost: str, meta: BlockMeta, bits: BlockBits
) -> list[Section] | UnencodableBlock:
    block = on_device(bits, kernels.device)
    source = block_target(block, meta.layout)
    model = DeviceModel(kernels, TideModel(fitted(meta.layout, cost, 1)))
    (found,) = DeviceTideEncoder(model, source, codec.steps).encode([PagedBlock(meta, source.token_starts([0]))])
    return found


@given(tide_cases)
@QUICK
def test_objects_are_those_of_the_processor(kernels: Kernels, case: TideCase) -> None:
    found = encoded(kernels, case.codec, case.cost, case.meta, case.bits)
    try:
        assert found == case.codec.encode(case.meta, case.bits)
    except UnencodableBlock:
        assert isinstance(found, UnencodableBlock)


def test_loud_tokens_stand_apart_as_on_the_processor(kernels: Kernels) -> None:
    codec = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 2).rounded()
    meta, bits = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 5)
    bits[2, 1, 7, 1, 3] = 0x6000  # 2^65
    bits[0, 0, 9] = 0x4480  # 1024
    assert encoded(kernels, codec, "layer", meta, bits) == codec.encode(meta, bits)


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
    for module in ("kvtide_gpu.tide_encode", "kvtide.codec.tide.codec"):
        monkeypatch.setattr(f"{module}.check_promise", lambda fit, tokens: seen.append(fit))
    assert encoded(kernels, codec, cost, meta, bits) == codec.encode(meta, bits)
    device, processor = seen
    assert len(device) == len(processor) > 0
    for (promise, found), (wanted_promise, wanted) in zip(device, processor, strict=True):
        assert promise == wanted_promise
        if found.tokens == wanted.tokens:
            assert found == pytest.approx(wanted, rel=1e-6)
    assert any(found.tokens == wanted.tokens for (_, found), (_, wanted) in zip(device, processor, strict=True))


def test_blocks_that_the_profile_does_not_fit_are_refused(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide_gpu.tide_encode.check_promise", check_promise)
    codec, bits = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 1).rounded(), smooth_bits(LAYOUT, 5)
    noise = np.random.default_rng(3).permutation(bits.reshape(-1)).reshape(bits.shape)
    for other in (np.full_like(bits, 0x3F80), noise):
        found = encoded(kernels, codec, "layer", block_meta(LAYOUT), other)
        assert isinstance(found, UnencodableBlock)
        assert "profile does not fit" in str(found)


def test_many_blocks_are_read_from_their_pages(kernels: Kernels) -> None:
    codec = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 1).rounded()
    storage = torch.zeros((LAYOUT.layers, 9, 2, 8, 16), dtype=torch.int16, device=kernels.device)
    pool = DevicePages([layer.view(torch.bfloat16) for layer in storage], LAYOUT)
    source = page_target(list(storage), LAYOUT)
    metas = [block_meta(LAYOUT, 2, position) for position in range(2)]
    blocks = [smooth_bits(LAYOUT, 20 + i) for i in range(2)]
    orders = [[8, 1, 0, 5], [2, 3, 7, 4]]
    for bits, order in zip(blocks, orders, strict=True):
        pool.scatter(bits, order, 0)
    model = DeviceModel(kernels, TideModel(fitted(LAYOUT, "layer", 1)))
    paged = [PagedBlock(meta, source.token_starts(order)) for meta, order in zip(metas, orders, strict=True)]
    found = DeviceTideEncoder(model, source, codec.steps).encode(paged)
    assert found == [codec.encode(meta, bits) for meta, bits in zip(metas, blocks, strict=True)]


def test_values_that_are_not_finite_are_refused(kernels: Kernels) -> None:
    codec = TideCodec(fitted(LAYOUT, "layer", 1), 1e-3, 1).rounded()
    bits = smooth_bits(LAYOUT, 5)
    bits[1, 0, 3, 1, 2] = 0x7F80
    found = encoded(kernels, codec, "layer", block_meta(LAYOUT), bits)
    assert isinstance(found, UnencodableBlock)
    assert "not finite" in str(found)


def test_bad_input_is_refused(kernels: Kernels) -> None:
    block = on_device(smooth_bits(LAYOUT, 1), kernels.device)
    source = block_target(block, LAYOUT)
    model = DeviceModel(kernels, TideModel(fitted(LAYOUT, "layer", 1)))
    steps = TideCodec(fitted(LAYOUT, "layer", 1)).rounded().steps
    encoder = DeviceTideEncoder(model, source, steps)
    assert encoder.encode([]) == []
    with pytest.raises(ValueError, match="a place for each"):
        encoder.encode([PagedBlock(block_meta(LAYOUT), np.full(32, -1))])
    other = DeviceModel(kernels, TideModel(fitted(BlockLayout(2, 32, 2, 8, KVDtype.BFLOAT16), "layer", 1)))
    with pytest.raises(ValueError, match="profile"):
        DeviceTideEncoder(other, source, steps)
