"""Answers from restored rows, compared with those of a fresh model in every bit of every logit."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from tests.llama.conftest import Answer, ask, ask_fresh

from kvtide.engines.llamacpp import attach

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
LENGTHS = (100, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 640, 1025, 1300)


def cases() -> list[dict[str, Any]]:
    """Every model, attention and cache type, with batches and codecs in turn: each type of cache has both codecs."""
    batches = itertools.cycle([(64, 64), (96, 32), (128, 128), (256, 64), (100, 64), (512, 512), (2048, 256)])
    kinds = itertools.product((("llama", None), ("gemma3", None), ("gemma3", False)), (False, True), (F16, Q8_0))
    found: list[dict[str, Any]] = []
    for ((model, swa_full), flash, kind), (batch, ubatch) in zip(kinds, batches, strict=False):
        # Quantised values need flash attention.
        types = {"type_k": kind, "type_v": kind if flash else F16}
        found.append(
            {"model": model, "swa_full": swa_full, "flash_attn": flash, "n_batch": batch, "n_ubatch": ubatch, **types}
        )
    for kind in (F32, BF16):
        found.append({"model": "llama", "flash_attn": True, "n_batch": 128, "type_k": kind, "type_v": kind})
    codecs = itertools.cycle(["raw", "lossless", "lossless", "raw"])
    return [{"codec": codec, **each} for codec, each in zip(codecs, found, strict=False)]


@pytest.mark.parametrize("case", cases(), ids=lambda each: "-".join(map(str, each.values())))
def test_restored_answers_are_those_of_a_fresh_model(
    opened: Any, tokens: list[int], tmp_path: Path, case: dict[str, Any]
) -> None:
    options = dict(case)
    codec = options.pop("codec")
    lengths = [int(each) for each in np.random.default_rng(len(str(options))).choice(LENGTHS, 4, replace=False)]
    plain = {length: ask_fresh(opened, tokens[:length], **options) for length in lengths}
    for is_second in (False, True):
        with opened(**options) as llm, attach(llm, tmp_path, codec=codec) as cached:
            for length in lengths:
                # Behind an answer to something else, whose tokens are other ones.
                ask(llm, tokens[1000:1040], 2)
                stored = (length - 1) // cached.served.step * cached.served.step
                assert not is_second or cached.hit_tokens(tokens[:length]) == stored
                assert ask(llm, tokens[:length]).is_same(plain[length]), (length, cached.last)
            assert cached.flush(60)


def real_cases() -> list[tuple[int, list[int], dict[str, Any]]]:
    """Batches, lengths at and around the ends of blocks and batches, options: each attention and type of keys."""
    found = []
    for number, batch in enumerate((64, 128, 256, 512, 1024, 2048)):
        around = [end + step for end in sorted({64, 128, 256, 512} - {batch}) for step in (-1, 0, 1, 17)]
        lengths = [int(each) for each in np.random.default_rng(number).choice(around, 3, replace=False)]
        is_flash, kind = bool(number % 2), Q8_0 if number in (1, 2, 5) else F16
        options = {"n_batch": batch, "n_ubatch": batch, "flash_attn": is_flash, "type_k": kind}
        options["type_v"] = kind if is_flash else F16
        found.append((batch, [*lengths, batch + 1, 2 * batch if batch < 512 else batch + 40], options))
    return found


def ask_alone(llm: Any, prompt: list[int]) -> Answer:
    """Have a model answer in an empty context."""
    llm.reset()
    return ask(llm, prompt)


@pytest.mark.timeout(7200)
@pytest.mark.real_model
def test_real_models_say_the_same_token_for_token(opened: Any, tmp_path: Path, fault_factor: int) -> None:
    """By night sixty prompts: two models, six batches, five lengths, whose texts begin alike. By day two of them."""
    from kvtide_lab.bench.llama import packaged_model
    from kvtide_lab.subjects import gemma_file

    is_night, cases = fault_factor > 1, real_cases()
    models = [packaged_model(), gemma_file()] if is_night else [packaged_model()]
    if not is_night:
        cases = [(batch, lengths[1:3], more) for batch, lengths, more in cases[:1]]
    text, asked, restored = Path(llama_cpp.llama.__file__).read_bytes(), 0, 0
    for model, (batch, lengths, more) in itertools.product(models, cases):
        options, store = {"n_ctx": 2304, **more}, tmp_path / f"{asked}"
        with opened(model, **options) as llm:
            ids = llm.tokenize(text[20 * batch :][:20_000])
            plain = [ask_alone(llm, ids[:length]) for length in lengths]
        with opened(model, **options) as llm, attach(llm, store) as cached:
            ask(llm, ids[: max(lengths)], 1)
            assert cached.flush(60)
        with opened(model, **options) as llm, attach(llm, store) as cached:
            for length, expected in zip(lengths, plain, strict=True):
                assert ask_alone(llm, ids[:length]).is_same(expected), (model.name, more, length, cached.last)
                asked, restored = asked + 1, restored + (cached.last is not None and cached.last.hit_tokens > 0)
    assert asked == (60 if is_night else 2) and restored >= asked // 2


def test_chat_in_one_process_is_as_without_a_cache(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    said: list[list[list[int]]] = [[], []]
    caches: list[Any] = [nullcontext, lambda llm: attach(llm, tmp_path)]
    for ids, cache_of in zip(said, caches, strict=True):
        with opened() as llm, cache_of(llm):
            history: list[int] = []
            for turn in range(10):
                history += tokens[60 * turn : 60 * turn + 50]
                ids.append(ask(llm, history, 30).ids)
                history += ids[-1]
    assert said[0] == said[1]


def test_chat_goes_on_after_a_restart_with_what_its_context_had(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    history, restored = tokens[:300], []
    for turn in range(4):
        with opened() as llm, attach(llm, tmp_path, codec="raw") as cached:
            restored.append(cached.hit_tokens(history))
            history = history + ask(llm, history, 100).ids
            assert cached.flush(60)
        history = history + tokens[400 + 20 * turn : 420 + 20 * turn]
    # Turns leave 399, 519 and 639 tokens, since nobody has computed the last of an answer: 3 and 4 blocks of 128.
    assert restored == [0, 384, 512, 512]


def test_prompts_do_not_take_rows_that_a_conversation_left(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm, attach(llm, tmp_path) as cached:
        ask(llm, tokens[:50])
        ask(llm, tokens[:50] + tokens[500:900], 2)
        assert cached.flush(60)
        # It began behind 50 tokens of the context: batches end elsewhere.
        assert cached.hit_tokens(tokens[:50] + tokens[500:900]) == 0
    plain = ask_fresh(opened, tokens[:50] + tokens[500:900])
    with opened() as llm, attach(llm, tmp_path):
        assert ask(llm, tokens[:50] + tokens[500:900]).is_same(plain)


def test_prompt_that_shares_its_first_tokens_with_the_context_is_stored(
    opened: Any, tokens: list[int], tmp_path: Path
) -> None:
    prompt = tokens[:8] + tokens[500:900]
    with opened() as llm, attach(llm, tmp_path) as cached:
        ask(llm, tokens[:50])
        said = ask(llm, prompt, 2)
        assert cached.flush(60) and cached.hit_tokens(prompt) == 384
    assert ask_fresh(opened, prompt, 2).is_same(said)


def test_context_that_has_left_its_window_is_computed_again(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "gemma3", "swa_full": False, "n_batch": 64}
    plain = ask_fresh(opened, tokens[:200] + tokens[900:950], **options)
    for _ in range(2):
        # Computed, and then restored.
        with opened(**options) as llm, attach(llm, tmp_path) as cached:
            ask(llm, tokens[:800])
            assert cached.flush(60)
            assert ask(llm, tokens[:200] + tokens[900:950]).is_same(plain)


def test_context_that_was_cut_has_no_more_of_its_windows_than_before(
    opened: Any, tokens: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Cut to 640 tokens, it still lacks what had left the windows of 811.
    options: dict[str, Any] = {"model": "gemma3", "swa_full": False, "n_batch": 64}
    other = tokens[:512] + tokens[900:1900]
    plain = ask_fresh(opened, other, **options)
    with opened(**options) as llm, attach(llm, tmp_path) as cached:
        ask(llm, tokens[:800])
        ask(llm, tokens[:640] + tokens[900:901], 1)
        assert ask(llm, other).is_same(plain)
        assert cached.flush(60) and not caplog.records
    with opened(**options) as llm, attach(llm, tmp_path):
        assert ask(llm, other).is_same(plain)


def test_beginning_between_batches_leaves_no_window_without_rows(
    opened: Any, tokens: list[int], tmp_path: Path
) -> None:
    # Windows of 800 tokens have what token 610 looks at, and not what 576 does, at which a batch ends.
    options: dict[str, Any] = {"model": "gemma3", "swa_full": False, "n_batch": 64, "n_ctx": 3072}
    said, other = list[Answer](), tokens[:610] + tokens[800:] * 2
    caches: list[Any] = [nullcontext, lambda llm: attach(llm, tmp_path)]
    for cache_of in caches:
        with opened(**options) as llm, cache_of(llm):
            ask(llm, tokens[:800], 1)
            said.append(ask(llm, other[:1800]))
    assert said[0].is_same(said[1])


@pytest.mark.usefixtures("unhurried")
def test_state_of_a_restored_context_is_no_beginning_of_another(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    # As LlamaRAMCache saves and loads it: rows that have left the windows are not there.
    options: dict[str, Any] = {"model": "gemma3", "swa_full": False, "n_batch": 64}
    other = tokens[:100] + tokens[900:950]
    plain = ask_fresh(opened, other, **options)
    with opened(**options) as llm, attach(llm, tmp_path) as cached:
        said = ask(llm, tokens[:257])
        assert cached.flush(60)
    with opened(**options) as llm, attach(llm, tmp_path) as cached:
        ask(llm, tokens[:257], 1)
        assert cached.last is not None and cached.last.hit_tokens == 256
        state = llm.save_state()
        ask(llm, other)
        llm.load_state(state)
        assert ask(llm, other).is_same(plain)
        # Nor is the context itself once the cache is closed, while an answer under way ends in it.
        ids = [next(answer := llm.generate(tokens[:257], temp=0.0))]
        assert cached.last.hit_tokens == 256
        cached.close()
        assert [*ids, *itertools.islice(answer, 11)] == said.ids
        assert ask(llm, other).is_same(plain)


def test_full_and_forgetting_windows_share_nothing(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    # Rows of layers without windows once had one name: a sum goes by the order of the windows' cells.
    for swa_full in (True, False):
        options: dict[str, Any] = {"model": "gemma3", "swa_full": swa_full, "n_batch": 64}
        plain = ask_fresh(opened, tokens[:820], **options)
        for _ in range(2):
            with opened(**options) as llm, attach(llm, tmp_path) as cached:
                assert ask(llm, tokens[:820]).is_same(plain)
                assert cached.flush(60)


def test_answer_that_was_given_up_looks_at_no_context_that_is_another_s_or_gone(
    opened: Any, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, reads = llama_cpp.llama_state_get_data, list[int]()
    monkeypatch.setattr(llama_cpp, "llama_state_get_data", lambda *each: reads.append(1) or plain(*each))
    with opened() as llm, attach(llm, tmp_path):
        first, second = llm.generate(tokens[:300], temp=0.0), llm.generate(tokens[500:800], temp=0.0)
        next(first)
        ask(llm, tokens[900:1300])
        seen = len(reads)
        first.close()
        assert len(reads) == seen
        next(second)
    # The model is closed.
    second.close()
    assert len(reads) == seen


def test_model_is_as_before_after_the_cache_closed(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    with opened() as llm:
        with attach(llm, tmp_path) as cached:
            ask(llm, tokens[:200])
        assert not {"generate", "eval", "load_state"} & set(vars(llm))
        assert isinstance(llm, llama_cpp.Llama) and ask(llm, tokens[:200]).ids
        with cached:
            assert llm.n_tokens == cached._exact == 0
