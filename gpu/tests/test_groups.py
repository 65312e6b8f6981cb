"""CacheGen's and chunkwise's codecs on the device against the processor's: the same objects and bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.suites import block_meta, smooth_bits

from cases import EMULATED, bits_of, fitted_groups, on_processor, untouched
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec
from kvtide.codec.published.cachegen import ProfiledCodec
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section
from kvtide_gpu.groups import DeviceGroups
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.targets import StoredBlock, block_target
from twin import needs_compiler

pytestmark = needs_compiler
LAYOUT = BlockLayout(layers=3, tokens=27, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
KINDS: dict[str, type[CachegenCodec | ChunkwiseCodec]] = {"cachegen": CachegenCodec, "chunkwise": ChunkwiseCodec}


def _case(
    kind: str, shape: tuple[int, int, int, int], dtype: KVDtype, level: int, seed: int, spread: float
) -> tuple[ProfiledCodec, BlockMeta, BlockBits]:
    layout = BlockLayout(*shape, dtype)
    bits = smooth_bits(layout, seed)
    if spread != 1.0 and dtype is KVDtype.FLOAT32:
        # Steps of the profile are small for these: escapes and low bits of every number.
        bits = (bits.view(np.float32) * np.float32(spread)).view(np.uint32)
    return KINDS[kind](level, 0, fitted_groups(kind, layout)), block_meta(layout, seed), bits


cases = st.builds(
    _case,
    st.sampled_from(sorted(KINDS)),
    st.tuples(st.integers(1, 4), st.integers(1, 45), st.integers(1, 3), st.integers(2, 20)),
    st.sampled_from(KVDtype),
    st.integers(1, 3),
    st.integers(0, 999),
    st.sampled_from([1.0, 1e-3, 40.0, 9000.0]),
)


def on_device(
    kernels: Kernels, codec: ProfiledCodec, meta: BlockMeta, blocks: list[list[Section]]
) -> list[BlockBits | None]:
    """Decode each by itself; None for one that the device leaves, whose pages are as they were."""
    found: list[BlockBits | None] = []
    for sections in blocks:
        block = untouched(meta.layout, kernels.device)
        target = block_target(block, meta.layout)
        stored = StoredBlock(meta, sections, target.token_starts([0]))
        (is_written,) = DeviceGroups(kernels).write(codec, [stored], target, lambda: None)
        found.append(bits_of(block, meta.layout) if is_written else None)
        assert is_written or bool((block == 0x55).all())
    return found


def check_decoded(kernels: Kernels, codec: ProfiledCodec, meta: BlockMeta, blocks: list[list[Section]]) -> int:
    """Decode each as the processor does, or refuse it as the processor does; return how many were refused."""
    refused = 0
    for sections, found in zip(blocks, on_device(kernels, codec, meta, blocks), strict=True):
        try:
            expected = on_processor(codec, meta, sections)
        except CorruptPayload:
            refused += 1
            assert found is None
            continue
        assert found is not None
        assert np.array_equal(found, expected)
    return refused


@given(cases)
@settings(EMULATED, max_examples=12)
def test_objects_are_those_of_the_processor_both_ways(
    kernels: Kernels, case: tuple[ProfiledCodec, BlockMeta, BlockBits]
) -> None:
    codec, meta, bits = case
    sections = codec.encode(meta, bits)
    assert DeviceGroups(kernels).encode(codec, meta, bits) == sections
    assert check_decoded(kernels, codec, meta, [sections]) == 0


def test_numbers_of_every_kind_are_met(kernels: Kernels) -> None:
    """Low bits in planes that begin inside a word, and escapes: what the cases above may not draw."""
    layout = BlockLayout(2, 33, 2, 10, KVDtype.FLOAT32)
    codec, meta = CachegenCodec(1, 0, fitted_groups("cachegen", layout)), block_meta(layout)
    bits = (smooth_bits(layout, 3).view(np.float32) * np.float32(300)).view(np.uint32)
    sections = codec.encode(meta, bits)
    parts = [part for layers in codec.coded(layout, sections) for part in layers.parts]
    assert any(sum(part.coded.escape_counts) > 100 for part in parts)
    assert {0, 1} < {int(shift) for part in parts for shift in part.distribution.shifts}
    assert DeviceGroups(kernels).encode(codec, meta, bits) == sections


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_with_their_own_tables_and_without_some_deltas_are_decoded(kernels: Kernels, kind: str) -> None:
    codec, meta = KINDS[kind](2), block_meta(LAYOUT)
    sections = codec.encode(meta, smooth_bits(LAYOUT, 4))
    some = [section for section in sections if section.id.refinement in {0, 2, 9}]
    assert check_decoded(kernels, codec, meta, [sections, some]) == 0


def test_blocks_of_a_batch_do_not_touch_each_other(kernels: Kernels) -> None:
    codec = CachegenCodec(3, 0, fitted_groups("cachegen", LAYOUT))
    pool = [block_meta(LAYOUT, 0, start) for start in range(3)]
    coded = [codec.encode(meta, smooth_bits(LAYOUT, 10 + i)) for i, meta in enumerate(pool)]
    damaged = [coded[1][0]._replace(data=bytes(coded[1][0].data)[:-1]), *coded[1][1:]]
    room = torch.zeros((3, *LAYOUT.shape), dtype=torch.int16, device=kernels.device)
    target = block_target(room[0], LAYOUT)
    size = room[0].numel()
    starts = [target.token_starts([0]) + i * size for i in range(3)]
    # A token that is not wanted keeps what it has.
    starts[2][5] = -1
    blocks = [StoredBlock(*each) for each in zip(pool, (coded[0], damaged, coded[2]), starts, strict=True)]
    assert DeviceGroups(kernels).write(codec, blocks, target, lambda: None) == [True, False, True]
    held = room.cpu().numpy().view(np.uint16)
    assert np.array_equal(held[0], on_processor(codec, pool[0], coded[0]))
    assert not held[1].any()
    expected = on_processor(codec, pool[2], coded[2])
    expected[:, :, 5] = 0
    assert np.array_equal(held[2], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_profile", [False, True])
def test_damaged_payloads_are_refused_as_the_processor_refuses_them(
    kernels: Kernels, kind: str, has_profile: bool
) -> None:
    codec, meta = KINDS[kind](1, 0, fitted_groups(kind, LAYOUT) if has_profile else None), block_meta(LAYOUT)
    sections, rng = codec.encode(meta, smooth_bits(LAYOUT, 5)), np.random.default_rng(7)
    damaged = []
    for number in range(60):
        which = int(rng.integers(len(sections)))
        data = bytearray(sections[which].data)
        if number % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        elif number % 3 == 1:
            data += bytes(int(rng.integers(1, 9)))
        else:
            # In the headers too: lengths, counts of escapes, tables, shifts.
            place = int(rng.integers(min(len(data), 300 if number % 2 else len(data))))
            data[place] ^= 1 << int(rng.integers(8))
        damaged.append([*sections[:which], sections[which]._replace(data=bytes(data)), *sections[which + 1 :]])
    assert check_decoded(kernels, codec, meta, damaged) > 40


def test_prefix_codes_and_blocks_without_profile_are_left_to_the_processor(kernels: Kernels) -> None:
    meta, bits, profile = block_meta(LAYOUT), smooth_bits(LAYOUT, 6), fitted_groups("cachegen", LAYOUT)
    groups, prefix = DeviceGroups(kernels), CachegenCodec(3, 1, profile)
    assert groups.encode(prefix, meta, bits) is None
    assert groups.encode(CachegenCodec(), meta, bits) is None
    assert on_device(kernels, prefix, meta, [prefix.encode(meta, bits)]) == [None]
    other = BlockLayout(3, 27, 1, 8, KVDtype.BFLOAT16)
    assert groups.encode(CachegenCodec(3, 0, profile), block_meta(other), smooth_bits(other, 6)) is None


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1])
@pytest.mark.parametrize("token", [0, 13])
def test_values_that_are_not_finite_are_refused(kernels: Kernels, bad: int, token: int) -> None:
    bits = smooth_bits(LAYOUT, 8)
    bits[1, 1, token, 1, 3] = bad
    with pytest.raises(UnencodableBlock, match="not finite"):
        DeviceGroups(kernels).encode(CachegenCodec(3, 0, fitted_groups("cachegen", LAYOUT)), block_meta(LAYOUT), bits)


def test_distributions_on_the_device_are_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide_gpu.groups.TABLES_MAX", 100)
    codec, meta = ChunkwiseCodec(3, 0, fitted_groups("chunkwise", LAYOUT)), block_meta(LAYOUT)
    bits = smooth_bits(LAYOUT, 9)
    groups, expected = DeviceGroups(kernels), codec.encode(meta, bits)
    for _ in range(2):
        assert groups.encode(codec, meta, bits) == expected
    assert sum(len(each.distribution.tables.rows) for each in groups._distributions.values()) <= 100
