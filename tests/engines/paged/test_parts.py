"""Loads in part of a connector: a share of the tokens exactly, the rest rough, nothing stored on top; or the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.codec.tide_profiles import fitted
from tests.engines.paged.pools import PAGE_TOKENS, host_pages

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype, values_of
from kvtide.clock import SystemClock
from kvtide.codec import Codec, CodecRegistry, LosslessCodec
from kvtide.codec.packed import PackedCodec
from kvtide.engines.paged import CellOrder, Namespaces, ScheduledRequest, SchedulerHalf, WorkerHalf
from kvtide.keys import NamespaceSpec, block_keys
from kvtide.store import Cache, PendingBlock, cache_for
from kvtide.testing import smooth_bits
from kvtide.types import BlockKey, ObjectId

# No long prompt: a load of fewer tokens says nothing of speeds.
LAYOUT = BlockLayout(layers=3, tokens=128, kv_heads=2, head_dim=16, dtype=KVDtype.BFLOAT16)
BLOCK, BLOCKS = LAYOUT.tokens, 4
PROMPT = list(range(BLOCKS * BLOCK + 3))
LINE = [*PROMPT, *range(5000, 5000 + 2 * BLOCK)]
PAGES = 2 + len(LINE) // PAGE_TOKENS
PROFILE = fitted(LAYOUT)
SHARE = 0.25


def _namespaces() -> Namespaces:
    return Namespaces(lambda salt: [NamespaceSpec(b"model", LAYOUT.dtype, "toy", BLOCK, salt)])


def _metas() -> list[BlockMeta]:
    (namespace,) = _namespaces().of(b"")
    keys = [BlockKey(namespace), *block_keys(namespace, np.array(PROMPT, dtype=np.uint32), BLOCK)]
    return [BlockMeta(ObjectId(namespace, keys[i + 1]), keys[i], i * BLOCK, LAYOUT, "toy") for i in range(BLOCKS)]


def _cache(folder: Path, codec: Codec) -> Cache:
    return cache_for(f"disk://{folder}", codec, CodecRegistry([PROFILE]))


def _pending(meta: BlockMeta, bits: BlockBits) -> PendingBlock:
    return PendingBlock(meta, lambda: lambda: bits)


def _stored(folder: Path, codec: Codec, start: int = 0, stop: int = BLOCKS) -> list[BlockBits]:
    """Store some of the prompt's blocks; return them."""
    found = [smooth_bits(LAYOUT, seed) for seed in range(start, stop)]
    with _cache(folder, codec) as cache:
        assert cache.store(list(map(_pending, _metas()[start:stop], found))) == stop - start
        assert cache.flush(20)
    return found


class Engine:
    """Both halves over a folder."""

    def __init__(self, folder: Path, share: float) -> None:
        self.asking, self.cache = (_cache(folder, PackedCodec(PROFILE)) for _ in range(2))
        self.asking.open()
        self.cache.open()
        self.scheduler = SchedulerHalf(self.asking, _namespaces(), BLOCK, PAGE_TOKENS, SystemClock(), 5.0)
        self.pool, self.pages = host_pages(CellOrder.SPLIT, PAGES, LAYOUT)
        self.worker = WorkerHalf(self.cache, self.pool, 0, "toy", SystemClock(), share=share)

    def load(self, request: str) -> list[BlockBits]:
        """Load the prompt's blocks; return what the pages have of them."""
        hit = None
        while hit is None:
            hit = self.scheduler.match(request, b"", LINE, 0)
        assert hit == BLOCKS * BLOCK
        self.scheduler.allocated(request, list(range(1, PAGES)), hit)
        orders = self.scheduler.plan((), 0)
        self.worker.start(orders)
        give_up_s = time.monotonic() + 60.0
        while time.monotonic() < give_up_s:
            outcome = self.worker.ended([], is_idle=True)
            if outcome.requests:
                assert not outcome.failed_pages
                self.scheduler.heard(self.worker.report(orders.step))
                per_block = BLOCK // PAGE_TOKENS
                starts = range(1, 1 + BLOCKS * per_block, per_block)
                return [self.pool.capture(range(start, start + per_block)).block() for start in starts]
        raise AssertionError("the load never ended")

    def part_loads(self) -> float:
        return self.worker.take_counts().get("part_loads", 0)

    def computed(self, request: str, line: list[int] = LINE) -> int:
        """Have the rest of the line computed; return how many blocks that orders to be stored."""
        orders = self.scheduler.plan([ScheduledRequest(request, line, len(line), lambda: list(range(1, PAGES)))], 100)
        self.scheduler.finished(request)
        return len(orders.stores)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engine_at(tmp_path: Path) -> Iterator[Callable[[float], Engine]]:
    made: list[Engine] = []

    def make(share: float) -> Engine:
        made.append(Engine(tmp_path, share))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_a_share_is_exact_the_rest_near_and_nothing_is_stored_on_it(
    tmp_path: Path, engine_at: Callable[[float], Engine]
) -> None:
    blocks = _stored(tmp_path, PackedCodec(PROFILE).by_keys())
    engine = engine_at(SHARE)
    for had, block in zip(engine.load("a"), blocks, strict=True):
        # A token of a layer is exact with K and V of all heads, or rough.
        exact = (had == block).all(axis=(1, 3, 4))
        assert (exact.sum(axis=1) >= SHARE * BLOCK).all() and exact.mean() < SHARE + 0.1
        error = values_of(had, LAYOUT.dtype) - values_of(block, LAYOUT.dtype)
        assert np.abs(error).mean() < 0.5 * np.abs(values_of(block, LAYOUT.dtype)).mean()
    assert engine.part_loads() == 1
    assert engine.computed("a") == 0, "what is computed on top of rough blocks is not stored"


def test_the_other_way_is_tried_and_brings_all(tmp_path: Path, engine_at: Callable[[float], Engine]) -> None:
    blocks = _stored(tmp_path, PackedCodec(PROFILE).by_keys())
    engine = engine_at(SHARE)
    engine.load("a")
    engine.scheduler.finished("a")
    assert engine.part_loads() == 1
    for had, block in zip(engine.load("b"), blocks, strict=True):
        assert np.array_equal(had, block)
    assert engine.part_loads() == 0
    engine.scheduler.finished("b")


def test_all_of_them_is_the_usual_load(tmp_path: Path, engine_at: Callable[[float], Engine]) -> None:
    blocks = _stored(tmp_path, PackedCodec(PROFILE).by_keys())
    engine = engine_at(1.0)
    for had, block in zip(engine.load("a"), blocks, strict=True):
        assert np.array_equal(had, block)
    assert engine.part_loads() == 0
    assert engine.computed("a") == 2


def test_blocks_of_another_codec_come_whole(tmp_path: Path, engine_at: Callable[[float], Engine]) -> None:
    blocks = _stored(tmp_path, LosslessCodec())
    engine = engine_at(SHARE)
    for had, block in zip(engine.load("a"), blocks, strict=True):
        assert np.array_equal(had, block)
    assert engine.part_loads() == 0
    assert engine.computed("a") == 2


def test_from_the_first_block_of_another_codec_on_all_come_whole(
    tmp_path: Path, engine_at: Callable[[float], Engine]
) -> None:
    packed = PackedCodec(PROFILE).by_keys()
    blocks = [*_stored(tmp_path, packed, stop=2), *_stored(tmp_path, LosslessCodec(), start=2)]
    engine = engine_at(SHARE)
    is_exact = [np.array_equal(*each) for each in zip(engine.load("a"), blocks, strict=True)]
    assert is_exact == [False, False, True, True]
    assert engine.part_loads() == 1
    assert engine.computed("a") == 0


@pytest.mark.parametrize("is_aborted", [False, True], ids=["goes on", "aborted"])
def test_rows_of_a_rough_block_are_not_stored_by_who_shares_its_first_page(
    tmp_path: Path, engine_at: Callable[[float], Engine], is_aborted: bool
) -> None:
    _stored(tmp_path, PackedCodec(PROFILE).by_keys())
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
