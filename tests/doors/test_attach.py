"""Doors of `attach`: each option shows in tokens, bytes or answers on a tiny Llama."""

import copy
import logging
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import torch
from tests.codec.tide_profiles import fitted_on
from tests.doors.register import door
from tests.doors.user import BLOCK, PROMPT, RESTORED, answer

from kvtide.engines import installed_profiles
from kvtide.engines.transformers import attach, converted_folder, load_model, load_tokenizer, model_layout

RAW_BYTES_MIN = RESTORED * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, values, float32


@pytest.fixture(scope="module")
def exact(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that another process has filled, losslessly."""
    store = tmp_path_factory.mktemp("exact")
    answer(tiny_model, store, PROMPT)
    return store


def read_bytes(model: Any, store: Path, codec: str, **options: Any) -> int:
    """Store and restore with a codec; return the bytes that were read."""
    answer(model, store, PROMPT, codec=codec, **options)
    warm = answer(model, store, PROMPT, codec=codec, **options)
    assert warm.hit_tokens == RESTORED
    return warm.read_bytes


@door("restore what was answered")
def test_the_next_turn_restores_the_answer_too(tiny_model: Any, tmp_path: Path) -> None:
    with attach(tiny_model, str(tmp_path), block_tokens=BLOCK) as cached:
        turn = cached.generate(PROMPT, max_new_tokens=20, min_new_tokens=20, do_sample=False)
        assert cached.flush(60)
    second = answer(tiny_model, tmp_path, turn)
    # 100 and 20 tokens, the last one not run: 119 // 16 * 16.
    assert second.hit_tokens == 112
    assert torch.equal(second.output, tiny_model.generate(turn, max_new_tokens=4, do_sample=False))


@door("one line a request in the log")
def test_log_says_of_each_call_whether_it_worked_and_what_was_gained(
    tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtide.engines.transformers")
    for _ in range(2):
        with attach(tiny_model, str(tmp_path), block_tokens=BLOCK) as cached:
            cached.cache.judge.note_prefill(0, 100, 1000.0)
            for beams in (1, 2):
                cached.generate(PROMPT, max_new_tokens=1, num_beams=beams)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
    assert lines[0] == "0 of 100 tokens restored; 6 blocks to be stored"
    gained = r"96 of 100 tokens restored from disk in 0.\d+ s, about 9\d\d.\d+ s saved; 0 blocks .*"
    assert re.fullmatch(gained, lines[2])
    assert lines[1] == lines[3] == "0 of 100 tokens restored: beam_search keeps a cache of its own shape"


@door("memory alone")
def test_memory_alone_restores_in_the_same_process(tiny_model: Any) -> None:
    with attach(tiny_model, "memory://", block_tokens=BLOCK) as cached:
        cached.generate(PROMPT, max_new_tokens=1)
        assert cached.flush(60) and cached.hit_tokens(PROMPT) == RESTORED
        assert cached.cache.stats().tiers[0].used_bytes > 0


def advised(model: Any, store: str, *hints: Any) -> tuple[int, int]:
    """Ask once with each hint; return how many were heard, and how many of them ignored."""
    with attach(model, store, block_tokens=BLOCK) as cached:
        answers = []
        for hint in (None, *hints):
            answers.append(cached.generate(PROMPT, max_new_tokens=1, kvtide_hint=hint))
            assert cached.flush(60)
        assert all(torch.equal(each, answers[0]) for each in answers)
        stats = cached.cache.stats()
        return stats.hints_heard, stats.hints_ignored


@door("advice of each request")
def test_advice_is_heard_where_a_policy_takes_it_and_fails_nothing(tiny_model: Any) -> None:
    hints = ({"session": "a1", "is_last": True}, {"retain_s": "soon"}, "nonsense", {"retain_s": 600, "priority": 1})
    assert advised(tiny_model, "memory://?policy=mix", *hints) == (4, 2)
    assert advised(tiny_model, "memory://?policy=lru", *hints) == (4, 4)


@door("lossless codec")
def test_lossless_is_smaller_and_exact(tiny_model: Any, exact: Path) -> None:
    warm = answer(tiny_model, exact, PROMPT, codec="lossless")
    assert RAW_BYTES_MIN / 2 < warm.read_bytes < 0.95 * RAW_BYTES_MIN
    assert warm.hit_tokens == RESTORED


@door("raw codec")
def test_raw_stores_bytes_as_they_are(tiny_model: Any, tmp_path: Path) -> None:
    assert RAW_BYTES_MIN <= read_bytes(tiny_model, tmp_path, "raw") < 1.2 * RAW_BYTES_MIN


@door("tide codec and its quality")
def test_tide_takes_the_loss_that_is_accepted(tiny_model: Any, tmp_path: Path) -> None:
    profile = fitted_on(tiny_model, model_layout(tiny_model, BLOCK), PROMPT)
    fine, rough = (read_bytes(tiny_model, tmp_path / q, f"tide:{q}", profiles=[profile]) for q in ("1e-3", "1e-1"))
    assert rough < fine < RAW_BYTES_MIN / 2


class Real(NamedTuple):
    """SmolLM2-135M, 270 tokens of text, and options of `attach`: profiles, short blocks, no hashing of all weights."""

    model: Any
    prompt: torch.Tensor
    options: dict[str, Any]


@pytest.fixture(scope="module")
def real() -> Real:
    folder = converted_folder()
    text = "\n".join(topics[name] for name in sorted(topics)[:12])
    prompt = load_tokenizer(folder)(text, return_tensors="pt").input_ids[:, :270]
    options = {"fingerprint": b"real", "block_tokens": 64, "profiles": installed_profiles()}
    return Real(load_model(folder), prompt, options)


@door("installed profiles of tide-light, tide-deep")
@pytest.mark.real_model
def test_the_real_model_has_profiles(real: Real, tmp_path: Path) -> None:
    shares = []
    for name in ("tide-light:5e-3", "tide-deep:5e-3"):
        with attach(real.model, str(tmp_path / name), codec=name, **real.options) as cached:
            cached.generate(real.prompt[:, :66], max_new_tokens=1)
            assert cached.flush(240)
            stats = cached.cache.stats()
        shares.append(stats.bytes_stored / stats.raw_bytes_stored)
    assert 1 / 8 > shares[0] > shares[1] > 0


@door("load what matters")
@pytest.mark.real_model
def test_importance_reads_less_than_the_whole(real: Real, tmp_path: Path) -> None:
    for is_warm in (False, True):
        with attach(real.model, str(tmp_path), importance=0.25, **real.options) as cached:
            cached.generate(real.prompt, max_new_tokens=2)
            assert cached.flush(60) and cached.last.hit_tokens == is_warm * 256
            selected = cached.last.selected
    assert not selected.is_fallback
    assert 0 < selected.tokens_share < 0.5 and selected.read_bytes < selected.whole_bytes


@door("CacheGen's codec and its levels")
@door("chunkwise codec")
@pytest.mark.parametrize(("codec", "levels"), [("cachegen", "14"), ("chunkwise", "13")])
def test_published_codecs_have_levels(codec: str, levels: str, tiny_model: Any, tmp_path: Path) -> None:
    fine, rough = (read_bytes(tiny_model, tmp_path / level, f"{codec}:{level}") for level in levels)
    assert rough < fine < RAW_BYTES_MIN


@door("groups of five tokens, bins by layer number")
def test_the_authors_snippet_is_a_codec(tiny_model: Any, tmp_path: Path) -> None:
    assert 0 < read_bytes(tiny_model, tmp_path / "snippet", "cachegen-snippet") < RAW_BYTES_MIN


@door("prefix coder")
def test_coder_of_the_published_codecs_is_chosen(tiny_model: Any, tmp_path: Path) -> None:
    rans, prefix = (read_bytes(tiny_model, tmp_path / coder, f"cachegen:2:{coder}") for coder in ("rans", "prefix"))
    assert rans != prefix and prefix < RAW_BYTES_MIN


@door("never coarser than asked")
@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        ("cachegen:4", "cachegen:1"),
        ("cachegen:4", "tide:5e-3"),
        ("tide:5e-2", "tide:5e-3"),
        ("chunkwise:3", "cachegen:2"),
    ],
)
def test_a_coarser_block_is_a_miss_and_is_replaced(coarse: str, fine: str, tiny_model: Any, tmp_path: Path) -> None:
    profiles = [fitted_on(tiny_model, model_layout(tiny_model, BLOCK), PROMPT)]
    codecs = (coarse, fine, fine, coarse, fine)
    hits = [answer(tiny_model, tmp_path, PROMPT, codec=codec, profiles=profiles).hit_tokens for codec in codecs]
    assert hits == [0, 0, RESTORED, RESTORED, RESTORED]


@door("lossy apart from exact")
def test_lossy_blocks_are_never_served_as_exact(tiny_model: Any, tmp_path: Path) -> None:
    answer(tiny_model, tmp_path, PROMPT, codec="cachegen:1")
    assert answer(tiny_model, tmp_path, PROMPT).hit_tokens == 0


@door("tenants by salt")
def test_another_salt_finds_nothing(tiny_model: Any, tmp_path: Path) -> None:
    hits = [answer(tiny_model, tmp_path, PROMPT, tenant_salt=salt).hit_tokens for salt in (b"a", b"b", b"a")]
    assert hits == [0, 0, RESTORED]


@door("fingerprint of one's own")
def test_models_of_one_name_share_blocks(tiny_model: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    hits = [answer(model, tmp_path, PROMPT, fingerprint=b"one").hit_tokens for model in (tiny_model, other)]
    assert hits == [0, RESTORED]
    assert answer(other, tmp_path, PROMPT).hit_tokens == 0


@door("say that weights changed")
def test_a_model_that_was_changed_unseen_finds_nothing_old(tiny_model: Any, exact: Path) -> None:
    with attach(copy.deepcopy(tiny_model), str(exact), block_tokens=BLOCK) as cached:
        assert cached.hit_tokens(PROMPT) == RESTORED
        cached.model.lm_head.weight.data[5, 5] += 1
        cached.weights_changed()
        assert cached.hit_tokens(PROMPT) == 0
