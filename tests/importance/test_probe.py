"""Probes: who matters."""

import numpy as np
import pytest

from kvtide.importance import AllHeads, FirstHeads, ProbeQuestion, top_tokens
from kvtide_lab.judge.selectors import GroupHeads, KnownScores, Random, Recency

PREFIX = 64


def an_ask(seed: int = 0, sharp: float = 1.0) -> ProbeQuestion:
    """Four heads over two KV heads; key 7 is what every query looks for."""
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(4, 3, 8)).astype(np.float32)
    keys = rng.normal(size=(2, PREFIX, 8)).astype(np.float32)
    queries[..., 0], keys[:, 7, 0] = sharp * 4, sharp * 4
    return ProbeQuestion(0, queries, keys, rng.normal(size=(2, 3, 8)).astype(np.float32), 8**-0.5)


def test_importance_is_attention_mass() -> None:
    ask = an_ask()
    found = AllHeads().importance(ask)
    head, group = 3, 1
    keys = np.concatenate([ask.keys[group], ask.suffix_keys[group]])
    logits = ask.queries[head] @ keys.T * ask.scaling
    logits[:, PREFIX:][np.triu_indices(3, 1)] = -np.inf
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(found[head], PREFIX * weights[:, :PREFIX].mean(axis=0), rtol=1e-4)


@pytest.mark.parametrize("selector", [AllHeads(), FirstHeads(3), GroupHeads()])
def test_every_probe_finds_what_all_look_for(selector: AllHeads) -> None:
    assert (selector.importance(an_ask()).argmax(axis=1) == 7).all()


def test_group_heads_ask_every_kv_head_and_first_heads_may_not() -> None:
    assert GroupHeads().heads(9, 3) == [0, 3, 6]
    assert {head // 3 for head in FirstHeads(3).heads(9, 3)} == {0}


def test_baselines_look_at_no_key() -> None:
    ask = an_ask()
    assert Recency().importance(ask)[0].argmax() == PREFIX - 1
    assert np.array_equal(KnownScores(np.eye(1, PREFIX, 5, dtype=np.float32)).importance(ask)[0].nonzero()[0], [5])
    one, other = (Random(np.random.default_rng(1)).importance(ask) for _ in range(2))
    assert np.array_equal(one, other)


def test_arrays_that_do_not_fit_are_refused() -> None:
    ask = an_ask()
    for bad in (ask._replace(keys=ask.keys[..., :4]), ask._replace(queries=ask.queries[:3])):
        with pytest.raises(ValueError, match=r"heads over|do not fit"):
            AllHeads().importance(bad)
    with pytest.raises(ValueError, match="at least one"):
        FirstHeads(0)
    with pytest.raises(ValueError, match="of 3 tokens"):
        top_tokens(np.zeros(3, dtype=np.float32), 4)
