"""Both halves of a connector together on a toy engine: pages, tokens, steps, no model."""

import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.engines.paged.pools import (
    BLOCK,
    LAYOUT,
    ORDER,
    PAGE_TOKENS,
    PROMPT,
    ToyEngine,
    block_of,
    held,
    host_pages,
    namespaces,
)
from tests.processes import resident_bytes
from tests.server.worlds import invalidate, region_processes
from tests.servers import running_server
from tests.store.test_cache import OpenCache

from kvtide.clock import ManualClock, SystemClock
from kvtide.engines.paged.scheduler import ANSWER_S, ANSWERS_S, STEPS_IN_FLIGHT_MAX, ScheduledRequest
from kvtide.engines.paged.sequence import FollowedPrefix, LoadOrder, WorkerReport
from kvtide.engines.paged.worker import FAULTY, LOADS_AT_ONCE, WorkerHalf
from kvtide.engines.settings import RequestOptions
from kvtide.evict import Hint
from kvtide.keys import block_keys
from kvtide.outcomes import Choice, Decided, Why
from kvtide.plan import Judge
from kvtide.store.cache import Cache
from kvtide.store.load import whole as loading
from kvtide.tier.buffers import touch
from kvtide.types import BlockKey, ObjectId
from kvtide_lab.bench.services import wait_until

Engines = Callable[..., ToyEngine]


@pytest.fixture
def engines(open_cache: OpenCache, tmp_path: Path, stack: ExitStack) -> Engines:
    """Make engines on one disk store; all must be clean in the end."""

    def make(store: str = "", shards: int = 1, kept_bytes_max: int = 0) -> ToyEngine:
        engine = ToyEngine(open_cache, store or str(tmp_path / "store"), shards, kept_bytes_max)
        return stack.enter_context(closing(engine))

    return make


@pytest.fixture
def second(engines: Engines) -> ToyEngine:
    """An engine on a store that another one has filled with the prompt."""
    engines().compute("a", PROMPT)
    return engines()


def taking(cache: Cache, monkeypatch: pytest.MonkeyPatch, touch_it: Callable[..., None]) -> WorkerHalf:
    """Let a worker take its cache's memory, touched by something else, until it has ended."""
    monkeypatch.setattr("kvtide.tier.ram.memory.touch", touch_it)
    worker = WorkerHalf(cache, host_pages(ORDER, pages=64)[0], 0, "toy", SystemClock())
    worker.take_memory()
    wait_until(lambda: "kvtide-memory" not in {thread.name for thread in threading.enumerate()}, "its end")
    return worker


def test_memory_is_there_before_blocks_need_it(open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    room, touched = 64 << 20, list[memoryview]()

    def noting(taken: memoryview, is_wanted: Callable[[], bool]) -> None:
        touch(taken, is_wanted)
        touched.append(taken)

    worker = taking(open_cache(memory_bytes_max=room), monkeypatch, noting)
    assert sum(map(resident_bytes, touched)) > room // 2
    touched.clear()
    worker.close()


def test_memory_that_can_not_be_had_is_a_fault_of_the_cache_alone(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhandled: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    taking(open_cache(), monkeypatch, Mock(side_effect=MemoryError("no more of it"))).close()
    assert not unhandled


def _loads(engine: ToyEngine, request: str, computed: int = 0) -> int:
    """Load the prompt, check that nothing else was written, and return how many blocks the store had to deliver."""
    before = engine.worker.cache.stats().blocks_loaded
    hit, pages, failed = engine.load(request, PROMPT, computed)
    assert (computed + hit, failed) == (3 * BLOCK, set())
    expected = np.concatenate([block_of(PROMPT, position) for position in range(3)], axis=2)
    restored = held(engine, pages)
    assert not restored[:, :, :computed].any()
    assert np.array_equal(restored[:, :, computed : 3 * BLOCK], expected[:, :, computed:])
    engine.finish(request)
    return engine.worker.cache.stats().blocks_loaded - before


def test_blocks_of_late_come_from_this_process(engines: Engines) -> None:
    engine = engines(kept_bytes_max=2 * LAYOUT.raw_bytes)
    engine.compute("a", PROMPT)
    # The first of three has gone; where the engine has it, the others are all that is loaded.
    assert _loads(engine, "b") == 3
    assert _loads(engine, "c", computed=BLOCK + PAGE_TOKENS) == 0


def test_tokens_that_come_from_this_process_are_counted_as_loaded(engines: Engines) -> None:
    engine = engines(kept_bytes_max=3 * LAYOUT.raw_bytes)
    engine.compute("a", PROMPT)
    assert _loads(engine, "b") == 0
    assert engine.worker.cache.decisions.counts() == {Decided(Choice.LOAD, Why.IN_TIME): 3 * BLOCK}


def test_blocks_loaded_twice_are_kept(engines: Engines) -> None:
    engines().compute("a", PROMPT)
    second = engines(kept_bytes_max=3 * LAYOUT.raw_bytes)
    assert [_loads(second, request) for request in "bcd"] == [3, 3, 0]


@pytest.mark.parametrize("kept_bytes_max", [0, 3 * LAYOUT.raw_bytes])
def test_request_for_the_latest_takes_no_stale_copy_and_what_any_region_has(
    engines: Engines, kept_bytes_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines hear of what is invalidated when they start, and not again.
    monkeypatch.setattr("kvtide.tier.stack.invalidation._POLL_S", 3600.0)

    def loaded(engine: ToyEngine, request: str, is_latest: bool) -> int:
        hit, _, failed = engine.load(request, PROMPT, options=RequestOptions(is_latest))
        engine.finish(request)
        return 0 if failed else hit // BLOCK

    with region_processes(tmp_path) as (_, *regions):
        one, two = (engines(each.url, kept_bytes_max=kept_bytes_max) for each in regions)
        one.compute("a", PROMPT)
        assert [loaded(engine, "b", is_latest=True) for engine in (one, two)] == [3, 3]
        (namespace,) = namespaces()(b"")
        invalidate(regions[1].url, namespace)
        assert [loaded(one, "c", is_latest=False), loaded(one, "d", is_latest=True)] == [3, 0]


def test_blocks_kept_as_pages_end_with_their_generation(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.stack.invalidation._POLL_S", 0.05)
    (namespace,) = namespaces()(b"")
    with running_server() as server:
        engine = engines(server.url, kept_bytes_max=3 * LAYOUT.raw_bytes)
        engine.compute("a", PROMPT)
        assert _loads(engine, "b") == 0
        invalidate(server.url, namespace)
        block = ObjectId(namespace, BlockKey(namespace))
        tiers: Any = engine.worker.cache.tiers
        wait_until(lambda: tiers.named(block).name.generation == 1, "the engine to hear of it")
        hit, _, failed = engine.load("c", PROMPT)
        assert not hit or failed, "stale pages"
        engine.finish("c")
        engine.compute("d", PROMPT)
        assert _loads(engine, "e") == 0, "what is computed anew is kept anew"


def test_tokens_that_nobody_stored_are_counted_once_a_request(engines: Engines) -> None:
    first, second = engines(), engines()
    first.compute("a", PROMPT[: 2 * BLOCK + 1])
    for _ in range(3):
        second.ask("b", PROMPT)
    for engine, absent in ((first, 2), (second, 1)):
        counted = engine.scheduler.cache.decisions.counts()
        assert counted == {Decided(Choice.RECOMPUTE, Why.ABSENT): absent * BLOCK}


FOLLOWED = RequestOptions(follow_s=30.0)


def has_found(engine: ToyEngine) -> bool:
    """Whether blocks that another engine stored wait to be brought; a request's own advice comes before them."""
    return any(each.prefetch for each in engine.scheduler._advice)


def test_prefix_that_another_engine_computes_is_waited_for_and_brought(engines: Engines) -> None:
    one, other = engines(), engines()
    brought: list[int] = []

    def asked() -> int | None:
        return other.scheduler.match("b", b"", PROMPT, 0, FOLLOWED)

    for blocks in (1, 2):
        one.compute(f"a{blocks}", PROMPT[: blocks * BLOCK])
        # It asks again and again; what has come is brought to its workers with the next step.
        wait_until(lambda: bool(asked() or has_found(other)), "a block")
        assert asked() is None
        brought += [block.start // BLOCK for each in other.step(tokens=0).advice for block in each.prefetch]
    assert brought == [0, 1]
    one.compute("a3", PROMPT)
    wait_until(lambda: asked() is not None, "all blocks")
    assert other.ask("b", PROMPT) == 3 * BLOCK


def test_prefix_that_comes_no_further_is_computed_from_there(engines: Engines) -> None:
    one, other = engines(), engines()
    one.compute("a", PROMPT[: 2 * BLOCK])
    brief = RequestOptions(follow_s=0.05)
    assert other.scheduler.match("b", b"", PROMPT, 0, brief) is None
    assert other.ask("b", PROMPT, options=brief) == 2 * BLOCK


def test_what_has_come_is_used_though_the_store_falls_silent(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = engines(), engines()
    one.compute("a", PROMPT[: 2 * BLOCK])
    answers: list[int | None] = []

    def asked() -> bool:
        answers.append(other.scheduler.match("b", b"", PROMPT, 0, RequestOptions(follow_s=0.5)))
        return answers[-1] is not None

    wait_until(lambda: asked() or has_found(other), "two blocks")
    speaks = threading.Event()
    other.scheduler._lookups._match_s_max = 0.02
    monkeypatch.setattr(other.scheduler.cache, "match", lambda ids: 0 * speaks.wait(20))
    wait_until(asked, "the end of waiting")
    speaks.set()
    assert answers[-1] == 2 * BLOCK


def test_following_ends_where_computing_is_faster() -> None:
    followed = FollowedPrefix(within_s=1.0, now_s=0.0)
    assert followed.is_worth(8, math.inf, 0.5)
    followed.note(2, 0.9)
    assert followed.is_worth(6, 3.0, 1.0)
    assert not followed.is_worth(6, 1.0, 1.0)
    assert not followed.is_worth(6, 3.0, 2.0)
    assert not followed.is_worth(0, 3.0, 1.0)


def test_last_token_of_a_prompt_is_never_loaded(engines: Engines) -> None:
    engine = engines()
    engine.compute("a", PROMPT[: 2 * BLOCK])
    assert engine.ask("b", PROMPT[: 2 * BLOCK]) == BLOCK
    assert engine.ask("b", PROMPT[: 2 * BLOCK + 1]) == 2 * BLOCK


def test_load_starts_behind_what_the_engine_has(second: ToyEngine) -> None:
    assert _loads(second, "b", computed=BLOCK + PAGE_TOKENS) == 2


def test_deleted_block_fails_its_pages_and_is_forgotten(second: ToyEngine) -> None:
    assert len(list(second.scheduler.cache.tiers.objects())) == 3
    (space,) = namespaces()(b"")
    assert second.worker.cache.tiers.delete(ObjectId(space, block_keys(space, PROMPT, BLOCK)[1]), "removed")
    hit, pages, failed = second.load("b", PROMPT)
    assert hit == 3 * BLOCK
    assert failed == set(pages[BLOCK // PAGE_TOKENS : 3 * BLOCK // PAGE_TOKENS])
    assert second.ask("b", PROMPT) == 0
    assert second.ask("c", PROMPT) == BLOCK


# One of the prompt's blocks, in whole pages.
OBJECT_BYTES = 4096


@pytest.fixture
def short(open_cache: OpenCache, stack: ExitStack) -> ToyEngine:
    """An engine whose memory has room for the prompt's blocks alone."""
    small = partial(open_cache, memory_bytes_max=3 * OBJECT_BYTES)
    engine = stack.enter_context(closing(ToyEngine(small, "memory://")))
    # A policy that hears of a prompt behind its blocks may let others stay.
    engine.worker._submit = lambda action: action() is None  # type: ignore[method-assign]
    engine.compute("a", PROMPT)
    assert [0 < each.size <= OBJECT_BYTES for each in engine.worker.cache.tiers.objects()] == 3 * [True]
    return engine


OTHER = [token + 1000 for token in PROMPT]


def test_what_left_or_was_refused_is_found_no_more_and_stored_again(short: ToyEngine) -> None:
    short.compute("b", OTHER)
    short.worker.cache.tiers.put_from = lambda *arguments: False  # type: ignore[method-assign]
    short.compute("c", [5, *PROMPT])
    del short.worker.cache.tiers.put_from
    short.scheduler.heard(short.worker.report(1))
    asked = {"d": PROMPT, "e": OTHER, "f": [5, *PROMPT]}
    found = {request: short.ask(request, tokens) for request, tokens in asked.items()}
    assert found == {"d": 0, "e": 3 * BLOCK, "f": 0}
    # For one step what was found stays.
    short.step()
    short.compute("g", PROMPT)
    short.scheduler.heard(short.worker.report(2))
    assert short.ask("h", PROMPT) == 3 * BLOCK


def test_what_was_found_for_a_request_that_waits_does_not_leave_before_it_is_loaded(short: ToyEngine) -> None:
    for request in "bc":
        # Each step asks for who waits, and has no room for it.
        assert short.ask("waiting", PROMPT) == 3 * BLOCK
        short.compute(request, [ord(request), *PROMPT])
    hit, _, failed = short.load("waiting", PROMPT)
    assert (hit, failed) == (3 * BLOCK, set())
    short.finish("waiting")
    short.compute("d", OTHER)
    short.scheduler.heard(short.worker.report(9))
    assert (short.ask("e", PROMPT), short.ask("f", OTHER)) == (0, 3 * BLOCK)


def test_load_in_which_anything_is_raised_is_a_miss_and_nobody_waits_for_it(
    second: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    second.worker.cache.load = Mock(side_effect=ZeroDivisionError("a bug"))  # type: ignore[method-assign]
    hit, pages, failed = second.load("b", PROMPT)
    assert failed == set(pages[: hit // PAGE_TOKENS])
    assert second.worker.take_counts()["failed_loads"] == 1
    assert "can't load into pages, served as a miss: a bug" in caplog.text
    assert second.ask("b", PROMPT) == 0


def test_line_about_a_request_says_what_was_found_loaded_saved_and_why_not(second: ToyEngine) -> None:
    judge = second.scheduler.cache.judge
    judge.note_prefill(0, 240, 24.0)
    longer = [*PROMPT, *range(500, 500 + 3 * BLOCK)]
    hit, pages, _ = second.load("b", longer)
    second.step(ScheduledRequest("b", longer, len(longer), lambda: pages))
    summary = second.scheduler.finished("b")
    second.worker.ended(["b"], is_idle=False)
    assert summary is not None and summary.ended is not None and summary.saved_s is not None
    assert summary.saved_s == pytest.approx(judge.prefill().seconds(0, hit) - summary.ended.seconds)
    assert re.fullmatch(
        r"51 tokens asked, 0 more in the engine's cache; 24 found in http://h; 24 loaded in 0\.\d+ s, 2\.\d+ s saved; "
        r"24 computed: nothing was stored; 3 blocks to store",
        summary.text("http://h"),
    )


def test_line_about_a_request_says_why_a_load_ended_early(second: ToyEngine) -> None:
    second.worker.cache.tiers.get_into = lambda *arguments: None  # type: ignore[method-assign]
    second.load("b", PROMPT)
    summary = second.scheduler.finished("b")
    second.worker.ended(["b"], is_idle=False)
    assert "24 found in x; 0 loaded (absent) in" in summary.text("x")


def test_first_step_of_some_length_and_steps_of_answers_say_nothing_of_how_fast_prompts_are(engines: Engines) -> None:
    engine, longer = engines(), [*PROMPT, 1]
    engine.ask("a", PROMPT)
    pages, steps = engine.pages(len(longer)), ((BLOCK - 1, PROMPT), (100, PROMPT), (100, longer), (100, PROMPT))
    for number, (count, tokens) in enumerate(steps):
        step = engine.step(ScheduledRequest("a", tokens, len(tokens), lambda: pages), tokens=count)
        engine.scheduler.heard(engine.worker.report(step.step))
        assert (engine.scheduler.cache.judge.prefill() is not None) == (number == 3)


def test_step_that_was_planned_ahead_has_taken_no_longer_than_since_the_one_before(engines: Engines) -> None:
    scheduler, clock = engines().scheduler, ManualClock()
    scheduler._clock = clock
    for step in [scheduler.plan((), 100).step for _ in range(3)]:
        clock.advance(1.0)
        scheduler.heard(WorkerReport(step))
    assert scheduler.cache.judge.deadline_s(100) == pytest.approx(1.0)


def test_finished_request_ends_its_load_and_nothing_is_written_later(second: ToyEngine) -> None:
    gate, tiers = threading.Event(), second.worker.cache.tiers
    read = tiers.get_into
    tiers.get_into = lambda *arguments: (gate.wait(5), read(*arguments))[1]  # type: ignore[method-assign]
    _, pages = second.begin("b", PROMPT, is_in_step=False)
    second.scheduler.finished("b")
    assert second.worker.ended(["b"], is_idle=False).requests == {"b"}
    gate.set()
    second.worker.close()
    assert not held(second, pages).any()


def test_slow_load_ends_at_its_deadline_and_the_next_is_declined(engines: Engines) -> None:
    long = list(range(100, 100 + 10 * BLOCK + 1))
    engines().compute("a", long)
    second = engines()
    second.scheduler.cache.judge.note_prefill(0, 10_000, 1.0)
    gate, tiers = threading.Event(), second.worker.cache.tiers
    tiers.get_into = lambda *arguments: gate.wait(5) and None  # type: ignore[method-assign]
    hit, pages, failed = second.load("b", long)
    assert hit == 10 * BLOCK
    assert failed == set(pages[: 10 * BLOCK // PAGE_TOKENS])
    assert second.ask("c", long) == 0
    gate.set()


def test_load_that_waits_for_its_turn_ends_at_its_deadline(second: ToyEngine) -> None:
    gate, started_s = threading.Event(), time.monotonic()
    second.worker.cache.tiers.get_into = lambda *arguments: gate.wait(60) and None  # type: ignore[method-assign]
    for request in range(LOADS_AT_ONCE):
        second.begin(str(request), PROMPT, is_in_step=False)
    second.scheduler.cache.judge = Judge(0.1)
    hit, pages = second.begin("late", PROMPT, is_in_step=False)
    assert second.wait("late") == set(pages[: hit // PAGE_TOKENS])
    assert time.monotonic() - started_s < 20
    gate.set()


def test_request_is_not_made_to_wait_twice_by_a_store_that_hangs(second: ToyEngine) -> None:
    second.scheduler.cache.judge = Judge(0.05)
    gate, tiers = threading.Event(), second.worker.cache.tiers
    tiers.get_into = lambda *arguments: gate.wait(5) and None  # type: ignore[method-assign]
    hit, pages, failed = second.load("b", PROMPT)
    assert failed == set(pages[: hit // PAGE_TOKENS])
    # Neither speed of prefill is known nor a block lost: only that this request has waited.
    assert second.ask("b", PROMPT) == 0
    gate.set()


def test_blocks_on_top_of_pages_that_were_not_filled_are_not_stored(second: ToyEngine) -> None:
    hit = second.ask("b", PROMPT)
    pages = second.pages(len(PROMPT) + BLOCK)
    assert hit
    second.worker.cache.tiers.get_into = lambda *arguments: None  # type: ignore[method-assign]
    second.scheduler.allocated("b", pages, hit, is_in_step=True)
    longer = PROMPT + list(range(BLOCK))
    orders = second.scheduler.plan([ScheduledRequest("b", longer, len(longer), lambda: pages)], 10)
    assert (len(orders.stores), second.carry_out(orders)) == (1, 0)
    # A step that was planned before anybody heard of it computes on top of nothing as well.
    with_answer = [*longer, *range(BLOCK)]
    early = second.scheduler.plan(
        [ScheduledRequest("b", with_answer, len(with_answer), lambda: [*pages, *second.pages(BLOCK)])], 10
    )
    assert len(early.stores) == 1
    second.scheduler.heard(second.worker.report(orders.step))
    assert second.carry_out(early) == 0
    # The step that computes them after all stores what is missing: the lost blocks and those behind them.
    orders = second.step(ScheduledRequest("b", longer, len(longer), lambda: pages))
    assert [order.block.start for order in orders.stores] == list(range(0, len(longer) // BLOCK * BLOCK, BLOCK))
    second.worker.ended([], is_idle=False)


def test_nobody_stores_on_top_of_shared_pages_that_were_not_filled(second: ToyEngine) -> None:
    hit, pages = second.ask("b", PROMPT), second.pages(len(PROMPT) + BLOCK)
    second.worker.cache.tiers.get_into = lambda *arguments: None  # type: ignore[method-assign]
    second.scheduler.allocated("b", pages, hit, is_in_step=True)
    # The engine's own prefix cache gives the pages to the next request of the same step.
    other = [*PROMPT[:hit], *range(BLOCK)]
    assert second.ask("c", other, computed=hit) == 0
    orders = second.scheduler.plan([ScheduledRequest("c", other, len(other), lambda: pages)], 10)
    assert [order.request for order in orders.stores] == ["c"]
    assert second.carry_out(orders) == 0
    second.worker.ended([], is_idle=False)


def test_shards_store_nothing_before_all_have_what_is_loaded_within_a_step(engines: Engines) -> None:
    engine = engines(shards=2)
    engine.compute("a", PROMPT)
    hit, pages, longer = engine.ask("b", PROMPT), engine.pages(len(PROMPT) + BLOCK), PROMPT + list(range(BLOCK))
    engine.scheduler.allocated("b", pages, hit, is_in_step=True)
    scheduled = ScheduledRequest("b", longer, len(longer), lambda: pages)
    engine.ask("c", longer[::-1])
    other = ScheduledRequest("c", longer[::-1], len(longer), lambda: engine.pages(len(longer)))
    orders = engine.step(scheduled, other)
    assert orders.loads and {order.request for order in orders.stores} == {"c"}
    engine.worker.wait_loads()
    # The other shard's load may have failed, of which this one knows nothing.
    assert engine.scheduler.plan([scheduled], 10).stores == ()
    engine.scheduler.heard(engine.worker.report(orders.step))
    assert len(engine.scheduler.plan([scheduled], 10).stores) == 1


def test_load_that_was_given_up_does_not_end_the_next_one_of_its_request(second: ToyEngine) -> None:
    gate, tiers = threading.Event(), second.worker.cache.tiers
    read = tiers.get_into
    tiers.get_into = lambda *arguments: (gate.wait(5), read(*arguments))[1]  # type: ignore[method-assign]
    for _ in range(2):
        _, pages = second.begin("b", PROMPT, is_in_step=False)
        if not gate.is_set():
            given_up = second.worker._loads["b"]
            second.finish("b")
            gate.set()
    second.worker._finish(given_up, FAULTY)
    assert second.wait("b") == set()
    assert np.array_equal(held(second, pages)[:, :, :BLOCK], block_of(PROMPT, 0))


def test_threads_not_to_be_had_are_misses(second: ToyEngine, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    third, hit, pages = engines(), second.ask("b", PROMPT), second.pages(len(PROMPT))
    second.scheduler.allocated("b", pages, hit)

    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    second.step(tokens=0)
    assert second.wait("b") == set(pages[: hit // PAGE_TOKENS])
    # A request that takes no copy of this machine asks in a thread.
    assert third.ask("b", PROMPT, options=RequestOptions(is_latest=True)) == 0


def test_layers_are_waited_for_one_by_one(second: ToyEngine) -> None:
    _, pages = second.begin("b", PROMPT)
    for layer in range(LAYOUT.layers):
        second.worker.wait_layer(layer)
        assert np.array_equal(held(second, pages)[layer, :, :BLOCK], block_of(PROMPT, 0)[layer])
    second.worker.wait_loads()


def test_first_layer_does_not_wait_for_the_others(
    open_cache: OpenCache, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", 1)
    # Coded layers of so few values would be larger than plain ones.
    made = (ToyEngine(partial(open_cache, codec="raw"), str(tmp_path / "store")) for _ in range(2))
    first, second = (stack.enter_context(closing(each)) for each in made)
    first.compute("a", PROMPT)
    begin, release, scatter = threading.Event(), threading.Event(), second.pool.scatter

    def held_back(layers: Any, pages: Any, skip_pages: int, first: int) -> None:
        assert (release if first else begin).wait(10)
        scatter(layers, pages, skip_pages, first)

    second.pool.scatter = held_back  # type: ignore[method-assign,assignment]
    _, pages = second.begin("b", PROMPT)
    waiting = threading.Thread(target=second.worker.wait_layer, args=(0,))
    waiting.start()
    # It waits already when the first layer comes.
    waiting.join(0.1)
    assert waiting.is_alive()
    begin.set()
    waiting.join(5)
    assert not waiting.is_alive()
    release.set()
    second.worker.wait_loads()
    assert np.array_equal(held(second, pages)[-1, :, :BLOCK], block_of(PROMPT, 0)[-1])


def test_tokens_of_the_answer_are_stored_as_their_blocks_fill(engines: Engines) -> None:
    engine = engines()
    tokens, pages = PROMPT[: BLOCK - 2], engine.pages(3 * BLOCK)
    assert engine.ask("a", tokens) == 0
    stored = []
    for computed in range(len(tokens), 2 * BLOCK + 1):
        # The token that the step computes is known, the one that it draws is not.
        orders = engine.step(ScheduledRequest("a", PROMPT[:computed], computed, lambda: pages))
        stored += [(computed, order.block.start) for order in orders.stores]
    assert stored == [(BLOCK, 0), (2 * BLOCK, BLOCK)]


def test_tokens_not_known_yet_are_not_stored(engines: Engines) -> None:
    engine = engines()
    assert engine.ask("a", PROMPT[:BLOCK]) == 0
    orders = engine.scheduler.plan([ScheduledRequest("a", PROMPT[: BLOCK - 1], BLOCK, list)], 1)
    assert orders.stores == ()


@pytest.mark.parametrize("salt", [b"tenant", b"\0epoch x"])
def test_other_salt_finds_nothing(engines: Engines, salt: bytes) -> None:
    engine = engines()
    engine.compute("a", PROMPT)
    assert engine.ask("b", PROMPT, salt=salt) == 0


def test_reset_serves_nothing_that_was_stored_before(engines: Engines) -> None:
    engine = engines()
    engine.compute("a", PROMPT)
    engine.scheduler.reset(b"1")
    assert engine.ask("b", PROMPT) == 0
    engine.finish("b")
    engine.compute("c", PROMPT)
    assert engine.ask("d", PROMPT) == 3 * BLOCK


def test_reset_forgets_what_was_asked_of_old_names(second: ToyEngine) -> None:
    gate, tiers, latest = threading.Event(), second.scheduler.cache.tiers, RequestOptions(is_latest=True)
    places = tiers.run_places
    tiers.run_places = lambda object_ids: (gate.wait(5), places(object_ids))[1]  # type: ignore[method-assign]
    assert second.scheduler.match("b", b"", PROMPT, 0, latest) is None
    second.scheduler.reset(b"new weights")
    gate.set()
    assert second.ask("b", PROMPT, options=latest) == 0


def test_pages_that_are_refused_are_left_alone_and_the_scheduler_hears_of_it(second: ToyEngine) -> None:
    second.worker._is_refused = True
    hit, pages, failed = second.load("b", PROMPT)
    assert hit == 3 * BLOCK and failed == set(pages[: hit // PAGE_TOKENS])
    assert not any(layer.any() for layer in second.layers)
    # The report of that step was heard.
    assert second.ask("c", PROMPT) == 0
    assert second.step(ScheduledRequest("c", PROMPT, len(PROMPT), lambda: pages)).stores == ()
    assert second.worker.cache.stats().blocks_stored == 0


def test_doubt_of_steps_that_nobody_tells_of_stays_and_takes_bounded_memory(engines: Engines) -> None:
    engine = engines(shards=2)
    engine.ask("a", PROMPT)
    pages = engine.pages(len(PROMPT))
    scheduled = ScheduledRequest("a", PROMPT, len(PROMPT), lambda: pages)
    for number in range(3 * STEPS_IN_FLIGHT_MAX):
        loaded = (1000 + number,) if number else tuple(pages)
        engine.scheduler._loads = [LoadOrder(f"b{number}", (), loaded, 0, 1.0, is_in_step=True)]
        assert engine.scheduler.plan([scheduled], 10).stores == ()
    assert len(engine.scheduler._doubtful) <= STEPS_IN_FLIGHT_MAX


def test_block_counts_only_if_every_shard_has_it(engines: Engines) -> None:
    engine = engines(shards=2)
    engine.compute("a", PROMPT)
    assert engine.ask("b", PROMPT) == 24
    # Shard 1 had no room for the first block.
    lost = block_keys(namespaces(shards=2)(b"")[1], PROMPT, BLOCK)[0]
    engine.scheduler.heard(WorkerReport(1, lost=(lost,)))
    assert engine.ask("b", PROMPT) == 0


def test_block_one_shard_lost_is_stored_again_however_late(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.engines.paged.scheduler.LOST_S", -1.0)
    engine = engines(shards=2)
    pages = engine.compute("a", PROMPT)
    lost = block_keys(namespaces(shards=2)(b"")[1], PROMPT, BLOCK)[1]
    engine.scheduler.heard(WorkerReport(1, lost=(lost,)))
    engine.ask("b", PROMPT)
    orders = engine.step(ScheduledRequest("b", PROMPT, len(PROMPT), lambda: pages))
    assert [order.block.start for order in orders.stores] == [BLOCK, 2 * BLOCK]


def test_slow_store_makes_the_engine_ask_again_and_then_compute(engines: Engines) -> None:
    engine = engines()
    engine.scheduler._lookups._match_s_max = 0.5
    gate = threading.Event()
    engine.scheduler.cache.tiers.run_places = lambda object_ids: [0] * gate.wait(5)  # type: ignore[method-assign]
    assert engine.scheduler.match("a", b"", PROMPT, 0) is None
    assert engine.ask("a", PROMPT) == 0
    gate.set()


def test_waits_for_a_slow_store_are_bounded_in_a_step(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate, waits, result = engines(), threading.Event(), list[float](), Future.result
    engine.scheduler.cache.tiers.run_places = lambda object_ids: [0] * gate.wait(20)  # type: ignore[method-assign]
    monkeypatch.setattr(Future, "result", lambda self, wait_s: (waits.append(wait_s), result(self, wait_s))[1])
    for number in range(30):
        assert engine.scheduler.match(f"r{number}", b"", PROMPT, 0) is None
    assert sum(waits) < 2 * ANSWERS_S and waits[-1] == 0.0
    engine.step(tokens=0)
    assert engine.scheduler.match("r29", b"", PROMPT, 0) is None and waits[-1] == ANSWER_S
    gate.set()
    for number in range(30):
        engine.finish(f"r{number}")


def test_hint_of_a_request_reaches_what_evicts(second: ToyEngine) -> None:
    cache = second.worker.cache
    options = RequestOptions(hint=Hint("talk", retain_s=60.0))
    for _ in range(2):
        second.scheduler.match("b", b"", [9] * (BLOCK + 1), 0, options)
    assert len(second.step().advice) == 1
    wait_until(lambda: cache.stats().hints_heard == 1, "the hint")
