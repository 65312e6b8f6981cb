"""Probes: who is asked, and what those choose that look at no key."""

import numpy as np
import pytest

from kvtide.importance import FirstHeads, top_tokens
from kvtide_lab.judge.selectors import GroupHeads, KnownScores, Random, Recency

PREFIX = 64


def test_group_heads_ask_every_kv_head_and_first_heads_may_not() -> None:
    assert GroupHeads().heads(9, 3) == [0, 3, 6]
    assert {head // 3 for head in FirstHeads(3).heads(9, 3)} == {0}


def test_baselines_look_at_no_key() -> None:
    assert Recency().importance(0, PREFIX)[0].argmax() == PREFIX - 1
    scores = KnownScores(np.eye(1, PREFIX, 5, dtype=np.float32))
    assert np.array_equal(scores.importance(0, PREFIX)[0].nonzero()[0], [5])
    one, other = (Random(np.random.default_rng(1)).importance(0, PREFIX) for _ in range(2))
    assert np.array_equal(one, other)


def test_numbers_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        FirstHeads(0)
    with pytest.raises(ValueError, match="of 3 tokens"):
        top_tokens(np.zeros(3, dtype=np.float32), 4)
