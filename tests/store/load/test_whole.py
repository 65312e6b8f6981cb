"""Blocks that come layer by layer: the order, what can't come so, and every fault between two pieces of a block."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.store.load.sources import KL, STEP_BYTES, AnyOf, MadeSource, made_objects, parsed
from tests.store.test_cache import Collector, OpenCache, damage_one, fill, metas_of
from tests.stores import open_memory, stored_records
from tests.suites import smooth_bits

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import ManualClock, SystemClock
from kvtide.codec import CodecRegistry
from kvtide.codec.tide import TideCodec
from kvtide.errors import CorruptPayload
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import Progress, is_ready
from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import LoadReport, MissReason, Whole, backfill
from kvtide.store.load import whole as loading
from kvtide.store.load.backfill import Backfill, PartialLoad
from kvtide.store.load.run import LoadRequest, ObjectRange, layered_job, level_job
from kvtide.tier.faults import FaultGuard
from kvtide.tier.source import read_heads
from kvtide.types import ObjectId, Section, SectionId, SectionKind
from kvtide.wire.receiver import Receiver

# Pages must be crossed: a piece begins in the midst of one.
BIG = BlockLayout(layers=6, tokens=32, kv_heads=2, head_dim=17, dtype=KVDtype.FLOAT32)


class Layers:
    """A sink of layers that keeps what it gets, and in which order. `at` is called before a layer is taken."""

    def __init__(self, at: Callable[[int, int], object] = lambda position, layer: None) -> None:
        self.found: dict[tuple[int, int], BlockBits] = {}
        self.order: list[tuple[int, int]] = []
        self._at = at

    def __call__(self, position: int, layers: Sequence[BlockBits], first: int) -> None:
        self._at(position, first)
        for layer, values in enumerate(layers, first):
            assert (position, layer) not in self.found, "a layer came twice"
            self.found[position, layer] = values.copy()
            self.order.append((position, layer))

    def block(self, position: int, layers: int) -> BlockBits:
        stacked: Any = np.stack([self.found[position, layer] for layer in range(layers)])
        return stacked


@pytest.fixture(params=[1, 2, 5, 100])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many layers a piece has."""
    layers: int = request.param
    monkeypatch.setattr(loading, "PIECE_BYTES", layers * BIG.layer_bytes)
    return layers


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", BIG.layer_bytes)


def filled(open_cache: OpenCache, blocks: int) -> tuple[list[BlockMeta], Cache]:
    """Return stored blocks, and a cache that has read nothing of them."""
    metas = metas_of(BIG, blocks)
    fill(open_cache(codec="raw"), metas)
    return metas, open_cache(codec="raw")


def load(cache: Cache, metas: list[BlockMeta], layers: Layers, blocks: Collector | None = None) -> LoadReport:
    return cache.load(metas, Whole(blocks or Collector(), layers=layers, is_in_turn=True))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_all_layers_come_as_they_were_stored(
    codec: str, where: str, step: int, tmp_path: Path, open_cache: OpenCache
) -> None:
    metas, layers, blocks = metas_of(BIG, 5), Layers(), Collector()
    writer = open_cache(tmp_path, codec)
    contents = fill(writer, metas)
    reader = writer if where == "memory" else open_cache(tmp_path, codec)
    report = load(reader, metas, layers, blocks)
    assert (report.blocks, report.reason, blocks.blocks) == (5, None, {})
    assert report.stored_bytes >= sum(record.header.size for record in stored_records(tmp_path))
    assert all(np.array_equal(layers.block(i, BIG.layers), contents[i]) for i in range(5))
    assert reader.stats().blocks_loaded == 5
    reader.check()


def test_first_layers_of_all_blocks_come_before_others(open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", 2 * BIG.layer_bytes)
    metas, layers = metas_of(BIG, 4), Layers()
    fill(open_cache(codec="raw"), metas)
    assert load(open_cache(codec="raw", load_threads=1), metas, layers).blocks == 4
    assert [position for position, layer in layers.order if layer == 0] == [0, 1, 2, 3]
    assert layers.order == sorted(layers.order, key=lambda each: (each[1] // 2, each[0], each[1]))


def test_blocks_of_different_layouts_all_come_whole(by_layer: None, layout: BlockLayout, open_cache: OpenCache) -> None:
    metas, layers = [*metas_of(layout, 1), *metas_of(BIG, 1)], Layers()
    fill(open_cache(codec="raw"), metas)
    assert load(open_cache(codec="raw"), metas, layers).blocks == 2
    for position, meta in enumerate(metas):
        assert np.array_equal(layers.block(position, meta.layout.layers), smooth_bits(meta.layout, position))


def test_codec_that_joins_layers_delivers_whole_blocks(tmp_path: Path) -> None:
    profile, metas, layers, blocks = fitted(LAYOUT), metas_of(LAYOUT, 3), Layers(), Collector()
    with cache_for(str(tmp_path), TideCodec(profile, 1e-3, 3), CodecRegistry([profile])) as cache:
        fill(cache, metas)
        assert load(cache, metas, layers, blocks).blocks == 3
    assert sorted(blocks.blocks) == [0, 1, 2]
    assert not layers.found


@pytest.mark.parametrize("damage", ["header", "first layer", "last layer", "cut", "empty", "other block"])
def test_damage_ends_the_run_and_removes_objects(damage: str, step: int, tmp_path: Path, open_cache: OpenCache) -> None:
    metas, layers = metas_of(BIG, 3), Layers()
    fill(open_cache(tmp_path, "raw"), metas)
    flips = {"header": 100, "first layer": 256 + 48 * BIG.layers + 3, "last layer": -5}
    damage_one(tmp_path, metas[1:], damage, flips)
    reader = open_cache(tmp_path, "raw")
    report = load(reader, metas, layers)
    assert (report.blocks, report.reason) == (1, MissReason.CORRUPT)
    assert reader.stats().misses == {"corrupt": 1}
    assert {record.header.id for record in stored_records(tmp_path)} == {metas[0].id, metas[2].id}
    # What came of it before is what was stored: nothing wrong is ever handed out.
    for (position, layer), values in list(layers.found.items()):
        assert np.array_equal(values, smooth_bits(BIG, position)[layer])
    assert (1, BIG.layers - 1) not in layers.found


def test_object_that_goes_between_two_pieces_is_a_miss(by_layer: None, open_cache: OpenCache) -> None:
    metas, reader = filled(open_cache, 3)
    layers = Layers(lambda position, layer: (position, layer) == (1, 2) and reader.tiers.delete(metas[1].id, "test"))
    report = load(reader, metas, layers)
    assert (report.blocks, report.reason) == (1, MissReason.ABSENT)
    assert reader.stats().misses == {"absent": 1}
    assert reader.match([meta.id for meta in metas]) == 1


def test_tier_or_sink_that_fails_in_the_midst_is_a_miss(by_layer: None, open_cache: OpenCache) -> None:
    metas, reader = filled(open_cache, 3)
    report = load(reader, metas, Layers(lambda position, layer: 1 // ((position, layer) != (2, 3))))
    assert (report.blocks, report.reason) == (2, MissReason.FAULT)
    assert load(reader, metas, Layers()).blocks == 3


def test_load_is_given_up_between_pieces(by_layer: None, open_cache: OpenCache) -> None:
    metas, reader = filled(open_cache, 4)
    release = threading.Event()
    layers = Layers(lambda position, layer: (position, layer) == (1, 1) and release.wait(10))
    report = reader.load(metas, Whole(Collector(), layers=layers, is_in_turn=True), deadline_s=0.3)
    assert (report.blocks, report.reason) == (0, MissReason.DEADLINE)
    release.set()
    # Nothing is left that holds up the next load, nor a buffer that was lost.
    assert load(reader, metas, Layers()).blocks == 4
    assert not reader.index.is_pinned(metas[0].id.key)
    reader.check()


def test_load_of_hopeless_pace_ends_with_what_it_has(open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    metas, reader = filled(open_cache, 8)
    clock = ManualClock()
    with monkeypatch.context() as patch:
        patch.setattr(reader.access, "clock", clock)
        # At this pace eight blocks take twice the deadline, at which four would be here.
        report = reader.load(metas, Whole(lambda position, bits: clock.advance(250.0)), deadline_s=1000.0)
    assert (report.blocks, report.reason) == (1, MissReason.DEADLINE)
    assert load(reader, metas, Layers()).blocks == 8
    reader.check()


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_section_that_is_no_layer_is_refused(codec: str) -> None:
    made: Any = CodecRegistry().make(codec)
    for data in (b"", b"x", bytes(BIG.layer_bytes - 4), bytes(2 * BIG.layer_bytes)):
        with pytest.raises(CorruptPayload):
            made.decode_layer(BIG, Section(SectionId(SectionKind.DATA, 0, 0, 1), data))


def test_object_of_another_place_is_refused(open_cache: OpenCache) -> None:
    metas = metas_of(BIG, 2)
    fill(open_cache(codec="raw"), metas)
    elsewhere = BlockMeta(ObjectId(*metas[1].id), metas[1].parent, 7 * BIG.tokens, BIG, "test")
    report = load(open_cache(codec="raw"), [metas[0], elsewhere], Layers())
    assert (report.blocks, report.reason) == (1, MissReason.CORRUPT)


THREE = made_objects(3)
OBJECT_BYTES = sum(map(len, THREE.values()))
HEAD_BYTES = parsed(THREE)[0].entries[0].offset
BASE_STOP = parsed(THREE)[0].entries[1].offset + 1500


def left_of(objects: dict[ObjectId, bytes], blocks: tuple[int, ...] = (0, 1, 2)) -> PartialLoad:
    """What a load leaves that had time for the bases."""
    receivers = [Receiver(stored) for stored in parsed(objects)]
    for block, data in enumerate(objects.values()):
        receivers[block].offer_bytes(HEAD_BYTES, data[HEAD_BYTES:BASE_STOP])
    return PartialLoad(receivers, blocks)


def keeper_of(stack: ExitStack, *sources: MadeSource) -> tuple[Backfill, dict[ObjectId, bytes]]:
    """Return a keeper and what it has put into a store."""
    kept: dict[ObjectId, bytes] = {}
    clock, guarded = SystemClock(), FaultGuard()
    keeper = Backfill(AnyOf(*sources), lambda name, data: kept.update({name: data}) is None, clock, guarded)
    stack.callback(keeper.check)
    stack.callback(keeper.close)
    return keeper, kept


@pytest.mark.parametrize("cut_bytes", [None, 600], ids=["whole", "reads that break off"])
def test_refinements_that_came_late_are_kept_and_no_byte_comes_twice(stack: ExitStack, cut_bytes: int | None) -> None:
    source = MadeSource(THREE, cut_bytes=cut_bytes)
    keeper, kept = keeper_of(stack, source)
    assert keeper.offer(left_of(THREE, (1, 2)))
    assert keeper.flush(60)
    assert kept == dict(list(THREE.items())[1:])
    assert source.served_bytes == 2 * 7000


def test_dead_source_is_replaced_and_what_nobody_has_is_dropped(stack: ExitStack) -> None:
    absent = next(iter(THREE))
    dying, spare = MadeSource(THREE, cut_bytes=600), MadeSource(THREE)
    dying.is_down = True
    del spare.objects[absent]
    keeper, kept = keeper_of(stack, dying, spare)
    assert keeper.offer(left_of(THREE))
    assert keeper.flush(60)
    assert set(kept) == set(THREE) - {absent}


def test_damaged_object_is_not_kept(stack: ExitStack) -> None:
    object_id, data = next(iter(THREE.items()))
    damaged = {**THREE, object_id: data[:-1] + bytes([data[-1] ^ 1])}
    keeper, kept = keeper_of(stack, MadeSource(damaged))
    assert keeper.offer(left_of(THREE))
    assert keeper.flush(60)
    assert set(kept) == set(THREE) - {object_id}


def test_thread_that_can_not_be_had_and_memory_that_is_short_cost_what_they_hit_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, _ = keeper_of(stack, MadeSource(THREE))
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert not keeper.offer(left_of(THREE))
        keeper.check()
    monkeypatch.setattr(keeper, "_put", Mock(side_effect=[MemoryError, True, True]))
    assert keeper.offer(left_of(THREE))
    assert keeper.flush(60)


def test_load_has_the_link_alone(stack: ExitStack) -> None:
    source = MadeSource(THREE)
    keeper, kept = keeper_of(stack, source)
    with keeper.paused():
        assert keeper.offer(left_of(THREE))
        assert not keeper.flush(0.1)
        # The end of a process waits for no slow link: who exits may not have closed.
        assert [each.daemon for each in threading.enumerate() if each.name.startswith("kvtide-keep")] == [True]
        assert source.served_bytes == 0
    assert keeper.flush(60)
    assert kept == THREE


def test_what_waits_is_bounded(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, kept = keeper_of(stack, MadeSource(THREE))
    with keeper.paused():
        monkeypatch.setattr(backfill, "BYTES_MAX", OBJECT_BYTES - 1)
        assert not keeper.offer(left_of(THREE))
        monkeypatch.setattr(backfill, "BYTES_MAX", OBJECT_BYTES)
        assert keeper.offer(left_of(THREE))
        assert not keeper.offer(left_of(THREE))
        keeper.check()
    assert keeper.flush(60)
    assert len(kept) == 3


def test_closing_ends_a_read_and_takes_no_more(stack: ExitStack) -> None:
    source, others = MadeSource(THREE, bytes_per_s=1e4), set(threading.enumerate())
    keeper, kept = keeper_of(stack, source)
    assert keeper.offer(left_of(THREE))
    keeper.close()
    assert not keeper.offer(left_of(THREE))
    assert kept == {}
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "kvtide-keep"]
    keeper.close()


FOUR = made_objects(4)
STORED = parsed(FOUR)
WISH = LoadRequest(PrefillSpeed(100.0), 1.0)


def test_steps_are_ranges_of_each_block_of_a_chunk() -> None:
    job = layered_job(STORED, [(0, 10), (10, 40)], KL, WISH)
    body = STORED[0].entries[0].offset
    assert [chunk.sizes for chunk in job.request.chunks] == [STEP_BYTES, tuple(3 * size for size in STEP_BYTES)]
    assert job.pieces[0] == (
        (ObjectRange(0, body, body + 3000),),
        (ObjectRange(0, body + 3000, body + 5000),),
        (ObjectRange(0, body + 5000, body + 10_000),),
    )
    assert [piece.block for piece in job.pieces[1][2]] == [1, 2, 3]


def test_levels_are_whole_bodies_of_other_objects() -> None:
    small = parsed(made_objects(2, (1000,)))
    large = parsed(made_objects(2, (4000,), seed=1))
    job = level_job([small, large], [(0, 20)], (0.3, 0.1), WISH)
    assert job.request.chunks[0].sizes == (2000, 8000)
    assert not job.request.is_layered
    assert [[piece.block for piece in step] for step in job.pieces[0]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("spans", [[(0, 5), (5, 40)], [(0, 10)], [(0, 50)], [(0, 10), (20, 40)]])
def test_chunks_that_are_not_whole_blocks_of_all_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"whole blocks|chunks end|starts at token"):
        layered_job(STORED, spans, KL, WISH)


@pytest.mark.parametrize(("goal", "raised"), [(0.01, True), (0.02, True), (0.005, False), (0.0, False)])
def test_whole_objects_are_enough_for_the_goal_they_were_stored_for(goal: float, raised: bool) -> None:
    # The law says that the newest block alone loses more than the codec's curve has for all.
    by_block = np.array([[[0.2, 0.1, 0.01], [0.2, 0.1, 0.01], [0.2, 0.1, 0.01], [0.5, 0.3, 0.02]]])
    job = layered_job(STORED, [(0, 20), (20, 40)], KL, WISH._replace(kl_goal=goal), by_block)
    assert job.request.kl_goal == (pytest.approx(0.05) if raised else goal)
    everything = Progress(0.1, (3, 3), (3, 3), is_layered=True)
    assert is_ready(job.request, everything) is raised


def test_wrong_number_of_losses_and_objects_that_are_no_run_are_refused() -> None:
    with pytest.raises(ValueError, match="a loss for each of 3 steps, got 2"):
        layered_job(STORED, [(0, 40)], KL[:2], WISH)
    with pytest.raises(CorruptPayload, match="blocks of 10 tokens one behind the other"):
        layered_job(STORED[::2], [(0, 20)], KL, WISH)
    with pytest.raises(CorruptPayload, match="same refinements, got \\[3, 1\\]"):
        layered_job([STORED[0], parsed(made_objects(2, (50,)))[1]], [(0, 20)], KL, WISH)
    with pytest.raises(CorruptPayload, match="same refinements"):
        layered_job([], [], KL, WISH)
    with pytest.raises(CorruptPayload, match=r"every block at every level, got \[4, 3\]"):
        level_job([STORED, STORED[:3]], [(0, 40)], (0.2, 0.1), WISH)


def test_heads_of_a_run_are_read_exactly_and_once() -> None:
    source = MadeSource(FOUR, part=100_000)
    heads = read_heads(source, list(FOUR), time.monotonic() + 5.0, 4)
    assert [head.version_tag for head in heads] == [stored.version_tag for stored in STORED]
    assert source.served_bytes == sum(len(stored.head) for stored in STORED)
    # Two reads for the first, whose table is of unknown size, one for each of the others.
    assert len(source.served) == 5


def test_heads_end_before_what_is_absent_or_damaged() -> None:
    ids = list(FOUR)
    partly = {object_id: FOUR[object_id] for object_id in ids if object_id != ids[2]}
    assert len(read_heads(MadeSource(partly), ids, time.monotonic() + 5.0, 2)) == 2
    assert len(read_heads(AnyOf(MadeSource(partly), MadeSource(FOUR)), ids, time.monotonic() + 5.0, 2)) == 4
    damaged = {**FOUR, ids[0]: b"x" * 5000}
    assert read_heads(MadeSource(damaged), ids, time.monotonic() + 5.0, 2) == []
    assert read_heads(MadeSource(FOUR), [], time.monotonic() + 5.0, 2) == []


def test_tier_is_a_source_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.base.SLICE_BYTES", 1000)
    object_id, data = next(iter(FOUR.items()))
    tier, parts = open_memory(), list[bytes]()
    tier.put_from(object_id, data)

    def take(part: memoryview) -> bool:
        parts.append(bytes(part))
        return len(parts) < 3

    assert tier.read_range(object_id, 100, 5000, take)
    assert b"".join(parts) == data[100:3100]
    assert not tier.read_range(object_id, len(data) - 10, len(data) + 10, lambda part: True)
