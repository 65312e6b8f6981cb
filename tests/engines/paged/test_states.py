"""Models with states, on both halves of a connector: where they are kept, and that nothing goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engines.paged.pools import LAYOUT, PAGE_TOKENS, engine_writes, host_pages, namespaces, random_block

from kvtide.clock import SystemClock
from kvtide.engines.chunks import chunk_layout
from kvtide.engines.paged import OpaqueLayer, OpaquePages, ScheduledRequest, SchedulerHalf, WorkerHalf
from kvtide.engines.paged.pages import CellOrder, join_pages
from kvtide.engines.paged.sequence import TrackedSequence
from kvtide.engines.settings import NO_OPTIONS, RequestOptions
from kvtide.group import state_every
from kvtide.store import Cache

BLOCK, ORDER, PAGES = LAYOUT.tokens, CellOrder.SPLIT, 64
STATE_BYTES = 32
PROMPT = list(range(3 * BLOCK + 3))
NAMES = namespaces(has_states=True)
BRANCH = [*PROMPT[: 2 * BLOCK], *range(7, 7 + BLOCK + 3)]


def state_of(tokens: list[int]) -> bytes:
    return bytes(np.random.default_rng(hash(tuple(tokens)) & 0xFFFF).integers(256, size=STATE_BYTES, dtype=np.uint8))


class StateEngine:
    """An engine whose steps leave a state in the last page that they fill."""

    def __init__(self, open_cache: Callable[..., Cache], store: str, every: int = 0) -> None:
        clock = SystemClock()
        self.scheduler = SchedulerHalf(open_cache(store), NAMES, BLOCK, PAGE_TOKENS, clock, 20.0, every)
        rows, self._layers = host_pages(ORDER, pages=PAGES)
        self.states = np.zeros((PAGES, STATE_BYTES + 8), np.uint8)
        pool = OpaquePages([OpaqueLayer(self.states[:, :STATE_BYTES], (0,))], chunk_layout(STATE_BYTES, 1, 1), 1)
        self.worker = WorkerHalf(open_cache(store), rows, 0, "toy", clock, states=pool)
        self._free = iter(range(1, PAGES))

    def ask(self, request: str, tokens: list[int], options: RequestOptions = NO_OPTIONS) -> int:
        hit = None
        while hit is None:
            hit = self.scheduler.match(request, b"", tokens, 0, options)
        return hit

    def compute(self, request: str, tokens: list[int], *ends: int, options: RequestOptions = NO_OPTIONS) -> int:
        """Run a prompt in steps that end after so many tokens; return what could have been restored of it."""
        hit = self.ask(request, tokens, options)
        pages = [next(self._free) for _ in range(-(-len(tokens) // PAGE_TOKENS))]
        per_block = BLOCK // PAGE_TOKENS
        for position in range(len(tokens) // BLOCK):
            engine_writes(self._layers, ORDER, random_block(position), pages[position * per_block :][:per_block])
        for end in ends:
            self.states[pages[-(-end // PAGE_TOKENS) - 1], :STATE_BYTES] = list(state_of(tokens[:end]))
            orders = self.scheduler.plan([ScheduledRequest(request, tokens, end, lambda: pages)], 100)
            self.worker.store(orders)
        assert self.worker.cache.flush(10)
        self.scheduler.finished(request)
        return hit

    def restored(self, request: str, tokens: list[int]) -> tuple[int, bytes, bool]:
        """Load what there is; return the tokens, the state after them, and whether the request failed."""
        hit = self.ask(request, tokens)
        if not hit:
            return 0, b"", False
        pages = [next(self._free) for _ in range(hit // PAGE_TOKENS)]
        self.scheduler.allocated(request, pages, hit)
        orders = self.scheduler.plan([], 0)
        self.worker.start(orders)
        outcome = self.worker.ended([], is_idle=True)
        while request not in outcome.requests:
            outcome = self.worker.ended([], is_idle=True)
        self.scheduler.heard(self.worker.report(orders.step))
        self.scheduler.finished(request)
        return hit, bytes(self.states[pages[-1], :STATE_BYTES]), bool(outcome.failed)


@pytest.fixture
def engines(open_cache: Callable[..., Cache], tmp_path: Path) -> Iterator[Callable[..., StateEngine]]:
    made: list[StateEngine] = []

    def make(every: int = 0) -> StateEngine:
        made.append(StateEngine(open_cache, str(tmp_path / "store"), every))
        return made[-1]

    yield make
    for engine in made:
        engine.scheduler.close()
        engine.worker.close()


def test_state_at_the_last_block_comes_back_in_another_engine(engines: Callable[..., StateEngine]) -> None:
    assert engines().compute("a", PROMPT, BLOCK, 3 * BLOCK, len(PROMPT)) == 0
    assert engines().restored("b", PROMPT) == (3 * BLOCK, state_of(PROMPT[: 3 * BLOCK]), False)


def test_rows_without_a_state_at_their_end_are_no_hit(engines: Callable[..., StateEngine]) -> None:
    engines().compute("a", PROMPT, 3 * BLOCK - 1, len(PROMPT))
    assert engines().restored("b", PROMPT) == (0, b"", False)


def test_state_is_kept_where_another_prompt_began_with_the_same(engines: Callable[..., StateEngine]) -> None:
    engine = engines()
    engine.compute("a", PROMPT, 2 * BLOCK, 3 * BLOCK, len(PROMPT))
    assert engine.compute("b", BRANCH, BLOCK, 2 * BLOCK, 3 * BLOCK, len(BRANCH)) == 0
    other = [*PROMPT[: 2 * BLOCK], *range(900, 905)]
    assert engines().restored("c", other) == (2 * BLOCK, state_of(PROMPT[: 2 * BLOCK]), False)
    assert engines().restored("d", [*PROMPT[:BLOCK], 1, 2]) == (0, b"", False)


def test_request_that_is_not_to_be_stored_leaves_no_state_either(engines: Callable[..., StateEngine]) -> None:
    engine = engines()
    engine.compute("a", PROMPT, 3 * BLOCK, len(PROMPT), options=RequestOptions(may_store=False))
    assert engine.worker.cache.stats().blocks_stored == 0


def test_states_are_kept_as_often_as_one_says(engines: Callable[..., StateEngine]) -> None:
    ends = [BLOCK, 2 * BLOCK, 3 * BLOCK, len(PROMPT)]
    engines(every=BLOCK).compute("a", PROMPT, *ends)
    assert engines().restored("b", PROMPT[: BLOCK + 1]) == (BLOCK, state_of(PROMPT[:BLOCK]), False)


def test_state_that_is_gone_fails_the_load_and_is_not_promised_again(engines: Callable[..., StateEngine]) -> None:
    first, second = engines(), engines()
    first.compute("a", PROMPT, 3 * BLOCK, len(PROMPT))
    assert second.ask("b", PROMPT) == 3 * BLOCK
    second.scheduler.finished("b")
    state = TrackedSequence(NAMES.of(b""), BLOCK, has_states=True).blocks(PROMPT)[-1].states[0]
    for engine in (first, second):
        engine.worker.cache.tiers.delete(state, "a test")
    assert second.restored("c", PROMPT) == (3 * BLOCK, bytes(STATE_BYTES), True)
    assert second.ask("d", PROMPT) == 0


def test_blocks_of_several_shapes_go_and_come_as_bytes() -> None:
    rng = np.random.default_rng(0)
    wide, narrow = (rng.integers(256, size=(9, size), dtype=np.uint8) for size in (64, 32))
    pool = OpaquePages([OpaqueLayer(wide, (0,)), OpaqueLayer(narrow, (1, 2))], chunk_layout(2 * 128, 1, 8), 4)
    pages = join_pages([[1, 2], [3, 4, 5, 6]], [1, 2])
    bits, before = pool.capture(pages).block(), (wide.copy(), narrow.copy())
    wide[1:3], narrow[3:7] = 0, 0
    pool.scatter(bits, pages, 0)
    assert np.array_equal(wide, before[0])
    assert np.array_equal(narrow, before[1])
    # From the second page on, where one group has given up a page.
    pool.scatter(bits, join_pages([[8], [0, 7]], [1, 2]), 1)
    assert np.array_equal(wide[8], before[0][2])
    assert np.array_equal(narrow[7], before[1][6])
    assert np.array_equal(narrow[0], before[1][0])
    with pytest.raises(ValueError, match="given up"):
        pool.capture(join_pages([[8, 1], [0, 7, 1, 2]], [1, 2]))


def test_states_take_no_more_room_than_the_rows_between_them() -> None:
    assert state_every(1 << 20, 1024) == 4096
    assert state_every(1 << 24, 1024) == 1 << 14
    assert state_every(1 << 24, 0) == 4096
