"""`attach(importance=…)`: a prefix loaded in part, what is learnt from it, and nothing of it when off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.codec.tide_profiles import fitted_on

from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide.engines.transformers.generation import RestoreWay, Ways

# As the fixture's.
PROMPT = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def attached(model: Any, store: Path, importance: float | None = 0.25) -> CachedModel:
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


def test_with_all_tokens_the_answer_is_exact(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    fill(tiny_model, tmp_path, prompt, None)
    with attached(tiny_model, tmp_path, 1.0) as cached:
        for _ in range(4):
            assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
            assert (cached.last.hit_tokens, cached.last.selected) == (96, None)


def test_off_it_is_the_exact_path(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    fill(tiny_model, tmp_path, prompt, 1.0)
    with attached(tiny_model, tmp_path, None) as cached:
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
        assert (cached.last.hit_tokens, cached.last.selected) == (96, None)


def test_blocks_of_a_part_are_never_served_as_exact(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    with attached(tiny_model, store, None) as cached:
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
        assert cached.last.hit_tokens == 0


def test_uses_are_learnt_and_blocks_packed_anew_stay_exact(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    with attached(tiny_model, store) as cached:
        for _ in range(4):
            cached._ways = Ways()  # It knows no faster way yet.
            cached.generate(prompt, **GREEDY)
            assert cached._importance is not None
            learner = cached._importance[1]
            learner.flush(20)
        assert learner.replaced
    with attached(tiny_model, store) as cached:
        for is_near in (False, True):
            cached._ways.note(RestoreWay.PART, is_near, 1000, 2.0, cached._clock.monotonic_s())
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
        assert (cached.last.hit_tokens, cached.last.selected) == (96, None)


@pytest.mark.parametrize("importance", [0, 1.5, -1])
def test_importance_out_of_range_is_refused(tiny_model: Any, tmp_path: Path, importance: float) -> None:
    with pytest.raises(ValueError, match="importance"):
        attached(tiny_model, tmp_path, importance)


def test_importance_needs_a_profile(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile"):
        attach(tiny_model, str(tmp_path), importance=0.25)


def test_a_refused_selection_gives_the_exact_answer(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    """The guard refuses a prefix of 96 tokens, which is too short to tell."""
    with attached(tiny_model, store) as cached:
        output = cached.generate(prompt, **GREEDY)
    assert cached.last.selected.is_fallback
    assert torch.equal(output, tiny_model.generate(prompt, **GREEDY))
