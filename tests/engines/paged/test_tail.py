"""What a prompt has behind its last full block, in pieces: the two halves together on a toy engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.paged.pools import PAGE_TOKENS, host_pages, random_block
from tests.engines.paged.test_halves import ToyEngine, held

from kvtide.engines.paged.pages import CellOrder
from kvtide.engines.paged.scheduler import ScheduledRequest
from kvtide.engines.paged.sequence import TrackedSequence, WorkerReport, tail_namespace
from kvtide.store.cache import Cache
from kvtide.types import Namespace

PIECE = 2


class TailEngine(ToyEngine):
    """A toy engine of blocks of eight tokens and pages of four, whose prompts are computed token by token."""

    def compute(self, request: str, tokens: list[int], salt: bytes = b"") -> list[int]:
        """Run a whole prompt without loading anything; each token's values depend on all tokens up to it."""
        self.ask(request, tokens, salt=salt)
        pages = self.pages(len(tokens))
        for token in range(len(tokens)):
            page, slot = pages[token // PAGE_TOKENS], token % PAGE_TOKENS
            self.pool.scatter_tokens(values_of(tokens, token), page, slot)
        self.step(ScheduledRequest(request, tokens, len(tokens), lambda: pages))
        assert self.worker.cache.flush(10)
        self.finish(request)
        return pages


def values_of(tokens: list[int], token: int) -> Any:
    return random_block(hash(tuple(tokens[: token + 1])) & 0xFFFF)[:, :, :1]


def expected(tokens: list[int], stop: int) -> Any:
    return np.concatenate([values_of(tokens, token) for token in range(stop)], axis=2)


@pytest.fixture
def engine(open_cache: Callable[..., Cache], tmp_path: Path) -> Iterator[Callable[[], TailEngine]]:
    made: list[TailEngine] = []

    def make(tail_tokens: int = PIECE) -> TailEngine:
        made.append(TailEngine(open_cache, str(tmp_path / "store"), tail_tokens=tail_tokens))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("stored", "asked", "restored"),
    [(22, 30, 22), (21, 30, 20), (22, 22, 20), (5, 9, 4), (24, 30, 24), (22, 23, 22), (17, 30, 16), (3, 3, 2)],
)
def test_tail_of_a_prompt_is_restored_bit_for_bit_after_a_restart(
    engine: Callable[..., TailEngine], stored: int, asked: int, restored: int
) -> None:
    tokens = list(range(100, 100 + asked))
    first = engine()
    first.compute("a", tokens[:stored])
    first.worker.close()
    second = engine()
    hit, pages, failed = second.load("b", tokens)
    assert (hit, failed) == (restored, set())
    assert np.array_equal(held(second, pages)[:, :, :restored], expected(tokens, restored))


def test_without_the_option_whole_blocks_alone_are_restored(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    engine().compute("a", tokens[:22])
    second = engine(0)
    assert second.load("b", tokens)[0] == 16


def test_tail_ends_where_another_prompt_differs(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    engine().compute("a", tokens[:22])
    second = engine()
    hit, pages, _ = second.load("b", [*tokens[:19], 900, *tokens[20:]])
    assert hit == 18
    assert np.array_equal(held(second, pages)[:, :, :18], expected(tokens, 18))


def test_same_tail_behind_another_block_is_another_tail(engine: Callable[..., TailEngine]) -> None:
    tail = range(500, 506)
    prompts = {"a": [*range(16), *tail], "b": [*range(8), *range(100, 108), *tail]}
    first, second = engine(), engine()
    for name, tokens in prompts.items():
        first.compute(name, tokens)
    for name, tokens in prompts.items():
        hit, pages, failed = second.load(name, [*tokens, 7, 8])
        second.finish(name)
        assert (hit, failed) == (22, set())
        assert np.array_equal(held(second, pages)[:, :, :22], expected(tokens, 22))


def test_what_the_engine_has_by_itself_is_not_loaded_again(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    engine().compute("a", tokens[:23])
    second = engine()
    hit, pages, failed = second.load("b", tokens, computed=20)
    assert (hit, failed) == (2, set())
    assert np.array_equal(held(second, pages)[:, :, 20:22], expected(tokens, 22)[:, :, 20:])
    assert not held(second, pages)[:, :, :20].any()


def test_lost_piece_has_its_page_computed_and_is_not_promised_again(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    first = engine()
    first.compute("a", tokens[:22])
    second = engine()
    second.ask("b", tokens)
    lost = second.scheduler._sequences["b"].offered[1]
    second.finish("b")
    second.worker.cache.tiers.delete(lost.ids[0], "removed")
    hit, pages, failed = second.load("c", tokens)
    second.finish("c")
    assert hit == 22
    assert failed == set(pages[4:6])
    assert np.array_equal(held(second, pages)[:, :, :16], expected(tokens, 16))
    assert second.load("d", tokens)[0] == 18


def test_rest_of_a_page_is_left_as_it_is(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    engine().compute("a", tokens[:18])
    second = engine()
    assert second.ask("b", tokens) == 18
    pages = second.pages(len(tokens))
    own = values_of([7], 0)
    second.pool.scatter_tokens(own, pages[4], 3)
    second.scheduler.allocated("b", pages, 18)
    second.step(tokens=0)
    assert not second.wait("b")
    assert np.array_equal(held(second, pages)[:, :, 19:20], own)


def test_prompt_stores_its_tail_once_and_answers_store_none(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    one = engine()
    one.ask("a", tokens[:20])
    pages = one.pages(30)
    found = [
        one.step(ScheduledRequest("a", tokens[:stop], stop, lambda: pages)).stores for stop in (12, 20, 21, 23, 25, 30)
    ]
    kinds = [["tail" if order.is_tail else "block" for order in each] for each in found]
    assert kinds == [["block"], ["block", "tail", "tail"], [], [], ["block"], []]


def test_what_is_computed_on_top_of_rough_blocks_has_no_tail_either(engine: Callable[..., TailEngine]) -> None:
    tokens = list(range(30))
    one = engine()
    one.ask("a", tokens[:20])
    one.scheduler.heard(WorkerReport(0, (), (), (), rough=("a",)))
    pages = one.pages(30)
    assert one.step(ScheduledRequest("a", tokens[:20], 20, lambda: pages)).stores == ()


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
