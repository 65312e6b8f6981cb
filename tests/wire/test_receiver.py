"""Sections in any order, late, twice, damaged, of other objects, or never: right or refused, never wrong."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import fitted
from tests.pieces import pack_frame
from tests.suites import block_meta, smooth_bits

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Codec, LosslessCodec
from kvtide.codec.published import CachegenCodec
from kvtide.codec.tide import TideCodec
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import StoredObject, pack_object, parse_header, parse_object
from kvtide.wire.receiver import Receiver

LAYOUT = BlockLayout(layers=3, tokens=16, kv_heads=4, head_dim=16, dtype=KVDtype.BFLOAT16)
CODECS: dict[str, Codec] = {
    "cachegen": CachegenCodec(),
    "lossless": LosslessCodec(),
    "tide": TideCodec(fitted(LAYOUT, "light"), 1e-2, 2),
}
BLOCKS = 2


class Run(NamedTuple):
    """A run of objects, the frames of all their sections, and which block's which section each frame has."""

    codec: Codec
    packed: list[bytearray]
    objects: list[StoredObject]
    frames: list[bytes]
    names: list[tuple[int, SectionId]]


@cache
def run_of(codec_name: str) -> Run:
    codec = CODECS[codec_name]
    packed = []
    for block in range(BLOCKS):
        meta = block_meta(LAYOUT, seed=1, position=block)
        packed.append(bytearray(pack_object(meta, codec.codec_id, codec.encode(meta, smooth_bits(LAYOUT, block)))))
    objects = [parse_object(data) for data in packed]
    every = [(block, at) for block, stored in enumerate(objects) for at in range(len(stored.entries))]
    frames = [pack_frame(objects[block], at) for block, at in every]
    names = [(block, objects[block].entries[at].id) for block, at in every]
    return Run(codec, packed, objects, frames, names)


def check_all(run: Run, receivers: list[Receiver], here: list[set[SectionId]]) -> None:
    """The receivers hand out what a set of names says, byte for byte, and miss the rest."""
    for receiver, names in zip(receivers, here, strict=True):
        receiver.check()
        assert receiver.sections() == [each for each in receiver.stored.sections() if each.id in names]
        ids = receiver.stored.section_ids
        assert [ids[position] for position in receiver.missing()] == [name for name in ids if name not in names]


class Sent(NamedTuple):
    """A frame that is sent, and the bit of it that is damaged on the way, if one is."""

    number: int
    flipped: int | None


def sendings(seed: int, frames: int) -> list[Sent]:
    """Some frames in some order; some of them twice, some damaged."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(frames)[: rng.integers(0, frames + 1)].tolist()
    numbers += rng.choice(frames, rng.integers(0, 5)).tolist()
    rng.shuffle(numbers)
    bits = rng.integers(0, 2**20, len(numbers))
    is_damaged = rng.random(len(numbers)) < rng.choice([0.0, 0.1])
    flipped = [bit if off else None for bit, off in zip(bits.tolist(), is_damaged, strict=True)]
    return list(map(Sent, numbers, flipped))


@pytest.mark.parametrize("codec_name", CODECS)
@given(seed=st.integers(0, 2**32))
# 900 cases with the three codecs.
@settings(max_examples=300, deadline=None)
def test_any_subset_and_order_is_right_or_refused(codec_name: str, seed: int) -> None:
    run = run_of(codec_name)
    receivers = [Receiver(stored) for stored in run.objects]
    here: list[set[SectionId]] = [set() for _ in range(BLOCKS)]
    for number, flipped in sendings(seed, len(run.frames)):
        frame, (block, name) = bytearray(run.frames[number]), run.names[number]
        if flipped is not None:
            frame[flipped // 8 % len(frame)] ^= 1 << flipped % 8
            for receiver in receivers:
                with pytest.raises(CorruptPayload):
                    receiver.offer(frame)
            continue
        with pytest.raises(CorruptPayload, match="another object"):
            receivers[1 - block].offer(frame)
        assert receivers[block].offer(frame) is (name not in here[block])
        # The caller may reuse its buffer.
        frame[:] = bytes(len(frame))
        here[block].add(name)
    check_all(run, receivers, here)


@pytest.mark.parametrize("codec_name", CODECS)
@given(
    sizes=st.lists(st.integers(1, 700), max_size=40),
    start=st.integers(0, 40),
    flipped=st.none() | st.integers(0, 2**20),
)
@settings(max_examples=300, deadline=None)
def test_any_prefix_in_any_chunks_is_right_or_refused(
    codec_name: str, sizes: list[int], start: int, flipped: int | None
) -> None:
    run = run_of(codec_name)
    stored = run.objects[0]
    data = bytearray(run.packed[0])
    body_start, body_bits = stored.entries[0].offset, 8 * (len(data) - stored.entries[0].offset)
    if flipped is not None:
        data[body_start + flipped % body_bits // 8] ^= 1 << flipped % 8
    receivers = [Receiver(stored) for stored in run.objects]
    offset = stored.entries[start % len(stored.entries)].offset if start else 0
    first = offset
    said = ""
    for size in sizes:
        try:
            receivers[0].offer_bytes(offset, data[offset : offset + size])
        except CorruptPayload as error:
            said += str(error)
        offset = min(len(data), offset + size)
    here = {entry.id for entry in stored.entries if first <= entry.offset and entry.offset + entry.size <= offset}
    pairs = zip(stored.entries, stored.sections(), strict=True)
    lost = {entry.id for entry, whole in pairs if data[entry.offset :][: entry.size] != whole.data}
    assert [name for name in stored.section_ids if str(name) in said] == [*here & lost]
    check_all(run, receivers, [here - lost, set()])


def made_up(steps: list[tuple[SectionKind, int, int, int, bytes]], position: int = 0) -> StoredObject:
    sections = [Section(SectionId(kind, step, start, stop), data) for kind, step, start, stop, data in steps]
    return parse_object(pack_object(block_meta(LAYOUT, 1, position), "made-up-1", sections))


NESTED = [(SectionKind.DATA, step, start, start + 1, bytes([step, start])) for step in range(4) for start in range(3)]


def test_entry_that_is_not_in_the_table_is_refused() -> None:
    stored, other = made_up(NESTED[:3]), made_up(NESTED)
    forged = replace(other, version_tag=stored.version_tag)
    receiver = Receiver(stored)
    # One whose id is in the table but whose place is not, and one of a step that the table does not have.
    for number in (0, 5):
        with pytest.raises(CorruptPayload, match="of another object"):
            receiver.offer(pack_frame(forged, number))


def test_bytes_count_only_where_they_continue_a_section() -> None:
    run = run_of("lossless")
    stored, receiver = run.objects[0], Receiver(run.objects[0])
    first, second = stored.entries[0], stored.entries[1]
    data = run.packed[0]
    for start, stop, here in (
        (first.offset + 1, second.offset + 3, []),
        (second.offset + 3, second.offset + second.size, [second.id]),
        (first.offset, second.offset + 9, [first.id, second.id]),
    ):
        receiver.offer_bytes(start, data[start:stop])
        assert [section.id for section in receiver.sections()] == here
    receiver.check()


def test_what_is_handed_out_is_never_written_again() -> None:
    run = run_of("lossless")
    stored, receiver = run.objects[0], Receiver(run.objects[0])
    receiver.offer(run.frames[0])
    held = receiver.sections()[0]
    before = bytes(held.data)
    receiver.offer_bytes(stored.entries[0].offset, bytes(stored.entries[0].size))
    assert bytes(held.data) == before
    with pytest.raises(TypeError):
        held.data[0] = 1  # type: ignore[index]


def test_bytes_beyond_the_object_are_refused() -> None:
    run = run_of("lossless")
    receiver = Receiver(run.objects[0])
    size = len(run.packed[0])
    with pytest.raises(CorruptPayload, match="of another object"):
        receiver.offer_bytes(size - 4, b"12345")
    receiver.offer_bytes(size, b"")


def test_empty_section_is_here_from_the_start() -> None:
    stored = made_up([(SectionKind.DATA, 0, 0, 3, b""), (SectionKind.DATA, 1, 0, 3, b"x")])
    receiver = Receiver(stored)
    assert receiver.missing() == [1]
    assert not receiver.offer(pack_frame(stored, 0))


def test_header_and_table_are_enough_to_begin() -> None:
    run = run_of("cachegen")
    begin = bytearray(run.packed[0][: run.objects[0].entries[0].offset])
    receiver = Receiver(parse_header(begin))
    begin[:] = bytes(len(begin))
    receiver.offer_bytes(0, run.packed[0])
    assert not receiver.missing()
