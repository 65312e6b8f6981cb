"""The tide codec: sections, profiles, golden bytes; levels along a trellis; the law of what is lost."""

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec import tide_twin as twin
from tests.codec.tide_profiles import (
    LAYOUT,
    LOUDER,
    alike_bits,
    fitted,
    in_line,
    of_alike,
    out_of_line,
    out_of_line_bits,
    rotary_by,
    staged,
)
from tests.suites import block_meta, smooth_bits
from tests.suites.codec_suite import CodecSuite, decoded_by

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Codec, CodecRegistry, Profile
from kvtide.codec.tide import COSTS, Steps, TideCodec, is_staged, promise
from kvtide.codec.tide.coding import apart_tokens
from kvtide.codec.tide.fit import transform_layers
from kvtide.codec.tide.law import DEFAULT_POSITIONS, DISTANCES, LAW_VERSION, PositionLaw, Powers, Purpose
from kvtide.codec.tide.model import OwnLoss, TideModel, quality_of_units, units_of_quality
from kvtide.codec.tide.section import split_base, split_refinement, steps_of
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object, parse_object
from kvtide_lab.judge.law import LossLaw

GOLDEN = Path(__file__).parent.parent / "golden"
SUITE_LAYOUT = BlockLayout(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)


class TestTideLayer(CodecSuite):
    codec = TideCodec(fitted(SUITE_LAYOUT), 1e-2, 1)

    def codec_for(self, layout: BlockLayout) -> Codec:
        return TideCodec(fitted(layout, blocks=1), 1e-2, 2)


class TestTideLight(CodecSuite):
    codec = TideCodec(fitted(SUITE_LAYOUT, "light"), 1e-2, 0)

    def codec_for(self, layout: BlockLayout) -> Codec:
        return TideCodec(fitted(layout, "light", blocks=1), 1e-2, 1)


def floats(bits: BlockBits) -> Any:
    return bits.view(np.float32)


def error(bits: BlockBits, out: BlockBits) -> float:
    return float(np.sqrt(np.mean((floats(bits) - floats(out)) ** 2)))


CODEC = TideCodec(fitted(LAYOUT), 1e-4, 3)
META, BITS = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 77)
STAGED_LAYOUT = BlockLayout(layers=2, tokens=32, kv_heads=3, head_dim=8, dtype=KVDtype.FLOAT32)
STAGED_META, STAGED_BITS, STAGED = block_meta(STAGED_LAYOUT, 0, 1), alike_bits(STAGED_LAYOUT, 77), staged(STAGED_LAYOUT)
LOUD_BITS = out_of_line_bits(LAYOUT, 77)
SECTIONS = CODEC.encode(META, BITS)


def decoded(sections: list[Section], codec: TideCodec = CODEC) -> BlockBits:
    return decoded_by(codec, META, sections)


def up_to(refinement: int) -> list[Section]:
    return [section for section in SECTIONS if section.id.refinement <= refinement]


def test_each_refinement_thirds_the_error() -> None:
    errors = [error(BITS, decoded(up_to(refinement))) for refinement in range(4)]
    for coarse, fine in pairwise(errors[1:]):
        # The last one has a trellis' gain besides.
        assert 2.4 < coarse / fine < 3.9
    assert errors[0] > errors[1]


def test_single_layer_encoding_of_the_same_step_gives_the_same_values() -> None:
    single = TideCodec(fitted(LAYOUT), 1e-4, 0)
    assert np.array_equal(decoded(single.encode(META, BITS), single), decoded(SECTIONS))


def layer_run(sections: list[Section], layer: int) -> int:
    """The longest unbroken run of a layer's refinements, -1 without its base."""
    here = {s.id.refinement for s in sections if s.id.layer_start <= layer < s.id.layer_stop}
    return next(r for r in range(9) if r not in here) - 1


EXPECTED = [decoded(up_to(refinement)) for refinement in range(4)]


@given(data=st.data())
@settings(max_examples=600, deadline=None)
def test_any_subset_in_any_order_is_right_or_refused(data: st.DataObject) -> None:
    sections = data.draw(st.lists(st.sampled_from(SECTIONS), unique_by=lambda s: s.id, max_size=len(SECTIONS)))
    if data.draw(st.booleans()):
        sections = data.draw(st.permutations([*up_to(0), *[s for s in sections if s.id.refinement]]))
    runs = [layer_run(sections, layer) for layer in range(LAYOUT.layers)]
    if min(runs) < 0:
        with pytest.raises(CorruptPayload):
            decoded(sections)
        return
    out = decoded(sections)
    for layer, run in enumerate(runs):
        assert np.array_equal(out[layer], EXPECTED[run][layer])


def test_step_that_would_take_many_times_the_blocks_memory_is_refused() -> None:
    finest = struct.pack("<h", -480)
    with pytest.raises(CorruptPayload, match="planes"):
        decoded([each._replace(data=finest + bytes(each.data)[2:]) for each in SECTIONS])


def test_section_of_an_object_of_another_quality_is_refused() -> None:
    other = TideCodec(fitted(LAYOUT), 1e-2, 3).encode(META, BITS)
    for position, section in enumerate(SECTIONS):
        if section.id.refinement:
            with pytest.raises(CorruptPayload):
                decoded([*SECTIONS[:position], other[position], *SECTIONS[position + 1 :]])


@pytest.mark.parametrize("range_of", [(0, 4), (1, 6), (0, 15)])
def test_section_of_other_layers_is_refused(range_of: tuple[int, int]) -> None:
    stray = Section(SectionId(SectionKind.DATA, 0, *range_of), SECTIONS[0].data)
    with pytest.raises(CorruptPayload):
        decoded([*SECTIONS, stray])


def test_without_its_profile_nothing_is_encoded_or_decoded() -> None:
    with pytest.raises(UnencodableBlock):
        TideCodec().encode(META, BITS)
    with pytest.raises(CorruptPayload):
        decoded(SECTIONS, TideCodec())
    other = BlockLayout(5, 16, 1, 8, KVDtype.FLOAT32)
    with pytest.raises(UnencodableBlock):
        CODEC.encode(block_meta(other), smooth_bits(other, 1))


@pytest.mark.parametrize("is_trellis", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_first_tokens_of_a_prompt_and_sinks_anywhere_are_kept_finer(is_trellis: bool, is_first: bool) -> None:
    codec, bits, meta = TideCodec(fitted(LAYOUT), 0.5, 0), BITS.copy(), block_meta(LAYOUT, 0, 1 - is_first)
    codec = codec if is_trellis else codec.rounded()
    if is_first:
        # However quiet they are: what later tokens attend to does not show in their values.
        kept = [0, 1, 2, 3]
        floats(bits)[:, :, 2] *= 5
    else:
        # Attention goes there that has nowhere else to go: keys are as long as others, values are not.
        kept = [*range(2, 12)]
        floats(bits)[:, 1, kept] *= 0.2
    sections = codec.encode(meta, bits)
    codec.check_decoded(meta, bits, sections)
    out = decoded_by(codec, meta, sections)
    off = np.abs(floats(out) - floats(bits)).max(axis=(0, 1, 3, 4))
    assert off[kept].max() < 0.15
    assert np.delete(off, kept).min() > 0.3


def test_tokens_are_apart_by_their_own_block() -> None:
    meta = block_meta(LAYOUT, 0, 1)
    assert not apart_tokens(meta, BITS).any()
    assert apart_tokens(block_meta(LAYOUT, 0, 0), BITS).tolist() == [1] * 4 + [0] * (LAYOUT.tokens - 4)
    # Half as long in one layer of fifteen is no sink; a block of zeros, or of sinks alone, has none that stands out.
    quiet = BITS.copy()
    floats(quiet)[7, 1, 5] *= 0.01
    assert not apart_tokens(meta, quiet).any()
    assert not apart_tokens(meta, np.zeros_like(BITS)).any()
    # The first four in smaller pieces too.
    layout = replace(LAYOUT, tokens=3)
    pieces = [apart_tokens(block_meta(layout, 0, n), smooth_bits(layout, n)).tolist() for n in range(3)]
    assert pieces == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_values_far_beyond_the_calibration_are_kept_apart() -> None:
    loud = BITS.copy()
    floats(loud)[3, 1, 5] = 1e30
    out = decoded(CODEC.encode(META, loud))
    assert np.allclose(floats(out)[3, 1, 5], 1e30, rtol=0.02)
    assert np.abs(np.delete(floats(out)[3, 1] - floats(loud)[3, 1], 5, axis=0)).max() < 0.1


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_not_encoded(value: float) -> None:
    bits = BITS.copy()
    floats(bits)[2, 0, 3, 0, 1] = value
    with pytest.raises(UnencodableBlock):
        CODEC.encode(META, bits)


@pytest.mark.parametrize("profile", [fitted(LAYOUT, "light"), fitted(LAYOUT), STAGED], ids=["light", "layer", "staged"])
def test_every_path_writes_and_reads_the_same_bytes(profile: Profile) -> None:
    coded, read = [], []
    meta, bits = (STAGED_META, STAGED_BITS) if profile is STAGED else (META, BITS)
    for path in _native.tide_paths():
        codec = TideCodec(profile, 1e-3, 2, path)
        sections = codec.encode(meta, bits)
        coded.append([(s.id, bytes(s.data)) for s in sections])
        read.append(decoded_by(codec, meta, sections))
    assert all(sections == coded[0] for sections in coded)
    assert all(np.array_equal(out, read[0]) for out in read)


@pytest.mark.parametrize(
    ("name", "of_profile", "meta", "bits"),
    [
        ("tide", "tide", META, BITS),
        ("tide-staged-apart", "tide-staged", STAGED_META, STAGED_BITS),
        ("tide-octaves", "tide-octaves", block_meta(LAYOUT, 0, 0), LOUD_BITS),
        ("tide-trellis-apart", "tide-trellis", block_meta(LAYOUT, 0, 0), BITS),
        # Of a time when quiet tokens behind the first, or sinks, were coded: read, not written any more.
        ("tide-trellis", "tide-trellis", block_meta(LAYOUT, 0, 0), BITS),
        ("tide-staged", "tide-staged", STAGED_META, STAGED_BITS),
    ],
    ids=["one stage", "two stages", "out of line", "along a trellis", "first tokens coded", "sinks coded"],
)
def test_golden_bytes_are_still_written_and_read(name: str, of_profile: str, meta: BlockMeta, bits: BlockBits) -> None:
    profile = Profile.parse((GOLDEN / f"{of_profile}.kvprofile").read_bytes())
    codec, stored = TideCodec(profile, 1e-2, 2), (GOLDEN / f"{name}.kvt").read_bytes()
    is_written = bytes(pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)) == stored
    assert is_written == (name not in {"tide-trellis", "tide-staged"})
    reader: Any = CodecRegistry([profile]).get("tide-1", profile.digest)
    out = decoded_by(reader, meta, parse_object(stored).sections())
    assert error(bits, out) < 0.35 * max(1.0, float(floats(bits).std()))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("cost", ["light", "layer"])
def test_dims_out_of_line_cost_nothing_and_lose_nothing(cost: str, number: int) -> None:
    meta, sizes, errors = block_meta(LAYOUT, 0, number), [], []
    for profile, bits, louder in (
        (in_line(LAYOUT, cost), BITS, 1.0),
        (out_of_line(LAYOUT, cost), LOUD_BITS, LOUDER[:, None]),
    ):
        codec = TideCodec(profile, 1e-3, 1)
        sections = codec.encode(meta, bits)
        codec.check_decoded(meta, bits, sections)
        out = decoded_by(codec, meta, sections)
        sizes.append(sum(len(section.data) for section in sections))
        lost = (floats(out) - floats(bits)).reshape(15, 2, 16, 8) / louder
        errors.append([np.abs(lost[:, :, :4]).max(), np.abs(lost[:, :, 4:]).max()])
    assert sizes[1] < 1.02 * sizes[0]
    assert np.allclose(errors[1], errors[0], rtol=0.2)


def test_two_stages_lose_what_the_profile_promises_and_keep_most_of_the_gain() -> None:
    sizes = {}
    for profile in (of_alike(STAGED_LAYOUT, "light"), STAGED, of_alike(STAGED_LAYOUT, "layer")):
        codec = TideCodec(profile, 1e-2, 1).rounded()
        sections = codec.encode(STAGED_META, STAGED_BITS)
        codec.check_decoded(STAGED_META, STAGED_BITS, sections)
        sizes["place" in profile.arrays, "order" in profile.arrays] = sum(len(s.data) for s in sections)
    light, stages, dense = sizes[False, True], sizes[True, False], sizes[False, False]
    assert STAGED.arrays["mixed"].size
    assert dense <= stages < light
    # Layers whose heads have no even part keep one matrix.
    assert "fine" in staged(BlockLayout(layers=1, tokens=16, kv_heads=2, head_dim=5, dtype=KVDtype.FLOAT32)).arrays


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_section_is_refused_or_decoded_never_crashes(data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(SECTIONS) - 1))
    damaged = bytearray(SECTIONS[position].data)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + 1] = data.draw(st.binary(max_size=3))
    try:
        out = decoded([s if i != position else Section(s.id, bytes(damaged)) for i, s in enumerate(SECTIONS)])
    except CorruptPayload:
        return
    start, stop = SECTIONS[position].id.layer_start, SECTIONS[position].id.layer_stop
    untouched = [*range(start), *range(stop, LAYOUT.layers)]
    assert np.array_equal(out[untouched], EXPECTED[3][untouched])


def test_quality_goes_through_the_curve() -> None:
    curve = np.array([[-30, 3, 1e-3], [0, 2, 1e-2], [20, 1, 1e-1]], dtype=np.float32)
    assert [units_of_quality(curve, quality) for quality in (1e-3, 1e-2, 1e-1)] == [-30, 0, 20]
    assert units_of_quality(curve, 3.17e-3) in (-15, -16)
    assert units_of_quality(curve, 1e-4) == -60
    for units in (-60, -30, -7, 0, 20, 33):
        assert units_of_quality(curve, quality_of_units(curve, units)) in (units, units - 1)
    for quality in (0.0, -1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="KL"):
            TideCodec(fitted(LAYOUT), quality)
    # Steps are those that sections can say.
    flat = np.array([[0, 1, 1e-3], [1e6, 1, 1.001e-3]], np.float32)
    assert [units_of_quality(flat, quality) for quality in (1e-5, 1.0)] == [-480, 480]
    with pytest.raises(CorruptPayload, match="rise"):
        units_of_quality(curve[::-1].copy(), 1e-3)


GAIN, _ = TideCodec(fitted(LAYOUT), 1e-2, 1).gain_and_excess(META, BITS)
OWN_GAINS = np.array([[-30, GAIN, 2], [30, GAIN, 2]], np.float32)
OWN_LOSS = {"own_gains": OWN_GAINS, "own_deviation": np.array([0.3], np.float32)}
OWN = TideCodec(fitted(LAYOUT).with_arrays(OWN_LOSS), 1e-2, 1)


def louder(factor: float) -> BlockBits:
    """The same block with values that lie so much farther from their means."""
    values = floats(BITS)
    mean = values.mean(axis=2, keepdims=True)
    found: BlockBits = (mean + np.float32(factor) * (values - mean)).view(BITS.dtype)
    return found


def test_block_gets_the_step_at_which_its_own_loss_is_what_was_asked() -> None:
    usual = OWN.steps.final_units
    found = [(OWN.encode(META, louder(factor)), louder(factor)) for factor in (0.8, 1.0, 1.25)]
    units = [steps_of(memoryview(sections[0].data)).final_units for sections, _ in found]
    # A quiet one is promised no more than others.
    assert usual == units[0] >= units[1] > units[2]
    assert usual - units[1] <= 2
    for sections, bits in found:
        # Gains are whole units, and one step has another gain than the next.
        assert OWN.quality_of(sections) == pytest.approx(1e-2, rel=0.2)
        OWN.check_decoded(META, bits, sections)
        assert OWN.quality_of([each for each in sections if each.id.refinement == 0]) > 2e-2


def test_what_is_lost_at_any_step_makes_no_loud_block_finer_and_what_no_step_keeps_is_not_coded() -> None:
    # Of a real model a quarter of what is asked for.
    curve = np.array([[-60, 6, 3e-3], [-47, 5, 3.1e-3], [-21, 3, 1e-2], [5, 1, 1e-1]], np.float32)
    arrays = {"curve": curve, "trellis_curve": curve, "own_deviation": np.ones(1, np.float32)}
    profile = OWN.model.profile.with_arrays(arrays)
    codec = TideCodec(profile, 1e-2, 1)
    sections = codec.encode(META, louder(1.25))
    assert -47 < steps_of(memoryview(sections[0].data)).final_units < codec.steps.final_units - 3
    assert codec.quality_of(sections) == pytest.approx(1e-2, rel=0.3)
    # As devices encode, too.
    assert -47 <= TideCodec(profile, 4e-3).rounded().steps.final_units < -21
    with pytest.raises(UnencodableBlock, match="no step keeps a KL"):
        codec.with_steps(Steps(-391, 0, is_trellis=True)).encode(META, BITS)


def test_block_a_little_above_its_promise_is_coded_a_unit_finer_and_one_far_above_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec, lost = OWN.rounded(), []
    for excess, finer in ((0.98, 0), (1.04, 1)):
        # Of the block and of each group of layers.
        monkeypatch.setattr(promise, "_allowed", lambda fit: sum(seen.error for _, seen in fit) / excess)  # noqa: B023
        sections = codec.encode(META, louder(1.0))
        assert {steps_of(memoryview(each.data)).final_units for each in sections} == {codec.steps.final_units - finer}
        lost.append(float(np.square(floats(decoded_by(codec, META, sections)) - floats(louder(1.0))).mean()))
    assert lost[1] < lost[0] / 1.04
    monkeypatch.setattr(promise, "_allowed", lambda fit: sum(seen.error for _, seen in fit) / 1.06)
    with pytest.raises(UnencodableBlock, match=r"1\.06 times"):
        codec.encode(META, louder(1.0))


def test_block_may_have_the_errors_that_those_of_the_curve_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WIDE_MARGIN", "NARROW_MARGIN", "NARROW_MARGIN_JOINT"):
        monkeypatch.setattr(promise, name, 0.85 * getattr(promise, name))
    of_scales = fitted(LAYOUT)
    measured = of_scales.with_arrays({"excess": np.array([[-30, 1.2], [30, 1.2]], np.float32)})
    with pytest.raises(UnencodableBlock, match="the error is"):
        TideCodec(of_scales, 1e-2, 1).encode(META, BITS)
    codec = TideCodec(measured, 1e-2, 1)
    sections = codec.encode(META, BITS)
    assert {steps_of(memoryview(each.data)) for each in sections} == {codec.steps}
    codec.check_decoded(META, BITS, sections)


def test_one_step_for_all_leaves_room_for_what_blocks_deviate() -> None:
    codec = OWN.rounded()
    assert codec.steps.final_units == TideCodec(fitted(LAYOUT), 1e-2 * np.exp(-0.3), 1).rounded().steps.final_units
    for factor in (0.8, 1.25):
        assert steps_of(memoryview(codec.encode(META, louder(factor))[0].data)) == codec.steps


def test_own_loss_of_blocks_that_nobody_has_seen_the_like_of_is_bounded() -> None:
    own = OwnLoss(np.array([[0.0, 1.0, 0.5]]), 0.3)
    assert own.factor(-400, 1.0) == 1.0
    assert own.factor(0, 1.5) == pytest.approx(np.exp(0.3))
    assert own.factor(0, 60.0) == pytest.approx(np.exp(2.0))
    assert own.factor(0, -60.0) == 1.0


@pytest.mark.parametrize(
    ("gains", "deviation"),
    [
        ([[0, 1, 0]], [0.3]),
        ([[0, 1, 1]], [-0.3]),
        ([[0, 1, 1]], [np.inf]),
        ([[0, np.nan, 1]], [0.3]),
        ([[0, 1, 1], [0, 1, 1]], [0.3]),
        ([[0, 1]], [0.3]),
        (np.empty((0, 3)), [0.3]),
        ([[0, 1, 1]], [0.3, 0.3]),
    ],
)
def test_own_losses_that_are_none_are_refused(gains: Any, deviation: Any) -> None:
    arrays = {"own_gains": np.array(gains, np.float32), "own_deviation": np.array(deviation, np.float32)}
    with pytest.raises(CorruptPayload, match=r"gains by step|own_gains|own_deviation"):
        TideModel(fitted(LAYOUT).with_arrays(arrays))


def test_registry_wants_a_profile_where_the_model_is_known() -> None:
    registry = CodecRegistry([fitted(LAYOUT), fitted(LAYOUT, "light")])
    assert registry.make("tide", LAYOUT).profile == fitted(LAYOUT).digest
    assert registry.make("tide-light:1e-2:1", LAYOUT).profile == fitted(LAYOUT, "light").digest
    with pytest.raises(ValueError, match="calibrate"):
        registry.make("tide-deep", LAYOUT)


@pytest.mark.parametrize(
    ("layers", "heads", "dims", "spanned"),
    [(30, 3, 64, 10), (24, 3, 64, 8), (28, 2, 128, 7), (32, 4, 64, 4), (11, 3, 64, 1), (40, 8, 128, 1), (4, 1, 16, 4)],
)
def test_deep_transform_spans_whole_parts_of_any_model_that_are_not_too_wide(
    layers: int, heads: int, dims: int, spanned: int
) -> None:
    layout = BlockLayout(layers, 16, heads, dims, KVDtype.FLOAT32)
    assert transform_layers(COSTS["deep"], layout) == spanned
    assert is_staged(COSTS["deep"], layout) == (spanned == 1 and 2 * heads * dims > 512)


def forged(profile: Profile | None = None, **changes: Any) -> Profile:
    profile = profile or fitted(LAYOUT)
    arrays = {name: array for name, array in (dict(profile.arrays) | changes).items() if array is not None}
    layout = STAGED_LAYOUT if profile is STAGED else LAYOUT
    return Profile.make(profile.kind, profile.model, layout, (1, 1), arrays)


ONE_STAGE: list[dict[str, Any]] = [
    {"span": None},
    {"span": np.array([0, 5], np.uint32)},
    {"span": np.array([2, 5], np.uint32)},
    {"span": np.array([1, 4], np.uint32)},
    {"mean": np.zeros((15, 2, 7), np.float32)},
    {"mean": np.full((15, 2, 8), np.nan, np.float32)},
    {"weight": np.zeros((15, 2, 8), np.float32)},
    {"weight": None, "even_weight": np.ones((15, 2, 8), np.float32)},
    {"weight": None, "octaves": np.zeros((15, 2, 8), np.int16)},
    {"even_weight": np.ones((15, 2, 8), np.float32), "octaves": np.zeros((15, 2, 7), np.int16)},
    {"even_weight": np.ones((15, 2, 8), np.float32), "octaves": np.full((15, 2, 8), 13, np.int16)},
    {"scale": np.arange(15 * 16, dtype=np.int16).reshape(15, 16)},
    {"scale": np.zeros((15, 17), np.int16)},
    {"unit": np.zeros((15, 3), np.float32)},
    {"tables": np.zeros(40, np.uint8)},
    {"rotary": np.zeros(5, np.uint8)},
    {"pulls": np.zeros((3, 4), np.int16)},
    {"span": np.array([np.nan, 5], np.float32)},
    {"scale": np.full((15, 16), 1 << 30, np.int32)},
    {"scale": np.full((15, 16), 32767, np.int16)},
    {"scale": np.empty((15, 0), np.int16)},
    {"order": np.full((15, 16), 16, np.uint16)},
    {"coarse": np.zeros((15, 0, 16), np.float32)},
    {"unit": np.full((15, 16), np.nan, np.float32)},
    {"own_gains": np.float32(1), "own_deviation": np.ones(1, np.float32)},
    {"excess": np.array([[0, 1], [0, 1]], np.float32)},
    {"excess": np.array([[0, 0.5]], np.float32)},
    {"excess": np.array([[0, np.nan]], np.float32)},
    {"excess": np.empty((0, 2), np.float32)},
    {"rotary": np.frombuffer(rotary_by(1e4, 16).to_bytes(), np.uint8)},
    {"rotary": np.frombuffer(replace(rotary_by(1e4, 8), layer_kinds=(0,) * 14).to_bytes(), np.uint8)},
    {"curve": np.array([[0, 1, 1e-3], [np.nan, 1, 1e-2]], np.float32)},
    {"curve": np.array([[0, 1, 1e-3], [np.inf, 1, 1e-2]], np.float32)},
]
TWO_STAGES: list[dict[str, Any]] = [
    {"place": np.zeros((2, 48), np.uint16)},
    {"place": STAGED.arrays["place"][:, ::-1].copy()},
    {"mixed": STAGED.arrays["mixed"] * 0 + STAGED.arrays["mixed"][:, :1]},
    {"mixed": STAGED.arrays["mixed"][:, :-1].copy()},
    {"mixed": STAGED.arrays["mixed"] + np.uint16(48)},
    {"block_unit": STAGED.arrays["block_unit"][:, :-1].copy()},
    {"block_fine": None},
    {"block_unit": np.zeros((), np.float32)},
]


@pytest.mark.parametrize(
    ("profile", "changes"), [*((None, each) for each in ONE_STAGE), *((STAGED, each) for each in TWO_STAGES)]
)
def test_forged_profile_is_refused(profile: Profile | None, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptPayload):
        TideCodec(forged(profile, **changes))


def test_layers_are_counted_by_arrays_before_anything_is_made_of_each() -> None:
    # No range can be made of a float.
    with pytest.raises(CorruptPayload, match="'mean' has shape"):
        TideModel(msgspec.structs.replace(fitted(LAYOUT), layers=15e18))


def test_losses_are_those_of_the_curve_a_third_of_the_step_at_a_time() -> None:
    codec = TideCodec(fitted(LAYOUT), 1e-2, 2)
    # 10 times the loss for 40 units below, and for 30 above, of which a path that is cut has .7.
    cut = 0.7 * 1e-2
    assert LossLaw.of(codec).losses == pytest.approx((cut * 10 ** (38 / 30), cut * 10 ** (19 / 30), 1e-2), rel=1e-3)


# Levels along a trellis: kernels against their twin on every path, and the codec that is made of them.

PATHS = _native.tide_paths()
TWINS = (4, 20)
LAYERS = TideModel(fitted(LAYOUT)).section_layers
TRELLIS = TideCodec(fitted(LAYOUT), 1e-3, 2)


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    tokens=st.integers(1, 150),
    loud=st.sampled_from([2, 20, 300, 32600]),
)
@settings(max_examples=40, deadline=None)
def test_cheapest_path_is_the_twins(path: str, seed: int, rows: int, tokens: int, loud: int) -> None:
    rng = np.random.default_rng(seed)
    exact = np.clip(np.rint(rng.laplace(0, loud / 2, (rows, tokens))), -32600, 32600).astype(np.int16)
    classes = rng.integers(0, 3, (rows, 4)).astype(np.uint16)
    rates = rng.integers(0, rng.choice([2, 200, 1000]), (3, 32)).astype(np.int16)
    found = np.empty_like(exact)
    _native.tide_find_path(path, exact, classes, rates, found)
    assert np.array_equal(found, twin.find_path(exact, classes, rates))


def lists_of(rng: np.random.Generator, rows: int, tokens: int) -> tuple[Any, ...]:
    parents = np.rint(rng.laplace(0, 1.2, (rows, tokens))).astype(np.int16)
    modes = rng.integers(0, 3, rows).astype(np.uint8)
    levels = parents * np.int16(3) + rng.integers(-1, 2, (rows, tokens)).astype(np.int16)
    # Top values are lists 0 to 7, digits 8 to 47.
    tables = np.where(modes[:, None] == twin.TOP, rng.integers(0, 4, (rows, 4)), 8 + 3 * rng.integers(0, 6, (rows, 4)))
    return levels, parents, modes, tables.astype(np.uint16)


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 12), tokens=st.integers(1, 150))
@settings(max_examples=80, deadline=None)
def test_lists_by_state_are_the_twins_and_taking_undoes_putting(path: str, seed: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    levels, parents, modes, tables = lists_of(rng, rows, tokens)
    expected = twin.put_states(levels, parents, modes, tables, TWINS)
    counts = np.zeros(48, dtype=np.int64)
    _native.tide_count_states(path, levels, parents, modes, tables, TWINS, counts)
    assert counts.tolist() == [len(expected.get(table, [])) for table in range(48)]
    stops = np.cumsum(counts)
    items, cursors = np.zeros(int(stops[-1]) + _native.TIDE_SLACK, dtype=np.int16), stops - counts
    assert _native.tide_put_states(path, levels, parents, modes, tables, TWINS, items, cursors, stops)
    assert np.array_equal(cursors, stops)
    assert items[: stops[-1]].tolist() == [item for table in range(48) for item in expected.get(table, [])]
    taken = np.where(modes[:, None] == twin.DIGIT, levels, parents)
    assert _native.tide_take_states(path, taken, modes, tables, TWINS, items, stops - counts, stops)
    assert np.array_equal(taken, twin.half_steps(levels))


@pytest.mark.parametrize("path", PATHS)
def test_lists_that_states_ask_too_much_of_are_refused(path: str) -> None:
    values, modes = np.ones((2, 40), dtype=np.int16), np.zeros(2, dtype=np.uint8)
    tables, items = np.zeros((2, 4), dtype=np.uint16), np.ones(80 + _native.TIDE_SLACK, dtype=np.int16)
    # Of the second row quantiser 1 takes all; one too few for it, or for the first.
    for first in (39, 41):
        cursors = np.array([0] * 4 + [first] * 4, dtype=np.int64)
        stops = np.array([first] * 4 + [80] * 4, dtype=np.int64)
        assert not _native.tide_take_states(path, values.copy(), modes, tables, (4, 4), items, cursors, stops)
        cursors[4:] = first
        cursors[:4] = 0
        assert not _native.tide_put_states(path, values, values, modes, tables, (4, 4), items.copy(), cursors, stops)
    for cursor, stop in ((-1, 40), (0, 81), (41, 40)):
        cursors, stops = np.full(8, cursor, dtype=np.int64), np.full(8, stop, dtype=np.int64)
        assert not _native.tide_take_states(path, values.copy(), modes, tables, (4, 4), items, cursors, stops)


@pytest.mark.parametrize(
    ("exact", "number", "rate"), [(0, 0, 1001), (0, 0, -1), (32601, 0, 0), (-32601, 0, 0), (0, 3, 0)]
)
def test_prices_that_would_overflow_are_refused(exact: int, number: int, rate: int) -> None:
    values, classes = np.full((2, 8), exact, dtype=np.int16), np.full((2, 4), number, dtype=np.uint16)
    rates, levels = np.full((3, 32), rate, dtype=np.int16), np.zeros((2, 8), dtype=np.int16)
    with pytest.raises(ValueError, match="tide"):
        _native.tide_find_path(PATHS[0], values, classes, rates, levels)


def lost(found: BlockBits, bits: BlockBits) -> float:
    return float(np.square((floats(found) - floats(bits))[:, :, 4:].astype(np.float64)).mean())


@pytest.mark.parametrize("refinements", [0, 2])
def test_a_trellis_loses_less_with_the_same_bytes(refinements: int) -> None:
    # As many values as it takes for counts and fillings to be few.
    layout = BlockLayout(5, 256, 2, 16, KVDtype.FLOAT32)
    meta, bits, codec = block_meta(layout, 0, 1), smooth_bits(layout, 77), TideCodec(fitted(layout, "layer", 6))
    by_levels = []
    for is_trellis in (False, True):
        points, out = [], np.empty_like(bits)
        for units in range(-40, 0, 4):
            at_step = codec.with_steps(Steps(units, refinements, is_trellis))
            sections = at_step.encode(meta, bits)
            at_step.decode(meta, sections, out)
            points.append((sum(len(each.data) for each in sections), lost(out, bits)))
        by_levels.append(np.array(points))
    plain, found = by_levels
    at = found[len(found) // 2]
    error = np.exp(np.interp(-at[0], -plain[:, 0], np.log(plain[:, 1])))
    assert at[1] < 0.87 * error


def test_less_than_all_refinements_are_thirds_of_the_path() -> None:
    sections = TRELLIS.encode(META, BITS)
    by_last = [[each for each in sections if each.id.refinement <= last] for last in range(3)]
    errors = [lost(decoded(here, TRELLIS), BITS) for here in by_last]
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    losses = LossLaw.of(TRELLIS).losses
    assert losses[0] > losses[1] > losses[2] == pytest.approx(1e-3, rel=0.1)
    assert [TRELLIS.quality_of(here) for here in by_last] == pytest.approx(losses)


def test_rounded_levels_are_those_of_a_profile_that_knows_no_trellis() -> None:
    arrays = {name: each for name, each in fitted(LAYOUT).arrays.items() if not name.startswith("trellis")}
    old = fitted(LAYOUT)
    plain = TideCodec(Profile.make(old.kind, old.model, LAYOUT, (old.texts, old.tokens), arrays), TRELLIS.quality, 2)
    assert not plain.steps.is_trellis
    assert LossLaw.of(plain).losses == LossLaw.of(TRELLIS.rounded()).losses
    rounded = TRELLIS.rounded().encode(META, BITS)
    assert plain.encode(META, BITS) == rounded
    assert np.array_equal(decoded(rounded, plain), decoded(rounded, TRELLIS))
    with pytest.raises(CorruptPayload, match="trellis"):
        decoded(TRELLIS.encode(META, BITS), plain)


@pytest.mark.parametrize(
    "changed",
    [
        lambda before, counts: before + bytes([counts[0] + 1]) + counts[1:],
        lambda before, counts: before + bytes([counts[0] - 1]) + counts[1:],
        lambda before, counts: before + counts + bytes(1),
        lambda before, counts: before + counts[:-1],
        lambda before, counts: before[:3] + bytes(1) + before[4:] + counts,
    ],
    ids=["one more", "one less", "a byte more", "a byte less", "of a rounded section"],
)
def test_what_states_share_out_must_add_up(changed: Callable[[bytes, bytes], bytes]) -> None:
    codec = TRELLIS.with_steps(Steps(-20, 1, is_trellis=True))
    sections = codec.encode(META, BITS)
    last = [each.id for each in sections].index(SectionId(SectionKind.DATA, 1, 0, LAYERS))
    counts = split_refinement(memoryview(sections[last].data)).state_counts
    assert counts
    before, _, after = bytes(sections[last].data).partition(counts)
    sections[last] = Section(sections[last].id, changed(before, counts) + after)
    with pytest.raises(CorruptPayload):
        decoded(sections, codec)


def test_thirds_have_nothing_to_share_out() -> None:
    codec = TRELLIS.with_steps(Steps(-20, 1, is_trellis=True))
    sections = codec.encode(META, BITS)
    base = [each.id for each in sections].index(SectionId(SectionKind.DATA, 0, 0, LAYERS))
    data = bytes(sections[base].data)
    # Where a last section has its counts: before the streams and escapes.
    found, _ = split_base(memoryview(data), BITS[:LAYERS].shape)
    at = len(data) - sum(found.lists.streams.sizes) - 2 * sum(found.lists.escape_counts)
    sections[base] = Section(sections[base].id, data[:at] + bytes(3) + data[at:])
    with pytest.raises(CorruptPayload, match="too many"):
        decoded(sections, codec)


LAW = LossLaw(DEFAULT_POSITIONS, (0.7, 0.09, 0.007, 0.0009))
LINEAR, WEIGHTS = Powers(1, 1, 1), (1.0,) * len(DISTANCES)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_more_refinements_never_lose_more(kept: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(kept) - 1))
    finer = [*kept[:at], min(kept[at] + 1, 4), *kept[at + 1 :]]
    for purpose in Purpose:
        assert LAW.kl(finer, 256, purpose) <= LAW.kl(kept, 256, purpose) + 1e-12


@pytest.mark.parametrize("purpose", Purpose)
def test_loss_of_a_hit_does_not_depend_on_how_it_is_cut_into_blocks(purpose: Purpose) -> None:
    coarse = [1, 0, 2, 3]
    fine = [each for each in coarse for _ in range(4)]
    assert LAW.kl(fine, 64, purpose) == pytest.approx(LAW.kl(coarse, 256, purpose))
    assert LAW.lost(4, 256)[purpose, range(4), coarse].sum() == pytest.approx(LAW.kl(coarse, 256, purpose))
    assert LAW.kl([], 256, purpose) == LAW.kl([4] * 8, 256, purpose) == 0.0, "nothing, and exact blocks, lose nothing"
    flat = [LAW.kl([kept] * 6, 256, Purpose.GOES_ON) for kept in range(4)]
    assert flat == pytest.approx(LAW.losses), "the level is the curve's"


def test_copies_are_judged_by_the_passage_that_is_named() -> None:
    kept = [3, 0, 3, 3]
    mean = LAW.kl(kept, 256, Purpose.COPIES)
    good, bad = (LAW.kl(kept, 256, Purpose.COPIES, [block]) for block in (0, 1))
    assert good < mean < bad
    assert LAW.kl(kept, 256, Purpose.GOES_ON, [1]) == LAW.kl(kept, 256, Purpose.GOES_ON)


@pytest.mark.parametrize(
    "call",
    [
        lambda: LAW.kl([5], 256, Purpose.COPIES),
        lambda: LAW.kl([-1], 256, Purpose.COPIES),
        lambda: LAW.kl([1], 0, Purpose.COPIES),
        lambda: PositionLaw(1, 1, (), LINEAR, LINEAR, LINEAR),
        lambda: PositionLaw(-1, 1, WEIGHTS, LINEAR, LINEAR, LINEAR),
        lambda: PositionLaw(1, 1, WEIGHTS, LINEAR, LINEAR, Powers(1, 0, 1)),
        lambda: PositionLaw(1, 1, WEIGHTS, Powers(1, 1, float("inf")), LINEAR, LINEAR),
        lambda: PositionLaw(1, 1, (0.0, *WEIGHTS[1:]), LINEAR, LINEAR, LINEAR),
    ],
)
def test_what_is_no_law_and_no_hit_is_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]


def law_table(positions: tuple[PositionLaw, PositionLaw]) -> Any:
    return np.array([(LAW_VERSION, *law.numbers) for law in positions], dtype=np.float32)


def test_profile_carries_its_law_through_its_bytes_and_one_without_has_the_default() -> None:
    positions = (PositionLaw(0.5, 0, WEIGHTS, LINEAR, Powers(0.5, 1, 1), Powers(1, 0.75, 0.25)), DEFAULT_POSITIONS[1])
    profile = Profile.parse(fitted(LAYOUT).with_arrays({"law": law_table(positions)}).to_bytes())
    found, default = (LossLaw.of(TideCodec(each, 1e-2, 2)) for each in (profile, fitted(LAYOUT)))
    assert found.positions[0] == positions[0] and default.positions == DEFAULT_POSITIONS
    assert found.losses == default.losses and len(found.losses) == 3
    with pytest.raises(ValueError, match="profile"):
        LossLaw.of(TideCodec())


@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 5)])
def test_damaged_law_of_a_profile_is_found(place: tuple[int, int]) -> None:
    table = law_table(DEFAULT_POSITIONS)
    table[place] = -1
    for bad in (table, table[:, :-1], table[:1]):
        with pytest.raises(CorruptPayload):
            TideCodec(forged(law=bad), 1e-2)
