"""Loads in part of a connector: a share of the tokens exactly, the rest rough, nothing stored on top; or the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.codec.tide_profiles import fitted
from tests.engines.paged.pools import PAGE_TOKENS, LineEngine, pending

from kvtide.block import BlockBits, BlockLayout, KVDtype, values_of
from kvtide.codec import Codec, CodecRegistry, LosslessCodec
from kvtide.codec.packed import PackedCodec
from kvtide.store import Cache, cache_for
from kvtide.testing import smooth_bits

# No long prompt: a load of fewer tokens says nothing of speeds.
LAYOUT = BlockLayout(layers=3, tokens=128, kv_heads=2, head_dim=16, dtype=KVDtype.BFLOAT16)
BLOCK, BLOCKS = LAYOUT.tokens, 4
PROMPT = list(range(BLOCKS * BLOCK + 3))
LINE = [*PROMPT, *range(5000, 5000 + 2 * BLOCK)]
PROFILE = fitted(LAYOUT)
PACKED = PackedCodec(PROFILE).by_keys()
SHARE = 0.25


def _cache(folder: Path, codec: Codec) -> Cache:
    return cache_for(f"disk://{folder}", codec, CodecRegistry([PROFILE]))


def _stored(folder: Path, codec: Codec, start: int = 0, stop: int = BLOCKS) -> list[BlockBits]:
    """Store some of the prompt's blocks; return them."""
    found = [smooth_bits(LAYOUT, seed) for seed in range(start, stop)]
    with _cache(folder, codec) as cache:
        assert cache.store(pending(LAYOUT, PROMPT, found, start)) == stop - start
        assert cache.flush(20)
    return found


@pytest.fixture
def engine_at(tmp_path: Path) -> Iterator[Callable[[float], LineEngine]]:
    made: list[LineEngine] = []

    def make(share: float) -> LineEngine:
        made.append(LineEngine(lambda: _cache(tmp_path, PackedCodec(PROFILE)), LAYOUT, LINE, BLOCKS, share))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def _loaded(engine: LineEngine, request: str) -> list[BlockBits]:
    assert engine.load(request) == set()
    return engine.held()


def _part_loads(engine: LineEngine) -> float:
    return engine.worker.take_counts().get("part_loads", 0)


def test_a_share_is_exact_the_rest_near_and_nothing_is_stored_on_it(
    tmp_path: Path, engine_at: Callable[[float], LineEngine]
) -> None:
    blocks = _stored(tmp_path, PACKED)
    engine = engine_at(SHARE)
    for had, block in zip(_loaded(engine, "a"), blocks, strict=True):
        # A token of a layer is exact with K and V of all heads, or rough.
        exact = (had == block).all(axis=(1, 3, 4))
        assert (exact.sum(axis=1) >= SHARE * BLOCK).all() and exact.mean() < SHARE + 0.1
        error = values_of(had, LAYOUT.dtype) - values_of(block, LAYOUT.dtype)
        assert np.abs(error).mean() < 0.5 * np.abs(values_of(block, LAYOUT.dtype)).mean()
    assert _part_loads(engine) == 1
    assert engine.computed("a") == 0, "what is computed on top of rough blocks is not stored"


def test_the_other_way_is_tried_and_brings_all(tmp_path: Path, engine_at: Callable[[float], LineEngine]) -> None:
    blocks = _stored(tmp_path, PACKED)
    engine = engine_at(SHARE)
    engine.load("a")
    engine.scheduler.finished("a")
    assert _part_loads(engine) == 1
    for had, block in zip(_loaded(engine, "b"), blocks, strict=True):
        assert np.array_equal(had, block)
    assert _part_loads(engine) == 0
    engine.scheduler.finished("b")


@pytest.mark.parametrize(("codec", "share"), [(PACKED, 1.0), (LosslessCodec(), SHARE)], ids=["all", "another codec"])
def test_all_of_them_or_blocks_of_another_codec_come_whole(
    tmp_path: Path, engine_at: Callable[[float], LineEngine], codec: Codec, share: float
) -> None:
    blocks = _stored(tmp_path, codec)
    engine = engine_at(share)
    for had, block in zip(_loaded(engine, "a"), blocks, strict=True):
        assert np.array_equal(had, block)
    assert _part_loads(engine) == 0
    assert engine.computed("a") == 2


def test_from_the_first_block_of_another_codec_on_all_come_whole(
    tmp_path: Path, engine_at: Callable[[float], LineEngine]
) -> None:
    blocks = [*_stored(tmp_path, PACKED, stop=2), *_stored(tmp_path, LosslessCodec(), start=2)]
    engine = engine_at(SHARE)
    is_exact = [np.array_equal(*each) for each in zip(_loaded(engine, "a"), blocks, strict=True)]
    assert is_exact == [False, False, True, True]
    assert _part_loads(engine) == 1
    assert engine.computed("a") == 0


@pytest.mark.parametrize("is_aborted", [False, True], ids=["goes on", "aborted"])
def test_rows_of_a_rough_block_are_not_stored_by_who_shares_its_first_page(
    tmp_path: Path, engine_at: Callable[[float], LineEngine], is_aborted: bool
) -> None:
    _stored(tmp_path, PACKED)
    engine = engine_at(SHARE)
    engine.load("a")
    # The engine hands pages on as soon as they are loaded, whatever becomes of the request.
    if is_aborted:
        engine.scheduler.finished("a")
    else:
        assert engine.computed("a") == 0
    # It goes its own way within the first block, which has another name then.
    other = [*LINE[:PAGE_TOKENS], *range(9000, 9000 + 2 * BLOCK)]
    engine.scheduler.match("b", b"", other, PAGE_TOKENS)
    assert engine.computed("b", other) == 0
    # Who shares no page of it stores what it computed.
    own = list(range(7000, 7000 + 2 * BLOCK + 3))
    engine.scheduler.match("c", b"", own, 0)
    assert engine.computed("c", own) == 2
