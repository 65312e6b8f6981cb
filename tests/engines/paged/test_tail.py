"""What lies beside whole blocks, on both halves and a toy engine: tails of prompts in pieces, and states of models."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.paged.pools import (
    BLOCK,
    LAYOUT,
    PAGE_TOKENS,
    PAGES,
    PROMPT,
    ToyEngine,
    held,
    host_pages,
    namespaces,
    random_block,
)

from kvtide.engines.chunks import chunk_layout
from kvtide.engines.paged import OpaquePages, ScheduledRequest
from kvtide.engines.paged.pages import CellOrder, join_pages
from kvtide.engines.paged.sequence import EndedLoad, TrackedSequence, WorkerReport, tail_namespace
from kvtide.engines.settings import NO_OPTIONS, RequestOptions
from kvtide.group import state_every
from kvtide.store import Cache
from kvtide.types import Namespace

PIECE = 2
TOKENS = list(range(30))


class TailEngine(ToyEngine):
    """A toy engine of blocks of eight tokens and pages of four, whose prompts are computed token by token."""

    def fill(self, tokens: list[int], pages: list[int]) -> None:
        """Write a prompt; each token's values depend on all tokens up to it."""
        for token in range(len(tokens)):
            page, slot = pages[token // PAGE_TOKENS], token % PAGE_TOKENS
            self.pool.scatter_tokens(token_values(tokens, token), page, slot)


def token_values(tokens: list[int], token: int) -> Any:
    return random_block(hash(tuple(tokens[: token + 1])) & 0xFFFF)[:, :, :1]


def expected(tokens: list[int], stop: int) -> Any:
    return np.concatenate([token_values(tokens, token) for token in range(stop)], axis=2)


Tails = Callable[..., TailEngine]


@pytest.fixture
def tails(open_cache: Callable[..., Cache], tmp_path: Path, stack: ExitStack) -> Tails:
    def make(tail_tokens: int = PIECE, codec: str = "lossless") -> TailEngine:
        engine = TailEngine(partial(open_cache, codec=codec), str(tmp_path / "store"), tail_tokens=tail_tokens)
        return stack.enter_context(closing(engine))

    return make


@pytest.mark.parametrize(
    ("stored", "asked", "computed", "restored"),
    [
        *((22, TOKENS, 0, 22), (21, TOKENS, 0, 20), (24, TOKENS, 0, 24), (17, TOKENS, 0, 16)),
        *((22, TOKENS[:22], 0, 20), (22, TOKENS[:23], 0, 22), (5, TOKENS[:9], 0, 4), (3, TOKENS[:3], 0, 2)),
        # It ends where another prompt differs.
        (22, [*TOKENS[:19], 900, *TOKENS[20:]], 0, 18),
        # What the engine has by itself is not loaded again.
        (23, TOKENS, 20, 22),
    ],
)
def test_tail_of_a_prompt_is_restored_bit_for_bit_after_a_restart(
    tails: Tails, stored: int, asked: list[int], computed: int, restored: int
) -> None:
    first = tails()
    first.compute("a", TOKENS[:stored])
    first.worker.close()
    second = tails()
    hit, pages, failed = second.load("b", asked, computed)
    assert (computed + hit, failed) == (restored, set())
    rows = held(second, pages)
    assert not rows[:, :, :computed].any()
    assert np.array_equal(rows[:, :, computed:restored], expected(asked, restored)[:, :, computed:])


def test_without_the_option_whole_blocks_alone_are_restored(tails: Tails) -> None:
    tails().compute("a", TOKENS[:22])
    second = tails(0)
    assert second.load("b", TOKENS)[0] == 16


def test_pieces_take_no_room_from_blocks(tails: Tails) -> None:
    first = tails()
    first.has_room = False
    first.compute("a", TOKENS[:22])
    second = tails()
    assert second.load("b", TOKENS)[::2] == (16, set())
    # What was not stored is no longer promised: once there is room it is stored.
    first.scheduler.heard(first.worker.report(0))
    first.has_room = True
    first.compute("c", TOKENS[:22])
    assert tails().load("d", TOKENS)[::2] == (22, set())


def test_layers_of_pieces_come_with_those_of_the_blocks(tails: Tails, monkeypatch: pytest.MonkeyPatch) -> None:
    # A layer at a time, as of models whose piece of a tail is as large as a read.
    monkeypatch.setattr("kvtide.store.load.whole.PIECE_BYTES", 1)
    tails(codec="raw").compute("a", TOKENS[:22])
    second = tails(codec="raw")
    hit, pages = second.begin("b", TOKENS)
    assert hit == 22
    for layer in range(LAYOUT.layers):
        second.worker.wait_layer(layer)
        assert np.array_equal(held(second, pages)[layer, :, :hit], expected(TOKENS, hit)[layer])
    second.worker.wait_loads()
    assert second.worker.ended([], is_idle=False).failed_pages == set()


def test_same_tail_behind_another_block_is_another_tail(tails: Tails) -> None:
    tail = range(500, 506)
    prompts = {"a": [*range(16), *tail], "b": [*range(8), *range(100, 108), *tail]}
    first, second = tails(), tails()
    for name, tokens in prompts.items():
        first.compute(name, tokens)
    for name, tokens in prompts.items():
        hit, pages, failed = second.load(name, [*tokens, 7, 8])
        second.finish(name)
        assert (hit, failed) == (22, set())
        assert np.array_equal(held(second, pages)[:, :, :22], expected(tokens, 22))


def test_pieces_that_were_loaded_are_not_given_up_for_want_of_room(tails: Tails) -> None:
    first, second, tokens = tails(), tails(), TOKENS[:23]
    first.compute("a", TOKENS[:22])
    second.has_room = False
    hit, pages, _ = second.load("b", tokens)
    orders = second.step(ScheduledRequest("b", tokens, len(tokens), lambda: pages))
    second.scheduler.heard(second.worker.report(orders.step))
    assert (hit, second.ask("c", tokens)) == (22, 22)


def test_lost_piece_has_its_page_computed_and_is_not_promised_again(tails: Tails) -> None:
    tails().compute("a", TOKENS[:22])
    second = tails()
    second.ask("b", TOKENS)
    lost = second.scheduler._sequences["b"].offered[1]
    second.finish("b")
    second.worker.cache.tiers.delete(lost.ids[0], "removed")
    hit, pages, failed = second.load("c", TOKENS)
    second.finish("c")
    assert hit == 22
    assert failed == set(pages[4:6])
    assert np.array_equal(held(second, pages)[:, :, :16], expected(TOKENS, 16))
    assert second.load("d", TOKENS)[0] == 18


def test_rest_of_a_page_is_left_as_it_is(tails: Tails) -> None:
    tails().compute("a", TOKENS[:18])
    second = tails()
    assert second.ask("b", TOKENS) == 18
    pages = second.pages(len(TOKENS))
    own = token_values([7], 0)
    second.pool.scatter_tokens(own, pages[4], 3)
    second.scheduler.allocated("b", pages, 18)
    second.step(tokens=0)
    assert not second.wait("b")
    assert np.array_equal(held(second, pages)[:, :, 19:20], own)


def test_prompt_stores_its_tail_once_and_answers_store_none(tails: Tails) -> None:
    one = tails()
    one.ask("a", TOKENS[:20])
    pages = one.pages(30)
    found = [
        one.step(ScheduledRequest("a", TOKENS[:stop], stop, lambda: pages)).stores for stop in (12, 20, 21, 23, 25, 30)
    ]
    kinds = [["tail" if order.is_tail else "block" for order in each] for each in found]
    assert kinds == [["block"], ["block", "tail", "tail"], [], [], ["block"], []]


def test_what_is_computed_on_top_of_rough_blocks_has_no_tail_either(tails: Tails) -> None:
    one = tails()
    one.ask("a", TOKENS[:20])
    one.scheduler.heard(WorkerReport(0, (EndedLoad("a", 0, 0, 0.0, None, is_rough=True),)))
    pages = one.pages(30)
    assert one.step(ScheduledRequest("a", TOKENS[:20], 20, lambda: pages)).stores == ()


def test_pieces_of_another_size_or_of_blocks_have_other_names() -> None:
    namespace = Namespace(bytes(32))
    sequence = TrackedSequence((namespace,), 8, tail_tokens=2)
    sequence.blocks(list(range(30)))
    names = {piece.ids[0] for piece in sequence.tail(range(30), 1, 16)}
    assert len(names) == 3
    assert {each.namespace for each in names} == {tail_namespace(namespace, 2)}
    assert tail_namespace(namespace, 2) != tail_namespace(namespace, 4)


def test_prompts_that_depend_on_more_than_tokens_have_no_pieces() -> None:
    sequence = TrackedSequence((Namespace(bytes(32)),), 8, extra=lambda start, stop: b"image", tail_tokens=2)
    sequence.blocks(list(range(12)))
    assert sequence.tail(range(12), 1, 12) == []


@pytest.mark.parametrize("order", CellOrder)
def test_tokens_of_a_page_come_back_as_they_were(order: CellOrder) -> None:
    pool, layers = host_pages(order)
    bits = random_block(3)[:, :, :3]
    pool.scatter_tokens(bits, 2, 1)
    assert np.array_equal(pool.capture_tokens(2, 1, 4), bits)
    assert not pool.capture_tokens(2, 0, 1).any()
    pool.scatter_tokens(bits[:, :, :1], 2, 3)
    assert np.array_equal(pool.capture_tokens(2, 1, 3), bits[:, :, :2])
    assert not any(layer[3].any() or layer[1].any() for layer in layers)


STATE_BYTES = 32
BRANCH = [*PROMPT[: 2 * BLOCK], *range(7, 7 + BLOCK + 3)]


def state_of(tokens: list[int]) -> bytes:
    return bytes(np.random.default_rng(hash(tuple(tokens)) & 0xFFFF).integers(256, size=STATE_BYTES, dtype=np.uint8))


class StateEngine(ToyEngine):
    """An engine whose steps leave a state in the last page that they fill."""

    def __init__(self, open_cache: Callable[..., Cache], store: str, every: int) -> None:
        self.states = np.zeros((PAGES, STATE_BYTES + 8), np.uint8)
        pool = OpaquePages([(self.states[:, :STATE_BYTES], (0,))], chunk_layout(STATE_BYTES, 1, 1), 1)
        super().__init__(open_cache, store, states=pool, every=every)

    def run(self, request: str, tokens: list[int], *ends: int, options: RequestOptions = NO_OPTIONS) -> int:
        """Run a prompt in steps that end after so many tokens; return what could have been restored of it."""
        hit, pages = self.ask(request, tokens, options=options), self.pages(len(tokens))
        self.fill(tokens, pages)
        for end in ends:
            self.states[pages[-(-end // PAGE_TOKENS) - 1], :STATE_BYTES] = list(state_of(tokens[:end]))
            self.step(ScheduledRequest(request, tokens, end, lambda: pages))
        assert self.worker.cache.flush(60)
        self.finish(request)
        return hit

    def restored(self, request: str, tokens: list[int]) -> tuple[int, bytes, bool]:
        """Load what there is; return the tokens, the state after them, and whether the request failed."""
        hit, pages, _ = self.load(request, tokens)
        self.finish(request)
        return hit, bytes(self.states[pages[hit // PAGE_TOKENS - 1], :STATE_BYTES]) if hit else b"", self.has_failed


States = Callable[..., StateEngine]


@pytest.fixture
def engines(open_cache: Callable[..., Cache], tmp_path: Path, stack: ExitStack) -> States:
    def make(every: int = 1 << 30) -> StateEngine:
        return stack.enter_context(closing(StateEngine(open_cache, str(tmp_path / "store"), every)))

    return make


def test_state_at_the_last_block_comes_back_in_another_engine(engines: States) -> None:
    assert engines().run("a", PROMPT, BLOCK, 3 * BLOCK, len(PROMPT)) == 0
    assert engines().restored("b", PROMPT) == (3 * BLOCK, state_of(PROMPT[: 3 * BLOCK]), False)


def test_states_are_written_behind_what_the_engine_has_queued(engines: States, monkeypatch: pytest.MonkeyPatch) -> None:
    engines().run("a", PROMPT, 3 * BLOCK, len(PROMPT))
    second, done = engines(), list[str]()
    pool: Any = second.worker._states
    scatter = pool.scatter
    monkeypatch.setattr(pool, "follow", lambda: done.append("follow"))
    monkeypatch.setattr(pool, "scatter", lambda *args: (done.append("scatter"), scatter(*args)))
    assert second.restored("b", PROMPT) == (3 * BLOCK, state_of(PROMPT[: 3 * BLOCK]), False)
    assert done[:2] == ["follow", "scatter"]


def test_rows_without_a_state_at_their_end_are_no_hit(engines: States) -> None:
    engines().run("a", PROMPT, 3 * BLOCK - 1, len(PROMPT))
    assert engines().restored("b", PROMPT) == (0, b"", False)


def test_state_is_kept_where_another_prompt_began_with_the_same(engines: States) -> None:
    engine = engines()
    engine.run("a", PROMPT, 2 * BLOCK, 3 * BLOCK, len(PROMPT))
    assert engine.run("b", BRANCH, BLOCK, 2 * BLOCK, 3 * BLOCK, len(BRANCH)) == 0
    other = [*PROMPT[: 2 * BLOCK], *range(900, 905)]
    assert engines().restored("c", other) == (2 * BLOCK, state_of(PROMPT[: 2 * BLOCK]), False)
    assert engines().restored("d", [*PROMPT[:BLOCK], 1, 2]) == (0, b"", False)


def test_request_that_is_not_to_be_stored_leaves_no_state_either(engines: States) -> None:
    engine = engines()
    engine.run("a", PROMPT, 3 * BLOCK, len(PROMPT), options=RequestOptions(may_store=False))
    assert engine.worker.cache.stats().blocks_stored == 0


def test_states_are_kept_as_often_as_one_says(engines: States) -> None:
    ends = [BLOCK, 2 * BLOCK, 3 * BLOCK, len(PROMPT)]
    engines(every=BLOCK).run("a", PROMPT, *ends)
    assert engines().restored("b", PROMPT[: BLOCK + 1]) == (BLOCK, state_of(PROMPT[:BLOCK]), False)


def test_state_that_is_gone_fails_the_load_and_is_not_promised_again(engines: States) -> None:
    first, second = engines(), engines()
    first.run("a", PROMPT, 3 * BLOCK, len(PROMPT))
    assert second.ask("b", PROMPT) == 3 * BLOCK
    second.scheduler.finished("b")
    state = TrackedSequence(namespaces()(b""), BLOCK, has_states=True).blocks(PROMPT)[-1].states[0]
    for engine in (first, second):
        engine.worker.cache.tiers.delete(state, "a test")
    assert second.restored("c", PROMPT) == (3 * BLOCK, bytes(STATE_BYTES), True)
    assert second.ask("d", PROMPT) == 0


def test_blocks_of_several_shapes_go_and_come_as_bytes() -> None:
    rng = np.random.default_rng(0)
    wide, narrow = (rng.integers(256, size=(9, size), dtype=np.uint8) for size in (64, 32))
    pool = OpaquePages([(wide, (0,)), (narrow, (1, 2))], chunk_layout(2 * 128, 1, 8), 4)
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
