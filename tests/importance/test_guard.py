"""Probes and guards: who matters, and when a selection is not to be believed."""

import numpy as np
import pytest

from kvtide.importance import FirstHeads, Guard, HeadsAgree, NeighboursAgree
from kvtide_lab.judge.importance_judge import GroupHeads, KnownScores, Random, Recency

SHORT = 64


def test_group_heads_ask_every_kv_head_and_first_heads_may_not() -> None:
    assert GroupHeads().heads(9, 3) == [0, 3, 6]
    assert {head // 3 for head in FirstHeads(3).heads(9, 3)} == {0}


def test_baselines_look_at_no_key() -> None:
    assert Recency().importance(0, SHORT)[0].argmax() == SHORT - 1
    scores = KnownScores(np.eye(1, SHORT, 5, dtype=np.float32))
    assert np.array_equal(scores.importance(0, SHORT)[0].nonzero()[0], [5])
    one, other = (Random(np.random.default_rng(1)).importance(0, SHORT) for _ in range(2))
    assert np.array_equal(one, other)


def test_a_probe_of_no_head_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        FirstHeads(0)


PREFIX = 256
LENGTHS = [256, 1024, 4096, 8192]
KEPT = np.arange(4)


def passes(guard: Guard, importance: np.ndarray, count: int) -> bool:
    return guard.trusts([guard.score(importance, count, KEPT)], count / importance.shape[1])


def passages(tokens: int, seed: int) -> np.ndarray:
    """Return importance of three heads that comes in runs of about eight tokens, over a hundredfold range."""
    rng = np.random.default_rng(seed)
    runs = np.repeat(rng.normal(0, 1.5, 1 + tokens // 8), 8)[:tokens]
    return np.exp(runs + rng.normal(0, 0.7, (3, tokens))).astype(np.float32)


def test_heads_that_choose_by_chance_agree_at_the_stated_level() -> None:
    chance = np.random.default_rng(0).random((40, 1000), dtype=np.float32)
    assert HeadsAgree().score(chance, 200, KEPT) == pytest.approx(0.2 / (2 - 0.2), rel=0.02)


def test_heads_that_look_elsewhere_fail_the_papers_guard() -> None:
    alike = np.tile(np.linspace(0, 1, PREFIX, dtype=np.float32), (3, 1))
    assert passes(HeadsAgree(), alike, 64)
    apart = np.eye(3, dtype=np.float32).repeat(PREFIX // 3 + 1, axis=1)[:, :PREFIX]
    assert not passes(HeadsAgree(), apart, 64)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("ratio", [0.05, 0.25, 0.5])
def test_passages_pass_and_the_same_importance_shuffled_does_not(tokens: int, ratio: float) -> None:
    """What is captured is the same for both, and so is the agreement of heads: only the order tells them apart."""
    importance, count = passages(tokens, seed=tokens), int(ratio * tokens)
    shuffled = importance[:, np.random.default_rng(1).permutation(tokens)]
    assert passes(NeighboursAgree(), importance, count)
    assert not passes(NeighboursAgree(), shuffled, count)


def test_the_score_hardly_moves_with_length() -> None:
    scores = [NeighboursAgree().score(passages(tokens, seed=3), tokens // 4, KEPT) for tokens in LENGTHS[1:]]
    assert max(scores) - min(scores) < 0.06


def test_attention_to_everything_alike_fails_our_guard() -> None:
    """All heads agree exactly here, so that the paper's guard passes."""
    for slope in (0.0, 0.05):
        spread = np.tile(np.linspace(1, 1 + slope, PREFIX, dtype=np.float32), (3, 1))
        assert passes(HeadsAgree(), spread, 64) and not passes(NeighboursAgree(), spread, 64)


def test_near_tokens_that_get_more_for_being_near_are_no_passages() -> None:
    rng = np.random.default_rng(2)
    near = np.exp(np.linspace(0, 5, 1024) + rng.normal(0, 1, 1024))[None].astype(np.float32)
    assert NeighboursAgree().score(near, 256, KEPT) < 0.06


def test_kept_tokens_do_not_count() -> None:
    importance = passages(1024, seed=5)
    drawn = importance.copy()
    drawn[:, KEPT] = 1e6
    assert NeighboursAgree().score(drawn, 256, KEPT) == NeighboursAgree().score(importance, 256, KEPT)


def test_the_first_half_of_the_layers_is_not_asked() -> None:
    assert NeighboursAgree().trusts([0.0, 0.0, 0.0, 0.3, 0.3], 0.25)
    assert not NeighboursAgree().trusts([0.3, 0.3, 0.0, 0.0, 0.3], 0.25)
    assert not HeadsAgree().trusts([0.0, 0.0, 0.0, 0.9, 0.9], 0.25)


@pytest.mark.parametrize("values", [np.nan, 0.0, 1e30])
def test_importance_that_says_nothing_is_refused(values: float) -> None:
    assert NeighboursAgree().score(np.full((3, PREFIX), values, dtype=np.float32), 16, KEPT) == 0.0


@pytest.mark.parametrize("tokens", [1, 4, 20, 131])
def test_a_prefix_too_short_to_tell_is_refused(tokens: int) -> None:
    """A hundred and twenty-eight tokens beside the kept ones are enough."""
    importance = passages(132, seed=0)[:, :tokens]
    assert NeighboursAgree().score(importance, 1, np.arange(min(4, tokens))) == 0.0
    assert NeighboursAgree().score(passages(132, seed=0), 1, KEPT) > 0
