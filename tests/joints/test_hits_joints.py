"""What one request has computed the next one finds, whether it is stored by then or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.paged.pools import PROMPT, ToyEngine
from tests.joints.conftest import HoldBack, attached, attached_lossy
from tests.store.test_cache import metas_of

from kvtide.block import BlockLayout
from kvtide.engines.transformers import CachedModel
from kvtide.engines.transformers.importance import Refusals, Ways
from kvtide.store import BlockSource, PendingBlock
from kvtide.store.cache import Cache
from kvtide.testing import smooth_bits

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
SHORT = {**GREEDY, "max_new_tokens": 6, "min_new_tokens": 6}


def blocks_of(tokens: int) -> int:
    return tokens // 16 * 16


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_every_turn_finds_the_turns_before_it(codec: str, tiny_model: Any, tmp_path: Path, held_back: HoldBack) -> None:
    talk = torch.randint(1, 256, (1, 40), generator=torch.Generator().manual_seed(3))
    with attached(tiny_model, tmp_path, codec=codec) as cached:
        gate = held_back(cached.cache)
        for turn in range(5):
            said = cached.generate(talk, **GREEDY)
            assert torch.equal(said, tiny_model.generate(talk, **GREEDY))
            # The last token of an answer has not been run.
            assert cached.last is not None and cached.last.hit_tokens == (blocks_of(talk.shape[1] - 11) if turn else 0)
            talk = torch.cat([said, talk[:, :10]], dim=1)
        # Closing waits for what is queued.
        gate.set()


def test_a_block_that_waits_is_not_queued_again(
    layout: BlockLayout, open_cache: Callable[..., Cache], held_back: HoldBack
) -> None:
    cache = open_cache("memory://")
    gate, captured = held_back(cache), []

    def capture() -> BlockSource:
        captured.append(1)
        return lambda: smooth_bits(layout, 1)

    blocks = [PendingBlock(meta, capture) for meta in metas_of(layout, 2)]
    assert cache.store(blocks) == cache.store(blocks) == 2
    gate.set()
    assert cache.flush(10) and (len(captured), cache.stats().blocks_stored) == (2, 2)
    cache.check()


def test_what_was_queued_and_not_stored_is_a_miss(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with attached(tiny_model, tmp_path) as cached:
        cached.cache.tiers.put_from = lambda *rest: False  # type: ignore[method-assign]
        cached.generate(prompt, max_new_tokens=2)
        assert cached.flush(10) and cached.hit_tokens(prompt) == 0


def test_connectors_find_what_their_workers_have_queued(
    open_cache: Callable[..., Cache], tmp_path: Path, held_back: HoldBack
) -> None:
    engine = ToyEngine(open_cache, str(tmp_path))
    held_back(engine.worker.cache)
    engine.worker.cache.flush = lambda timeout_s: True  # type: ignore[method-assign]
    engine.compute("a", PROMPT)
    assert engine.load("b", PROMPT)[0::2] == (24, set())
    engine.finish("a")
    engine.finish("b")


def in_part(model: Any, store: Path) -> CachedModel:
    return attached_lossy(model, store, "packed:0.01:4", importance=0.25)


def test_importance_stores_what_is_new(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    hits = []
    with in_part(tiny_model, tmp_path) as cached:
        for tokens in (40, 70, 100, 100):
            cached.generate(prompt[:, :tokens], max_new_tokens=2)
            assert cached.flush(10) and cached.last is not None
            hits.append(cached.last.hit_tokens)
    assert hits == [0, 32, 64, 96]


def test_importance_loads_whole_what_is_faster_whole(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    def selects(known: tuple[float, float]) -> bool:
        with in_part(tiny_model, tmp_path) as cached:
            for is_part, seconds in zip((True, False), known, strict=True):
                for is_near in (False, True):
                    cached._importance.ways.note(is_part, is_near, 1000, seconds, cached._clock.monotonic_s())
            cached.generate(prompt, max_new_tokens=2)
            assert cached.flush(10) and cached.last is not None
            return cached.last.selected is not None

    assert not selects((1.0, 2.0))  # Nothing is stored yet.
    assert selects((1.0, 2.0))
    assert not selects((2.0, 1.0))


def test_ways_try_both_and_keep_to_the_faster() -> None:
    ways, chosen = Ways(), []
    for now_s in range(4):
        is_part = ways.is_part_faster(is_near=False, now_s=now_s)
        ways.note(is_part, False, 1000, 2.0 if is_part else 1.0, now_s)
        chosen.append(is_part)
    assert chosen == [True, False, False, False]


@pytest.mark.parametrize(("part_s", "is_taken"), [(0.98, False), (0.9, True)])
def test_a_part_that_gains_next_to_nothing_is_not_taken(part_s: float, is_taken: bool) -> None:
    ways = Ways()
    ways.note(True, False, 1000, part_s, 0.0)
    ways.note(False, False, 1000, 1.0, 0.0)
    assert ways.is_part_faster(False, 0.0) == is_taken


def test_two_models_with_importance_do_not_touch_each_other(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    models = [tiny_model, other]

    def answers(number: int) -> list[torch.Tensor]:
        with in_part(models[number], tmp_path / str(number)) as cached:
            # What is learnt would change what is selected.
            cached._importance.learner.note = lambda *arguments: False  # type: ignore[method-assign]
            cached.generate(prompt, **SHORT)
            assert cached.flush(10)
            found = []
            for _ in range(8):
                cached._importance.ways, cached._importance.refusals = Ways(), Refusals()
                found.append(cached.generate(prompt, **SHORT))
                assert cached.last is not None and cached.last.selected is not None
            return found

    alone = [answers(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(answers, range(2)))
    for one, both in zip(alone, together, strict=True):
        assert all(torch.equal(answer, one[0]) for answer in (*one, *both))
