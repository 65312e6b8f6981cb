"""Streamed loads of a connector: the base of all blocks in time, pages written once, nothing rough stored as fine."""

from collections.abc import Callable, Iterator

import pytest
from tests.codec.tide_profiles import fitted
from tests.engines.paged.pools import PAGE_TOKENS, LineEngine, pending
from tests.servers import running_server
from tests.suites import smooth_bits

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import CodecRegistry
from kvtide.codec.tide import TideCodec
from kvtide.engines.settings import ConnectorSettings, RequestOptions, StreamOrder
from kvtide.store import Cache, cache_for
from kvtide_lab.bench.shaped import ShapedProxy

LAYOUT = BlockLayout(layers=15, tokens=64, kv_heads=2, head_dim=16, dtype=KVDtype.BFLOAT16)
BLOCK, BLOCKS = LAYOUT.tokens, 3
PROMPT = list(range(BLOCKS * BLOCK + 3))
LINE = [*PROMPT, *range(500, 500 + 2 * BLOCK)]


def tide_cache(url: str) -> Cache:
    profile = fitted(LAYOUT)
    return cache_for(url, TideCodec(profile, 1e-3, 3), CodecRegistry([profile]))


@pytest.fixture
def engine_at() -> Iterator[Callable[[float], LineEngine]]:
    """Make engines over a link of some bytes a second to a server that has the prompt's blocks."""
    made: list[LineEngine] = []
    with running_server(tiers=("memory://",)) as server:
        with tide_cache(server.url) as cache:
            assert cache.store(pending(LAYOUT, PROMPT, [smooth_bits(LAYOUT, seed) for seed in range(BLOCKS)])) == BLOCKS
            assert cache.flush(20)
        with ShapedProxy((server.address.host, server.address.port), lambda seconds: 1e9) as proxy:

            def make(bytes_per_s: float) -> LineEngine:
                proxy.restart(lambda seconds: bytes_per_s * seconds)
                url = f"http://127.0.0.1:{proxy.port}"
                made.append(LineEngine(lambda: tide_cache(url), LAYOUT, LINE, BLOCKS))
                return made[-1]

            yield make
            # What is still on its way is not waited for at the link's rate.
            proxy.restart(lambda seconds: 1e9 * seconds)
            for engine in made:
                engine.close()


def test_base_of_all_blocks_comes_in_time_and_is_never_stored_on(engine_at: Callable[[float], LineEngine]) -> None:
    engine = engine_at(4e3)
    assert engine.load("a", StreamOrder(0.8)) == set()
    assert all(cells[1 : 1 + BLOCKS * BLOCK // PAGE_TOKENS].any() for cells in engine.pages)
    assert engine.computed("a") == 0, "what is computed on top of rough blocks is not stored"
    # The engine hands the pages on by itself: another request of the same tokens is not stored either.
    engine.scheduler.match("b", b"", LINE, BLOCKS * BLOCK)
    assert engine.computed("b") == 0


@pytest.mark.parametrize("is_aborted", [False, True], ids=["goes on", "aborted"])
def test_rows_of_a_rough_block_are_not_stored_by_who_shares_its_first_page(
    engine_at: Callable[[float], LineEngine], is_aborted: bool
) -> None:
    engine = engine_at(4e3)
    engine.load("a", StreamOrder(0.8))
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


def test_loads_are_counted_once_and_stored_blocks_by_the_cache(engine_at: Callable[[float], LineEngine]) -> None:
    engine = engine_at(1e8)
    assert engine.load("a", StreamOrder(20.0)) == set()
    assert engine.worker.take_counts()["loads"] == 1
    assert engine.computed("a") == 2 and engine.cache.flush(30)
    stats = engine.cache.stats()
    assert stats.blocks_checked + stats.blocks_unencodable > 0
    assert engine.worker.take_counts() == {}


def test_link_that_brings_no_base_leaves_the_pages_to_the_engine(engine_at: Callable[[float], LineEngine]) -> None:
    engine = engine_at(1e8)
    engine.cache.tiers.read_range = lambda *arguments: False  # type: ignore[method-assign]
    assert len(engine.load("a", StreamOrder(20.0))) == BLOCKS * BLOCK // PAGE_TOKENS
    assert engine.ask("a") == 0
    # Nor does the next request wait for a block that is gone.
    assert engine.ask("b") == 0


def test_request_that_wants_nothing_stored_leaves_no_block_and_one_that_wants_nothing_loaded_computes(
    engine_at: Callable[[float], LineEngine],
) -> None:
    engine = engine_at(1e9)
    assert engine.scheduler.match("a", b"", LINE, 0, RequestOptions(may_load=False, may_store=False)) == 0
    assert engine.computed("a") == 0
    assert engine.scheduler.match("b", b"", LINE, 0, RequestOptions(may_load=False)) == 0
    assert engine.computed("b") == len(LINE) // BLOCK


def test_request_says_it_for_itself() -> None:
    settings = ConnectorSettings.parse({"store": "memory://", "start_within_s": 1.0})
    assert settings.request_options({}).stream == StreamOrder(1.0)
    assert settings.request_options({"start_within_s": 0.25, "quality": 0.1}).stream == StreamOrder(0.25, 0.1)
    bad = settings.request_options({"start_within_s": "soon", "quality": -1})
    assert (bad.stream, bad.bad) == (StreamOrder(1.0), 2)
    assert ConnectorSettings.parse({"store": "memory://"}).request_options(None).stream is None
