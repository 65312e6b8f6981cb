"""Packing: orders, the chunks that a choice reads, and what packing would change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.importance import expected_gain, is_order, packing_orders, select_chunks


@given(st.integers(1, 4), st.integers(1, 70), st.integers(0, 5))
def test_an_order_has_every_token_once_the_most_important_first(layers: int, tokens: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, (layers, tokens)).astype(np.float32)
    orders = packing_orders(scores)
    assert is_order(orders)
    assert (np.diff(np.take_along_axis(scores, orders.astype(np.int64), axis=1), axis=1) <= 0).all()


@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 33), st.floats(0, 1), st.integers(0, 5))
def test_chunks_hold_what_was_asked_for_and_no_chunk_more(
    blocks: int, tokens: int, chunk: int, ratio: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(tokens) for _ in range(blocks)]).astype(np.uint16)
    count = int(ratio * blocks * tokens)
    chosen = select_chunks(rng.random((blocks, tokens), dtype=np.float32), orders, count, chunk)
    per_block = -(-tokens // chunk)
    sizes = [min(chunk, tokens - number % per_block * chunk) for number in chosen]
    assert sum(sizes) >= count and (not sizes or sum(sizes) - max(sizes) < count or count == 0)
    assert len(set(chosen)) == len(chosen)


def test_what_must_come_comes() -> None:
    importance = np.zeros((1, 64), dtype=np.float32)
    importance[0, [5, 40]] = np.inf
    identity = np.arange(64, dtype=np.uint16)[None]
    assert select_chunks(importance, identity, 1, 16).tolist() == [0, 2]


def test_packing_by_uses_brings_important_tokens_together() -> None:
    scores = np.zeros((2, 256), dtype=np.float32)
    scores[:, ::8] = 1
    identity = np.tile(np.arange(256, dtype=np.uint16), (2, 1))
    gain = expected_gain(scores, identity, 1 / 8, 32)
    assert (gain.now, gain.packed) == (1.0, 1 / 8)
    assert expected_gain(scores, packing_orders(scores), 1 / 8, 32).now == 1 / 8


def test_bad_scores_are_refused() -> None:
    for bad in (np.zeros(3), np.full((1, 3), np.nan)):
        with pytest.raises(ValueError, match="finite"):
            packing_orders(bad.astype(np.float32))
    with pytest.raises(ValueError, match="orders"):
        select_chunks(np.zeros((1, 3), dtype=np.float32), np.zeros((1, 4), dtype=np.uint16), 1, 2)
