"""The published codecs: native quantisers against their twins, profiles, integers, sections of cachegen."""

import hashlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.suites import bits_of, block_meta, layouts, smooth_bits
from tests.suites.codec_suite import decoded_by

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, KVDtype, values_of
from kvtide.codec import CodecRegistry, Profile
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.published.cachegen import GROUP_TOKENS, ProfileFitter, delta_layers
from kvtide.codec.published.integers import (
    CodedIntegers,
    Distribution,
    IntegerRuns,
    Integers,
    decode_alike,
    encode_integers,
    fit_distribution,
    value_counts,
)
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionKind
from kvtide.wire import pack_object, parse_object

GROUP = 10
Floats = NDArray[np.float32]
element_types = st.sampled_from(KVDtype)


def normal_bits(seed: int, shape: tuple[int, int], dtype: KVDtype, spread: float = 1.0) -> BlockBits:
    return bits_of((np.random.default_rng(seed).normal(size=shape) * spread).astype(np.float32), dtype)


def twin_quantised(values: Floats, step: float, group: int = GROUP, half: int = 127) -> tuple[Any, Any, Any]:
    """Anchors, scales rounded up to bfloat16, and deltas of (tokens, channels)."""
    tokens = len(values)
    largest = np.abs(values[::group]).max(axis=1)
    bits = ((largest.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    scales = values_of(bits, KVDtype.BFLOAT16)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.float32(half) / scales
    factor = np.where(np.isfinite(factor), factor, np.float32(0)).astype(np.float32)
    anchors = np.rint(np.clip(values[::group] * factor[:, None], -half, half)).astype(np.int16)
    decoded = anchors.astype(np.float32) * (scales / np.float32(half))[:, None]
    deltas = (values - np.repeat(decoded, group, axis=0)[:tokens]) * (np.float32(1) / np.float32(step))
    rest = np.arange(tokens) % group != 0
    return anchors.T, bits, np.rint(np.clip(deltas[rest], -32767, 32767)).astype(np.int16).T


def quantised(bits: BlockBits, dtype: KVDtype, step: float, group: int = GROUP, half: int = 127) -> Any:
    """The same by the kernel; None if a value is not finite."""
    tokens, channels = bits.shape
    groups = -(-tokens // group)
    anchors, scales = np.empty((channels, groups), np.int16), np.empty(groups, np.uint16)
    found = anchors, scales, np.empty((channels, tokens - groups), np.int16)
    is_finite = _native.quantise_groups(bits.reshape(-1).view(np.uint8), dtype.code, group, half, step, *found)
    return found if is_finite else None


def restored(found: Any, bits: BlockBits, dtype: KVDtype, step: float, group: int = GROUP, half: int = 127) -> Floats:
    out, (anchors, scales, deltas) = np.empty_like(bits), found
    _native.restore_groups(anchors, scales, deltas, group, half, step, dtype.code, out.reshape(-1).view(np.uint8))
    return values_of(out, dtype)


def check_twin(found: Any, truth: Any) -> None:
    for native, twin in zip(found, truth, strict=True):
        assert np.array_equal(native, twin)


@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 45),
    channels=st.integers(1, 20),
    dtype=element_types,
    spread=st.sampled_from([1e-20, 1e-4, 1.0, 300.0]),
)
@settings(max_examples=150, deadline=None)
def test_cachegen_is_its_twin(seed: int, tokens: int, channels: int, dtype: KVDtype, spread: float) -> None:
    bits, step = normal_bits(seed, (tokens, channels), dtype, spread), float(np.float32(max(0.1 * spread, 1e-30)))
    check_twin(quantised(bits, dtype, step), twin_quantised(values_of(bits, dtype), step))


@given(seed=st.integers(0, 2**32), tokens=st.integers(2, 45), dtype=element_types)
@settings(max_examples=60, deadline=None)
def test_cachegen_is_off_by_half_a_step_at_most(seed: int, tokens: int, dtype: KVDtype) -> None:
    bits = normal_bits(seed, (tokens, 8), dtype)
    exact = values_of(bits, dtype)
    error = np.abs(restored(quantised(bits, dtype, 0.25), bits, dtype, 0.25) - exact)
    is_anchor = np.arange(tokens) % GROUP == 0
    # Beside the step: the rounding of the output's own type.
    rounding = {KVDtype.FLOAT32: 1e-6, KVDtype.FLOAT16: 2e-3, KVDtype.BFLOAT16: 2e-2}[dtype]
    assert error[~is_anchor].max(initial=0) <= 0.125 + rounding
    anchor_step = np.abs(exact[is_anchor]).max(axis=1) * 1.01 / 127
    assert (error[is_anchor].max(axis=1) <= anchor_step / 2 + rounding).all()


@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 30), dtype=element_types, half=st.sampled_from([7, 15, 63]))
@settings(max_examples=100, deadline=None)
def test_chunkwise_is_its_twin_and_in_its_bound(seed: int, tokens: int, dtype: KVDtype, half: int) -> None:
    bits = normal_bits(seed, (tokens, 6), dtype)
    bits[0] = 0
    exact, found = values_of(bits, dtype), quantised(bits, dtype, 1.0, 1, half)
    check_twin(found, twin_quantised(exact, 1.0, 1, half))
    back = restored(found, bits, dtype, 1.0, 1, half)
    assert not back[0].any()
    scale = values_of(found[1], KVDtype.BFLOAT16)
    assert (np.abs(back - exact).max(axis=1) <= scale / half / 2 + 2e-2).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", KVDtype)
@pytest.mark.parametrize("token", [0, 7])
def test_values_that_are_not_finite_are_refused(bad: float, dtype: KVDtype, token: int) -> None:
    values = np.ones((12, 4), dtype=np.float32)
    values[token, 2] = bad
    assert quantised(bits_of(values, dtype), dtype, 0.1) is None


def test_float16_is_rounded_as_numpy_rounds_it_up_to_its_largest_value() -> None:
    """Symbol 15 of 15 is the scale itself: every positive bfloat16, so that denormals and overflow are met."""
    scales = np.arange(1, 0x7F80, dtype=np.uint16)
    out = np.empty(2 * scales.size, np.uint8)
    symbols, none = np.full((1, scales.size), 15, np.int16), np.empty((1, 0), np.int16)
    _native.restore_groups(symbols, scales, none, 1, 15, 1.0, 2, out)
    values = values_of(scales, KVDtype.BFLOAT16)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.minimum(np.float32(15) * (values / np.float32(15)), np.float32(65504)).astype(np.float16)
    assert np.array_equal(out.view(np.float16), expected)
    # Whatever a payload says, what is stored is finite.
    ends = np.array([[0, 1, -1]], np.int16)
    _native.restore_groups(ends, np.full(3, 0x7F80, np.uint16), none, 1, 15, 1.0, 2, out[:6])
    assert out[:6].view(np.float16).tolist() == [65504, 65504, -65504]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": 0}, "element type"),
        ({"code": 4}, "element type"),
        ({"group": 0}, "group"),
        ({"half": 0}, "half"),
        ({"step": 0.0}, "step"),
        ({"step": -1.0}, "step"),
        ({"step": float("nan")}, "step"),
        ({"tokens": 11}, "elements"),
        ({"anchors": (4, 3)}, "groups"),
        ({"deltas": (3, 10)}, "channels"),
    ],
)
def test_sizes_that_do_not_fit_are_value_errors(arguments: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"tokens": 12, "code": 1, "group": 10, "half": 127, "step": 0.1}
    sizes |= {"anchors": (4, 2), "deltas": (4, 10), **arguments}
    tokens, code, group, half, step, anchors, deltas = sizes.values()
    made = np.zeros(anchors, np.int16), np.zeros(anchors[1], np.uint16), np.zeros(deltas, np.int16)
    with pytest.raises(ValueError, match=message):
        _native.quantise_groups(np.zeros(tokens * 4 * 4, np.uint8), code, group, half, step, *made)


LAYOUT = BlockLayout(layers=3, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
MAKERS: dict[str, Any] = {"cachegen": CachegenCodec, "chunkwise": ChunkwiseCodec}


def fitted(kind: str, layout: BlockLayout = LAYOUT) -> Profile:
    fitter = ProfileFitter(kind, "made up", layout)
    blocks = [smooth_bits(layout, seed) for seed in range(4)]
    fitter.scale(blocks)
    for bits in blocks:
        fitter.add(bits)
    return fitter.profile(texts=2)


@pytest.mark.parametrize("kind", ProfileFitter.KINDS)
@pytest.mark.parametrize("coder", [0, 1])
def test_shared_tables_make_objects_smaller_and_change_nothing(kind: str, coder: int) -> None:
    profile, meta, bits = fitted(kind), block_meta(LAYOUT), smooth_bits(LAYOUT, 99)
    sizes = []
    for known in (None, profile):
        codec = MAKERS[kind](2, coder, known)
        packed = pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)
        stored = parse_object(packed)
        reader: Any = CodecRegistry([profile]).get(stored.codec_id, stored.profile)
        out = decoded_by(reader, meta, stored.sections())
        assert np.abs(out.view(np.float32) - bits.view(np.float32)).max() < 0.5
        sizes.append(len(packed))
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("kind", ProfileFitter.KINDS)
def test_profile_survives_its_own_bytes_and_its_digest_names_it(kind: str) -> None:
    profile = fitted(kind)
    again = Profile.parse(profile.to_bytes())
    assert again.digest == profile.digest == profile.to_bytes()[-32:]
    assert (again.kind, again.model, again.texts, again.tokens) == (kind, "made up", 2, 128)
    assert fitted(kind).digest == profile.digest


def test_profile_of_another_kind_or_shape_is_not_chosen_and_encodes_nothing() -> None:
    registry = CodecRegistry([fitted("cachegen")])
    assert registry.make("cachegen", LAYOUT).profile is not None
    assert registry.make("chunkwise", LAYOUT).profile is None
    other = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
    assert registry.make("cachegen", other).profile is None
    with pytest.raises(UnencodableBlock, match="made up"):
        CachegenCodec(2, 0, fitted("cachegen")).encode(block_meta(other), smooth_bits(other, 1))
    with pytest.raises(CorruptPayload, match="no distributions"):
        ChunkwiseCodec(2, 0, fitted("cachegen")).encode(block_meta(LAYOUT), smooth_bits(LAYOUT, 1))


@given(position=st.integers(0, 10**7), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_flipped_bit_of_a_profile_is_found(position: int, bit: int) -> None:
    data = bytearray(WHOLE)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptPayload):
        Profile.parse(bytes(data))


WHOLE = fitted("chunkwise").to_bytes()


def test_truncated_or_foreign_profile_is_refused() -> None:
    for length in (0, 1, 40, len(WHOLE) // 2, len(WHOLE) - 1):
        with pytest.raises(CorruptPayload):
            Profile.parse(WHOLE[:length])
    with pytest.raises(CorruptPayload, match="not a profile"):
        Profile.parse(b"\x89KVTIDE\n" + bytes(200))


def signed(body: bytes) -> bytes:
    """A profile with a right digest over wrong content: what a hostile writer would make."""
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"f4"', b'"O8"', "type"),
        (b'"u4"', b'"f2"', "type"),
        (b'"layers":3', b'"layers":x', "parse"),
        (b'"texts":2', b'"texxx":2', "parse"),
        (b"[3,2]", b"[9,2]", "bytes expected|behind"),
        (b"[3,2]", b"[-1]2", "parse|type"),
        (b'"shape":[3,2]', b'"shape":[3,2' + 70 * b",1" + b"]", "shape"),
        (b'"shape":[3,2]', b'"shape":[0,' + 40 * b"9" + b"]", "shape"),
    ],
)
def test_forged_description_is_refused(old: bytes, new: bytes, message: str) -> None:
    body = WHOLE[:-32]
    assert old in body
    forged = bytearray(body.replace(old, new, 1))
    forged[12:16] = (int.from_bytes(body[12:16], "little") + len(new) - len(old)).to_bytes(4, "little")
    with pytest.raises(CorruptPayload, match=message):
        Profile.parse(signed(bytes(forged)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shift", lambda array: array[:, 1:].copy()),
        ("shift", lambda array: array.astype(np.float64)),
        ("tables_bytes", lambda array: array.astype(np.float32)),
    ],
)
def test_profile_whose_tables_are_of_other_layers_is_refused(name: str, change: Any) -> None:
    profile, meta = fitted("cachegen"), block_meta(LAYOUT)
    sections = CachegenCodec(2, 0, profile).encode(meta, smooth_bits(LAYOUT, 1))
    forged = profile.with_arrays({f"anchor.{name}": change(profile.arrays[f"anchor.{name}"])})
    with pytest.raises(CorruptPayload, match="distributions"):
        decoded_by(CachegenCodec(2, 0, forged), meta, sections)


def test_profile_without_deviations_of_all_layers_encodes_nothing() -> None:
    forged = fitted("cachegen").with_arrays({"deviation": np.ones((2, 2), np.float32)})
    with pytest.raises(UnencodableBlock, match="deviations"):
        CachegenCodec(2, 0, forged).encode(block_meta(LAYOUT), smooth_bits(LAYOUT, 1))


def test_calibration_refuses_no_blocks_and_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="cachegen"):
        ProfileFitter("zip", "m", LAYOUT)
    fitter = ProfileFitter("cachegen", "m", LAYOUT)
    with pytest.raises(ValueError, match="full block"):
        fitter.scale([])
    with pytest.raises(ValueError, match="full block"):
        fitter.profile(1)


def test_damaged_shared_section_is_refused_or_decoded() -> None:
    profile, meta, bits = fitted("cachegen"), block_meta(LAYOUT), smooth_bits(LAYOUT, 99)
    codec = CachegenCodec(2, 0, profile)
    sections = codec.encode(meta, bits)
    rng = np.random.default_rng(1)
    out, whole = np.empty_like(bits), decoded_by(codec, meta, sections)
    refused = changed = 0
    for _ in range(200):
        damaged = bytearray(sections[1].data)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        try:
            codec.decode(meta, [sections[0], Section(sections[1].id, bytes(damaged)), *sections[2:]], out)
        except CorruptPayload:
            refused += 1
        else:
            changed += not np.array_equal(out, whole)
    # A bit of an escape that no value takes changes nothing.
    assert refused > 100 and changed > 10, (refused, changed)


RUNS = IntegerRuns(streams=2, runs=3, symbols=40)


def numbers(seed: int, spread: float, runs: IntegerRuns = RUNS) -> Integers:
    values = np.random.default_rng(seed).normal(scale=spread, size=(runs.streams, runs.runs, runs.symbols))
    return np.clip(values, -32768, 32767).astype(np.int16)


def distribution_of(values: Integers, coder: int, is_open: bool = False) -> Distribution:
    rows = values.shape[0] * values.shape[1]
    return fit_distribution(value_counts(values.reshape(rows, values.shape[2])), coder, is_open)


def decode_integers(data: memoryview, runs: IntegerRuns, shared: Distribution | None) -> Integers:
    coded = CodedIntegers.parse(data, runs.streams)
    return decode_alike([coded], runs, coded.distribution(runs, shared))[0]


@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.3, 3.0, 40.0, 400.0, 9000.0]),
    coder=st.integers(0, 1),
    is_shared=st.booleans(),
    symbols=st.integers(0, 70),
)
@settings(max_examples=150, deadline=None)
def test_any_numbers_survive(seed: int, spread: float, coder: int, is_shared: bool, symbols: int) -> None:
    runs = IntegerRuns(2, 3, symbols)
    values = numbers(seed, spread, runs)
    source = numbers(seed + 1, 5.0) if is_shared else values
    distribution = distribution_of(source, coder, is_open=is_shared)
    data = encode_integers(values, runs, distribution, is_shared)
    assert np.array_equal(decode_integers(memoryview(data), runs, distribution if is_shared else None), values)


@pytest.mark.parametrize("extreme", [-32768, 32767, 0])
def test_extreme_numbers_survive(extreme: int) -> None:
    values = np.full((2, 3, 40), extreme, dtype=np.int16)
    data = encode_integers(values, RUNS, distribution_of(values, 0), False)
    assert np.array_equal(decode_integers(memoryview(data), RUNS, None), values)


@pytest.mark.parametrize(("spread", "bits"), [(0.5, 1.4), (2.0, 3.1), (8.0, 5.1), (60.0, 8.0)])
def test_size_is_near_the_entropy(spread: float, bits: float) -> None:
    runs = IntegerRuns(1, 1, 20000)
    values = np.rint(np.random.default_rng(1).normal(scale=spread, size=(1, 1, 20000))).astype(np.int16)
    data = encode_integers(values, runs, distribution_of(values, 0), True)
    counts = np.unique(values, return_counts=True)[1] / values.size
    entropy = float(-(counts * np.log2(counts)).sum())
    assert entropy < bits
    assert 8 * len(data) / values.size < 1.03 * entropy + 0.07


def test_every_truncation_and_extension_is_refused() -> None:
    data = encode_integers(values := numbers(1, 40.0), RUNS, distribution_of(values, 0), False)
    for wrong in (*(data[:length] for length in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptPayload):
            decode_integers(memoryview(wrong), RUNS, None)


@given(data=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_hostile_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(CorruptPayload):
        decode_integers(memoryview(data), RUNS, None)


def test_shared_distributions_that_are_not_here_are_missed() -> None:
    values = numbers(1, 3.0)
    data = memoryview(encode_integers(values, RUNS, distribution_of(values, 0, is_open=True), True))
    for wrong in (None, distribution_of(values, 1, is_open=True)):
        with pytest.raises(CorruptPayload, match="not here"):
            decode_integers(data, RUNS, wrong)


# CacheGen's anchors and deltas apart: which tokens are exact with which sections.

CODECS = [CachegenCodec(), CachegenCodec(level=1, coder=1)]
ODD_LAYOUT = BlockLayout(layers=3, tokens=27, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
ODD_META, ODD_BITS = block_meta(ODD_LAYOUT), smooth_bits(ODD_LAYOUT, 1)
ODD_SECTIONS = CODECS[0].encode(ODD_META, ODD_BITS)


@given(layout=layouts(), seed=st.integers(0, 2**32), codec=st.sampled_from(CODECS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_positions_that_are_here_are_exact_and_the_others_take_their_anchor(
    layout: BlockLayout, seed: int, codec: CachegenCodec, data: st.DataObject
) -> None:
    meta = block_meta(layout)
    sections = codec.encode(meta, smooth_bits(layout, seed))
    here = data.draw(st.sets(st.integers(1, GROUP_TOKENS - 1)))
    some = [section for section in sections if section.id.refinement in here | {0}]
    whole, part = decoded_by(codec, meta, sections), decoded_by(codec, meta, some)
    for token in range(layout.tokens):
        position = token % GROUP_TOKENS
        source = token if position in here else token - position
        assert np.array_equal(part[:, :, token], whole[:, :, source])


def test_anchors_come_first_and_each_position_has_its_refinement() -> None:
    ids = [section.id for section in ODD_SECTIONS]
    assert [section.kind for section in ids[:3]] == [SectionKind.ANCHOR] * 3
    assert [section.refinement for section in ids[3:]] == list(range(1, GROUP_TOKENS))
    assert {(id_.kind, id_.layer_start, id_.layer_stop) for id_ in ids[3:]} == {(SectionKind.DELTA, 0, 3)}


@pytest.mark.parametrize("codec", [CachegenCodec(4), CachegenCodec(1, 1), ChunkwiseCodec(), SnippetCodec()])
def test_encoding_takes_no_more_than_it_says_and_reading_tells_the_level(codec: Any) -> None:
    tracemalloc.start()
    sections = codec.encode(ODD_META, ODD_BITS)
    assert tracemalloc.get_traced_memory()[1] < codec.scratch_bytes(ODD_LAYOUT) + ODD_LAYOUT.raw_bytes
    tracemalloc.stop()
    if isinstance(codec, CachegenCodec):
        assert CODECS[0].quality_of(sections) == codec.quality < CODECS[0].quality_of(sections[:-1]) - 0.03


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tokens", "layers", "expected"),
    [(3, 64, 256, 30, 10), (8, 128, 256, 32, 2), (40, 128, 256, 40, 1), (8, 128, 8, 32, 32), (1, 1, 1, 4096, 4096)],
)
def test_small_layers_share_sections(kv_heads: int, head_dim: int, tokens: int, layers: int, expected: int) -> None:
    ranges = delta_layers(BlockLayout(layers, tokens, kv_heads, head_dim, KVDtype.BFLOAT16))
    assert max(map(len, ranges)) == expected
    assert [layer for layers_ in ranges for layer in layers_] == list(range(layers))


def test_sections_that_are_missing_or_do_not_agree_are_refused() -> None:
    first, _, *others = ODD_SECTIONS
    *most, last = ODD_SECTIONS
    changes: list[dict[str, Any]] = [{"layer_stop": 2}, {"refinement": 10}, {"kind": SectionKind.DATA}]
    strangers = [CachegenCodec(level=2), CachegenCodec(level=3, coder=1)]
    for sections, message in (
        *((ODD_SECTIONS[:at] + ODD_SECTIONS[at + 1 :], "anchors of 3 layers") for at in range(3)),
        *(([*most, Section(last.id._replace(**change), last.data)], "sections of deltas") for change in changes),
        *(([first, each.encode(ODD_META, ODD_BITS)[1], *others], "do not agree") for each in strangers),
    ):
        with pytest.raises(CorruptPayload, match=message):
            decoded_by(CODECS[0], ODD_META, sections)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, 9, "level 9"), (1, 2, "coder 2"), (2, 1, "level 3"), (7, 0xFF, "steps"), (14, 0xFF, "bytes of dist")],
)
def test_each_wrong_field_of_an_anchor_section_is_refused(offset: int, value: int, message: str) -> None:
    first, *others = ODD_SECTIONS
    damaged = bytearray(first.data)
    damaged[offset] = value
    with pytest.raises(CorruptPayload, match=message):
        decoded_by(CODECS[0], ODD_META, [Section(first.id, damaged), *others])
