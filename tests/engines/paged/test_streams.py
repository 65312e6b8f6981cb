"""Streamed loads of a connector: the base of all blocks in time, pages written once, nothing rough stored as fine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.codec.tide_profiles import fitted
from tests.engines.paged.pools import PAGE_TOKENS, ToyEngine, pending
from tests.servers import running_server
from tests.suites import smooth_bits

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import CodecRegistry
from kvtide.codec.tide import TideCodec
from kvtide.engines.paged import ScheduledRequest
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
def engine_at(stack: ExitStack) -> Iterator[Callable[[float], ToyEngine]]:
    """Make engines over a link of some bytes a second to a server that has the prompt's blocks."""
    made: list[ToyEngine] = []
    with running_server(tiers=("memory://",)) as server:
        with tide_cache(server.url) as cache:
            assert cache.store(pending(LAYOUT, PROMPT, [smooth_bits(LAYOUT, seed) for seed in range(BLOCKS)])) == BLOCKS
            assert cache.flush(60)
        with ShapedProxy((server.address.host, server.address.port), lambda seconds: 1e9) as proxy:

            def opened(url: str, **limits: float) -> Cache:
                return stack.enter_context(tide_cache(url))

            def make(bytes_per_s: float) -> ToyEngine:
                proxy.restart(lambda seconds: bytes_per_s * seconds)
                made.append(ToyEngine(opened, f"http://127.0.0.1:{proxy.port}", layout=LAYOUT, page_count=100))
                return made[-1]

            yield make
            # What is still on its way is not waited for at the link's rate.
            proxy.restart(lambda seconds: 1e9 * seconds)
            for engine in made:
                engine.scheduler.close()
                engine.worker.close()


def load(engine: ToyEngine, request: str, within_s: float) -> tuple[list[int], set[int]]:
    """Load the prompt's blocks; return the line's pages and those that were not filled."""
    hit, pages, failed = engine.load(request, LINE, options=RequestOptions(stream=StreamOrder(within_s)))
    assert hit == BLOCKS * BLOCK
    return pages, failed


def computed(engine: ToyEngine, request: str, pages: list[int], line: list[int] = LINE) -> int:
    """Have the rest of a line computed; return how many blocks that orders to be stored."""
    orders = engine.step(ScheduledRequest(request, line, len(line), lambda: pages))
    engine.finish(request)
    return len(orders.stores)


def test_base_of_all_blocks_comes_in_time_and_is_never_stored_on(engine_at: Callable[[float], ToyEngine]) -> None:
    engine = engine_at(4e3)
    pages, failed = load(engine, "a", 0.8)
    assert failed == set()
    assert all(cells[pages[: BLOCKS * BLOCK // PAGE_TOKENS]].any() for cells in engine.layers)
    assert computed(engine, "a", pages) == 0, "what is computed on top of rough blocks is not stored"
    # The engine hands the pages on by itself: another request of the same tokens is not stored either.
    engine.scheduler.match("b", b"", LINE, BLOCKS * BLOCK)
    assert computed(engine, "b", pages) == 0


@pytest.mark.parametrize("is_aborted", [False, True], ids=["goes on", "aborted"])
def test_rows_of_a_rough_block_are_not_stored_by_who_shares_its_first_page(
    engine_at: Callable[[float], ToyEngine], is_aborted: bool
) -> None:
    engine = engine_at(4e3)
    pages, _ = load(engine, "a", 0.8)
    # The engine hands pages on as soon as they are loaded, whatever becomes of the request.
    if is_aborted:
        engine.scheduler.finished("a")
    else:
        assert computed(engine, "a", pages) == 0
    # It goes its own way within the first block, which has another name then.
    other = [*LINE[:PAGE_TOKENS], *range(9000, 9000 + 2 * BLOCK)]
    engine.scheduler.match("b", b"", other, PAGE_TOKENS)
    assert computed(engine, "b", pages, other) == 0
    # Who shares no page of it stores what it computed.
    own = list(range(7000, 7000 + 2 * BLOCK + 3))
    engine.scheduler.match("c", b"", own, 0)
    assert computed(engine, "c", pages, own) == 2


def test_step_stores_nothing_on_blocks_that_came_rough_within_it(engine_at: Callable[[float], ToyEngine]) -> None:
    engine, stream = engine_at(4e3), RequestOptions(stream=StreamOrder(0.8))
    hit, pages = engine.ask("a", LINE, options=stream), engine.pages(len(LINE))
    engine.scheduler.allocated("a", pages, hit, is_in_step=True)
    orders = engine.scheduler.plan([ScheduledRequest("a", LINE, len(LINE), lambda: pages)], 100)
    assert len(orders.stores) == 2 and engine.carry_out(orders) == 0
    assert engine.worker.take_counts()["rough_loads"] == 1
    engine.finish("a")


def test_loads_are_counted_once_and_stored_blocks_by_the_cache(engine_at: Callable[[float], ToyEngine]) -> None:
    engine = engine_at(1e8)
    pages, failed = load(engine, "a", 20.0)
    assert failed == set()
    assert engine.worker.take_counts()["loads"] == 1
    assert computed(engine, "a", pages) == 2 and engine.worker.cache.flush(60)
    stats = engine.worker.cache.stats()
    assert stats.blocks_checked + stats.blocks_unencodable > 0
    assert engine.worker.take_counts() == {}


def test_link_that_brings_no_base_leaves_the_pages_to_the_engine(engine_at: Callable[[float], ToyEngine]) -> None:
    engine = engine_at(1e8)
    engine.worker.cache.tiers.read_range = lambda *arguments: False  # type: ignore[method-assign]
    assert len(load(engine, "a", 20.0)[1]) == BLOCKS * BLOCK // PAGE_TOKENS
    assert engine.ask("a", LINE) == 0
    # Nor does the next request wait for a block that is gone.
    assert engine.ask("b", LINE) == 0


def test_request_that_wants_nothing_stored_leaves_no_block_and_one_that_wants_nothing_loaded_computes(
    engine_at: Callable[[float], ToyEngine],
) -> None:
    engine = engine_at(1e9)
    assert engine.scheduler.match("a", b"", LINE, 0, RequestOptions(may_load=False, may_store=False)) == 0
    pages = engine.pages(len(LINE))
    assert computed(engine, "a", pages) == 0
    assert engine.scheduler.match("b", b"", LINE, 0, RequestOptions(may_load=False)) == 0
    assert computed(engine, "b", pages) == len(LINE) // BLOCK


def test_request_says_it_for_itself() -> None:
    settings = ConnectorSettings.parse({"store": "memory://", "start_within_s": 1.0})
    assert settings.request_options({}).stream == StreamOrder(1.0)
    assert settings.request_options({"start_within_s": 0.25, "quality": 0.1}).stream == StreamOrder(0.25, 0.1)
    bad = settings.request_options({"start_within_s": "soon", "quality": -1})
    assert (bad.stream, bad.bad) == (StreamOrder(1.0), 2)
    assert ConnectorSettings.parse({"store": "memory://"}).request_options(None).stream is None
