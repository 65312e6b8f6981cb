"""Caches whose pages kvtide keeps as they are, in the real engine: fp8, latents, and what AMX packs."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.families import EXACT, LOSSY, TIDE, checkpoint, draft_checkpoint, families
from tests.stores import flip_bytes
from tests.vllm.conftest import PAGE_TOKENS

from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide_lab.bench.engine_process import kvtide_transfer

pytestmark = pytest.mark.timeout(900)

PROMPT = [3 + 7 * i % 1000 for i in range(700)]
RESTORED = (len(PROMPT) - 1) // PAGE_TOKENS * PAGE_TOKENS


class Case(NamedTuple):
    """A family, vLLM's options for it, and how many tokens of an answer are the same however a prefill is split."""

    family: str
    options: dict[str, Any]
    tokens: int


CASES = {
    "fp8 in a float32 model": Case("llama", {"dtype": "float32", "kv_cache_dtype": "fp8"}, 8),
    "bfloat16 by whatever this processor has": Case("llama", {"dtype": "bfloat16"}, 8),
    # Two latent prefills that are split otherwise round otherwise; the first tokens agree.
    "latents": Case("deepseek_v3", {"dtype": "bfloat16", "max_num_batched_tokens": RESTORED}, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_pages_come_back_as_they_were(answers_of: Any, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "kv_cache_dtype" in case.options and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 needs a processor with AVX-512")
    model = checkpoint(case.family, tmp_path / "model")
    transfer = kvtide_transfer(str(tmp_path / "store"), codec="lossless")
    ((cold,), (warm,)) = answers_of(model, [transfer] * 2, [PROMPT], case.tokens, **case.options)
    assert cold["ids"] == warm["ids"]
    # Pages that are no rows of tokens, as AMX packs them, have no tails.
    has_tail = case.options == {"dtype": "bfloat16"} and not torch.cpu._is_amx_tile_supported()
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, (len(PROMPT) - 1) // 16 * 16 if has_tail else RESTORED)


class Grouped(NamedTuple):
    """vLLM's options for a family, and the tokens that the prompt and its branch restore."""

    options: dict[str, Any]
    restored: tuple[int, int] = (RESTORED, 512)


_FLOAT32 = {"dtype": "float32"}
GROUPED = {
    "gemma2": Grouped(_FLOAT32),
    "gemma3": Grouped(_FLOAT32),
    # Pages of two shapes, for 256 tokens and for 128.
    "gemma4": Grouped(_FLOAT32, (512, 512)),
    "mistral": Grouped(_FLOAT32),
    "gpt_oss": Grouped(_FLOAT32),
    "llama4": Grouped(_FLOAT32),
    # States: vLLM's scan on processors returns the last one of a step alone, and a step must be one block.
    "granite4": Grouped({**_FLOAT32, "max_num_batched_tokens": 256}, (512, 512)),
    "nemotron_h": Grouped({**_FLOAT32, "max_num_batched_tokens": 128}),
    "falcon_h1": Grouped({**_FLOAT32, "max_num_batched_tokens": 128}),
    # Gated delta: no float32 on processors.
    "qwen3_next": Grouped({"dtype": "bfloat16"}),
}
# Starting an engine is what takes time: these two have all kinds of groups, and all the ways in which something may not
# come. By day the others come back where the device is an emulated one.
DAMAGED = {"gemma4", "granite4"}
BY_NIGHT = GROUPED.keys() - DAMAGED


def test_matrix_of_support_is_what_is_tested_here() -> None:
    assert {*GROUPED, *(case.family for case in CASES.values())} == set(families("connector", EXACT, TIDE, LOSSY))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.nightly] * (each in BY_NIGHT)) for each in GROUPED]
)
def test_all_groups_come_back_as_far_as_they_reach(answers_of: Any, family: str, tmp_path: Path) -> None:
    model, store, case = checkpoint(family, tmp_path / "model"), tmp_path / "store", GROUPED[family]
    transfer, prompts = kvtide_transfer(str(store), codec="lossless"), [PROMPT, [*PROMPT[:600], *PROMPT[:40]]]
    answers = answers_of(model, [None, transfer, transfer], prompts, 8, **case.options)
    assert tuple(each["cached_tokens"] for each in answers[2]) == case.restored
    if family in DAMAGED:
        # vLLM can't be told of single pages here: the request is computed again, and no other fails.
        assert flip_bytes(store) > 0
        answers += answers_of(model, [transfer], prompts, 8, **case.options)
        assert answers[3][0]["cached_tokens"] < case.restored[0]
    for which in (0, 1):
        assert len({tuple(each[which]["ids"]) for each in answers}) == 1
        assert {each[which]["finish"] for each in answers} == {"length"}


# Each family as it is asked above, and fp8.
EMULATED = {name: (name, case.options) for name, case in GROUPED.items()}
EMULATED |= {name: (case.family, case.options) for name, case in CASES.items()}


@pytest.mark.parametrize("name", EMULATED)
def test_each_cache_comes_back_where_the_device_is_an_emulated_one(tiny_engine: Any, name: str, tmp_path: Path) -> None:
    family, options = EMULATED[name]
    if "kv_cache_dtype" in options and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 needs a processor with AVX-512")
    transfer = kvtide_transfer(str(tmp_path / "store"), codec="lossless")
    transfer |= {"kv_connector": "EmulatedGpuConnector", "kv_connector_module_path": "kvtide_lab.vllm.emulated_gpu"}
    model = checkpoint(family, tmp_path / "model")
    answers = []
    # An engine that has measured how fast it computes may find that these few tokens are not worth loading.
    for _ in range(2):
        with tiny_engine(model, transfer, **options, disable_log_stats=False) as process:
            answers.append(process.ask(PROMPT, 4))
            assert process.do("settle")["is_done"]
            metrics = process.do("check")["stats"]["metrics"]
    computed, loaded = answers
    assert (computed["cached_tokens"], loaded["cached_tokens"]) == (0, GROUPED.get(name, Grouped({})).restored[0])
    assert loaded["ids"] == computed["ids"]
    assert metrics["vllm:kvtide_proofs"] == 1
    assert metrics["vllm:kvtide_proof_seconds"] > 0


def test_draft_s_layers_come_back_beside_the_model_s(answers_of: Any, tmp_path: Path) -> None:
    model, draft = checkpoint("llama", tmp_path / "model"), draft_checkpoint(tmp_path / "draft")
    drafted = {"speculative_config": {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}}
    transfer = kvtide_transfer(str(tmp_path / "store"), codec="lossless")
    ((plain,),) = answers_of(model, [None], [PROMPT], 16, **_FLOAT32)
    ((cold,), (warm,)) = answers_of(model, [transfer] * 2, [PROMPT], 16, **_FLOAT32, **drafted)
    assert cold["ids"] == warm["ids"] == plain["ids"]
    # The draft's row of a block's last token goes by the token after it, so that the last block is left alone.
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, RESTORED - PAGE_TOKENS)


def test_windows_of_a_real_model_come_back_exactly(gemma: Any, answers_of: Any, tmp_path: Path) -> None:
    ids = gemma.tokenize(evaluation_texts()[1].content[:8000])
    # Within the window, across it, and another end behind a shared beginning. What is left to compute is too short to
    # be timed, so that no load is given up for being slower, on however busy a machine.
    prompts = [ids[:440], ids[:700], [*ids[:650], *ids[1500:1550]]]
    kept = kvtide_transfer(str(tmp_path / "store"), codec="lossless", load_s_max=100)
    plain, stored, restored = answers_of(gemma.folder, (None, kept, kept), prompts, 12, enable_prefix_caching=False)
    assert [each["ids"] for each in stored] == [each["ids"] for each in plain]
    assert [each["ids"] for each in restored] == [each["ids"] for each in plain]
    assert [each["cached_tokens"] for each in restored] == [384, 640, 640]
