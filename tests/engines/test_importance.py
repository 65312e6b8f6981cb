"""`attach(importance=…)`: a prefix loaded in part, what is learnt from it, and nothing of it when off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.engines.transformers import CachedModel, Impress, attach
from kvtide.engines.transformers.groups import model_layout
from kvtide.engines.transformers.importance import REPACK_USES, Learner, Refusals, Ways
from kvtide.engines.transformers.selective import SparseSettings
from kvtide.importance import HeadsAgree, packing_orders

# As the fixture's.
PROMPT = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def attached(model: Any, store: Path, importance: float | SparseSettings | None = 0.25) -> CachedModel:
    return attach(
        model,
        str(store),
        codec="packed:0.01:4",
        profiles=[fitted_on(model, model_layout(model, 16), PROMPT)],
        block_tokens=16,
        importance=importance,
    )


def fill(model: Any, store: Path, prompt: torch.Tensor, importance: float | None = 0.25) -> Path:
    with attached(model, store, importance) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.last.selected is None and cached.flush(10)
    return store


@pytest.fixture
def store(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> Path:
    return fill(tiny_model, tmp_path, prompt)


def test_a_part_of_the_prefix_is_loaded(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    with attached(tiny_model, store) as cached:
        output = cached.generate(prompt, **GREEDY)
        report = cached.last
    assert report.hit_tokens == 96 and report.blocks_queued == 0  # 105 tokens are 6 blocks
    assert 0 < report.selected.tokens_share <= 1
    assert output.shape[1] == prompt.shape[1] + 6


def test_a_first_prompt_says_in_which_order_its_blocks_are_stored(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[tuple[Any, ...]]()
    monkeypatch.setattr(Learner, "note", lambda *arguments: noted.append(arguments[3:]))
    fill(tiny_model, tmp_path, prompt)
    with attached(tiny_model, tmp_path) as cached:
        cached.generate(prompt, **GREEDY)
    (importance, _), (_, bases) = noted
    for block, base in enumerate(bases):
        scores = np.stack([importance[layer][16 * block :][:16] for layer in range(3)])
        assert np.array_equal(base.orders, packing_orders(scores)) and not base.repacks


@pytest.mark.parametrize(
    ("stored", "loaded", "hit_tokens"),
    # With all tokens, off on blocks that are exact, and off on blocks that are taken for parts.
    [(None, 1.0, 96), (1.0, None, 96), (0.25, None, 0)],
)
def test_whole_loads_are_exact_and_parts_are_never_served_as_such(
    stored: float | None, loaded: float | None, hit_tokens: int, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    fill(tiny_model, tmp_path, prompt, stored)
    with attached(tiny_model, tmp_path, loaded) as cached:
        for hits in (hit_tokens, 96):
            assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
            assert (cached.last.hit_tokens, cached.last.selected) == (hits, None)
            assert cached.flush(10)


def test_uses_are_learnt_and_blocks_packed_anew_stay_exact(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    store = tmp_path
    with attached(tiny_model, store) as cached:
        cached._importance._is_reordered = False  # Tokens are stored as they come.
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10)
    with attached(tiny_model, store) as cached:
        for _ in range(REPACK_USES):
            cached._importance.ways, cached._importance.refusals = Ways(), Refusals()  # It knows no faster way yet.
            cached.generate(prompt, **GREEDY)
            cached.learned(20)
        assert cached._importance.learner.replaced
    with attached(tiny_model, store) as cached:
        for is_near in (False, True):
            cached._importance.ways.note(True, is_near, 1000, 2.0, cached._clock.monotonic_s())
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
        assert (cached.last.hit_tokens, cached.last.selected) == (96, None)


@pytest.mark.parametrize("importance", [0, 1.5, -1])
def test_importance_out_of_range_is_refused(tiny_model: Any, tmp_path: Path, importance: float) -> None:
    with pytest.raises(ValueError, match="importance"):
        attached(tiny_model, tmp_path, importance)


def test_importance_waits_for_a_profile(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    for hit_tokens in (0, 96):
        with attach(tiny_model, str(tmp_path), importance=0.25, block_tokens=16) as cached:
            output = cached.generate(prompt, **GREEDY)
            assert torch.equal(output, tiny_model.generate(prompt, **GREEDY))
            assert cached.last.hit_tokens == hit_tokens and cached.flush(30)
            assert cached.cache.stats().blocks_without_profile == (0 if hit_tokens else 6)


@pytest.mark.parametrize("tokens", [100, 97])
def test_a_refused_selection_gives_the_exact_answer(
    tokens: int, tiny_model: Any, prompt: torch.Tensor, store: Path
) -> None:
    """The guard refuses a prefix of 96 tokens, which is too short to tell; a last token alone is guarded too."""
    with attached(tiny_model, store) as cached:
        output = cached.generate(prompt[:, :tokens], **GREEDY)
    assert cached.last.selected.is_fallback
    assert torch.equal(output, tiny_model.generate(prompt[:, :tokens], **GREEDY))


def test_nothing_is_learnt_from_a_pass_that_ended_early(
    tiny_model: Any, prompt: torch.Tensor, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the layers behind would have attended to is not known."""
    monkeypatch.setattr(HeadsAgree, "trusts", lambda *_: False)
    noted = list[Any]()
    monkeypatch.setattr(Learner, "note", lambda *arguments: noted.append(len(arguments[3])))
    with attached(tiny_model, store, SparseSettings(0.25, guard=HeadsAgree())) as cached:
        cached.generate(prompt, **GREEDY)
    assert cached.last.selected.is_fallback and not noted


def test_a_refused_prefix_is_loaded_whole_the_next_time(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    with attached(tiny_model, store) as cached:
        for is_selected in (True, False):
            cached.generate(prompt, **GREEDY)
            assert cached.last.hit_tokens == 96 and (cached.last.selected is not None) is is_selected


@pytest.mark.parametrize(
    "steps", [{}, {"heads": None}, {"is_guarded": False}, {"is_reordered": False, "is_scored": False}]
)
def test_the_papers_way_by_steps(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, steps: dict[str, Any]) -> None:
    importance = Impress(0.25, **steps)
    for hit_tokens in (0, 96):
        with attach(tiny_model, str(tmp_path), block_tokens=16, importance=importance) as cached:
            cached.generate(prompt, **GREEDY)
            assert cached.flush(10) and cached.last.hit_tokens == hit_tokens
    assert cached.last.selected.is_fallback or 0.25 <= cached.last.selected.tokens_share <= 1


@pytest.mark.parametrize("is_guarded", [True, False])
def test_heads_that_disagree_load_the_whole(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadsAgree, "trusts", lambda *_: False)
    for _ in range(2):
        importance = Impress(0.25, is_guarded=is_guarded)
        with attach(tiny_model, str(tmp_path), block_tokens=16, importance=importance) as cached:
            output = cached.generate(prompt, **GREEDY)
            assert cached.flush(10)
    assert cached.last.selected.is_fallback is is_guarded
    assert torch.equal(output, tiny_model.generate(prompt, **GREEDY)) or not is_guarded
