"""Blocks that come layer by layer: the order, what can't come so, and every fault between two pieces of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.store.test_cache import Collector, OpenCache, fill, metas_of
from tests.stores import stored_records

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import ManualClock
from kvtide.codec import CodecRegistry
from kvtide.codec.tide import TideCodec
from kvtide.config import Limits
from kvtide.errors import CorruptPayload
from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import LoadReport, MissReason, Whole
from kvtide.store.load import whole as loading
from kvtide.testing import smooth_bits
from kvtide.types import ObjectId, Section, SectionId, SectionKind

# Pages must be crossed: a piece begins in the midst of one.
BIG = BlockLayout(layers=6, tokens=32, kv_heads=2, head_dim=17, dtype=KVDtype.FLOAT32)


class Layers:
    """A sink of layers that keeps what it gets, and in which order. `at` is called before a layer is taken."""

    def __init__(self, at: Callable[[int, int], object] = lambda position, layer: None) -> None:
        self.found: dict[tuple[int, int], BlockBits] = {}
        self.order: list[tuple[int, int]] = []
        self._at = at

    def __call__(self, position: int, first: int, layers: Sequence[BlockBits]) -> None:
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


def filled(tmp_path: Path, open_cache: OpenCache, blocks: int) -> tuple[list[BlockMeta], Cache]:
    """Return stored blocks, and a cache that has read nothing of them."""
    metas = metas_of(BIG, blocks)
    fill(open_cache(tmp_path, "raw"), metas)
    return metas, open_cache(tmp_path, "raw")


def load(cache: Cache, metas: list[BlockMeta], layers: Layers, blocks: Collector | None = None) -> LoadReport:
    return cache.load(metas, Whole(blocks or Collector(), layers=layers))


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


def test_first_layers_of_all_blocks_come_before_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", 2 * BIG.layer_bytes)
    metas, layers = metas_of(BIG, 4), Layers()
    with cache_for(str(tmp_path), CodecRegistry().make("raw"), limits=Limits(load_threads=1)) as writer:
        fill(writer, metas)
    with cache_for(str(tmp_path), CodecRegistry().make("raw"), limits=Limits(load_threads=1)) as reader:
        assert load(reader, metas, layers).blocks == 4
    assert [position for position, layer in layers.order if layer == 0] == [0, 1, 2, 3]
    assert layers.order == sorted(layers.order, key=lambda each: (each[1] // 2, each[0], each[1]))


def test_blocks_of_different_layouts_all_come_whole(
    tmp_path: Path, layout: BlockLayout, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", BIG.layer_bytes)
    metas, layers = [*metas_of(layout, 1), *metas_of(BIG, 1)], Layers()
    fill(open_cache(tmp_path, "raw"), metas)
    assert load(open_cache(tmp_path, "raw"), metas, layers).blocks == 2
    for position, meta in enumerate(metas):
        assert np.array_equal(layers.block(position, meta.layout.layers), smooth_bits(meta.layout, position))


def test_codec_that_joins_layers_delivers_whole_blocks(tmp_path: Path) -> None:
    profile, metas, layers, blocks = fitted(LAYOUT), metas_of(LAYOUT, 3), Layers(), Collector()
    with cache_for(str(tmp_path), TideCodec(profile, 1e-3, 3), CodecRegistry([profile])) as cache:
        fill(cache, metas)
        assert load(cache, metas, layers, blocks).blocks == 3
    assert sorted(blocks.blocks) == [0, 1, 2]
    assert not layers.found


def test_no_blocks_is_no_work(tmp_path: Path, open_cache: OpenCache) -> None:
    assert load(open_cache(tmp_path), [], Layers()) == LoadReport(0, 0, None)


@pytest.mark.parametrize("damage", ["header", "first layer", "last layer", "cut", "empty", "other block"])
def test_damage_ends_the_run_and_removes_the_object(
    damage: str, step: int, tmp_path: Path, open_cache: OpenCache
) -> None:
    metas, layers = metas_of(BIG, 3), Layers()
    fill(open_cache(tmp_path, "raw"), metas)
    record, other = (
        next(record for record in stored_records(tmp_path) if record.header.id == meta.id) for meta in metas[1:]
    )
    data = bytearray(record.body())
    places = {"header": 100, "first layer": 256 + 48 * BIG.layers + 3, "last layer": -5}
    if damage in places:
        data[places[damage]] ^= 4
    changed = {"cut": data[:-10], "empty": b"", "other block": other.body()}
    record.write_body(bytes(changed.get(damage, data)))
    reader = open_cache(tmp_path, "raw")
    report = load(reader, metas, layers)
    assert (report.blocks, report.reason) == (1, MissReason.CORRUPT)
    assert reader.stats().misses == {"corrupt": 1}
    assert {record.header.id for record in stored_records(tmp_path)} == {metas[0].id, metas[2].id}
    # What came of it before is what was stored: nothing wrong is ever handed out.
    for (position, layer), values in list(layers.found.items()):
        assert np.array_equal(values, smooth_bits(BIG, position)[layer])
    assert (1, BIG.layers - 1) not in layers.found


def test_object_that_goes_between_two_pieces_is_a_miss(
    tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", BIG.layer_bytes)
    metas, reader = filled(tmp_path, open_cache, 3)
    layers = Layers(lambda position, layer: (position, layer) == (1, 2) and reader.tiers.delete(metas[1].id, "test"))
    report = load(reader, metas, layers)
    assert (report.blocks, report.reason) == (1, MissReason.ABSENT)
    assert reader.stats().misses == {"absent": 1}
    assert reader.match([meta.id for meta in metas]) == 1


def test_tier_or_sink_that_fails_in_the_midst_is_a_miss(
    tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", BIG.layer_bytes)
    metas, reader = filled(tmp_path, open_cache, 3)

    def fail(position: int, layer: int) -> None:
        if (position, layer) == (2, 3):
            raise RuntimeError("made to fail")

    report = load(reader, metas, Layers(fail))
    assert (report.blocks, report.reason) == (2, MissReason.FAULT)
    assert load(reader, metas, Layers()).blocks == 3


def test_load_is_given_up_between_pieces(
    tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", BIG.layer_bytes)
    metas, reader = filled(tmp_path, open_cache, 4)
    release = threading.Event()
    layers = Layers(lambda position, layer: (position, layer) == (1, 1) and release.wait(10))
    report = reader.load(metas, Whole(Collector(), layers=layers), deadline_s=0.3)
    assert (report.blocks, report.reason) == (0, MissReason.DEADLINE)
    release.set()
    # Nothing is left that holds up the next load, nor a buffer that was lost.
    assert load(reader, metas, Layers()).blocks == 4
    assert not reader.index.is_pinned(metas[0].id.key)
    reader.check()


def test_load_whose_pace_is_hopeless_ends_with_what_it_has(
    tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    metas, reader = filled(tmp_path, open_cache, 8)
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


def test_unknown_codec_is_a_miss(tmp_path: Path, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    metas, reader = filled(tmp_path, open_cache, 1)
    monkeypatch.setattr(CodecRegistry, "get", lambda *arguments: None)
    report = load(reader, metas, Layers())
    assert (report.blocks, report.reason) == (0, MissReason.UNKNOWN_CODEC)
    assert len(stored_records(tmp_path)) == 1


def test_object_of_another_place_is_refused(tmp_path: Path, open_cache: OpenCache) -> None:
    metas = metas_of(BIG, 2)
    fill(open_cache(tmp_path, "raw"), metas)
    elsewhere = BlockMeta(ObjectId(*metas[1].id), metas[1].parent, 7 * BIG.tokens, BIG, "test")
    report = load(open_cache(tmp_path, "raw"), [metas[0], elsewhere], Layers())
    assert (report.blocks, report.reason) == (1, MissReason.CORRUPT)
