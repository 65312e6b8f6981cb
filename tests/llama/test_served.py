"""Whose blocks are whose, and models that are refused with the reason."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from tests.llama.conftest import ask, ask_fresh
from tests.llama.tiny import write_adapter, write_mamba
from tests.servers import server_process

from kvtide.cli.profile import check_lossy
from kvtide.engines.llamacpp import attach
from kvtide.errors import UnsupportedModel


def hits(
    opened: Any, store: Path | str, prompt: list[int], model: Any = "llama", salt: bytes = b"", **options: Any
) -> int:
    """Ask once; return how many tokens were stored before."""
    with opened(model, **options) as llm, attach(llm, store, tenant_salt=salt) as cached:
        found = int(cached.hit_tokens(prompt))
        ask(llm, prompt, 1)
        assert cached.flush(60)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"n_batch": 256},
        {"flash_attn": True},
        {"rope_freq_base": 20000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN},
        {"yarn_ext_factor": 0.5},
        {"yarn_attn_factor": 0.5},
        {"yarn_beta_fast": 16.0},
        {"yarn_beta_slow": 2.0},
        {"yarn_orig_ctx": 512},
        {"type_k": 0},
        {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        {"salt": b"another"},
    ],
    ids=lambda each: next(iter(each)),
)
def test_what_changes_the_rows_changes_their_names(
    opened: Any, tokens: list[int], tmp_path: Path, change: dict[str, Any]
) -> None:
    assert [hits(opened, tmp_path, tokens[:400]) for _ in range(2)] == [0, 384]
    assert hits(opened, tmp_path, tokens[:400], **change) == 0
    assert hits(opened, tmp_path, tokens[:400], n_ctx=1024, seed=3) == 384


def test_adapters_and_their_scales_have_rows_of_their_own(opened: Any, tokens: list[int], tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))
    for change in ({}, {"lora_path": first}, {"lora_path": first, "lora_scale": 0.5}, {"lora_path": second}):
        options: dict[str, Any] = {name: str(each) if name == "lora_path" else each for name, each in change.items()}
        plain = ask_fresh(opened, tokens[:400], **options)
        assert [hits(opened, tmp_path / "store", tokens[:400], **options) for _ in range(2)] == [0, 384]
        with opened(**options) as llm, attach(llm, tmp_path / "store"):
            assert ask(llm, tokens[:400]).is_same(plain)
    moved = str(first.rename(tmp_path / "renamed.gguf"))
    assert hits(opened, tmp_path / "store", tokens[:400], lora_path=moved) == 384


def test_size_of_a_context_is_in_the_names_where_a_model_stretches_positions(
    opened: Any, models: Callable[..., Path], tokens: list[int], tmp_path: Path
) -> None:
    model = models(stretch=4.0)
    assert [hits(opened, tmp_path, tokens[:400], model) for _ in range(2)] == [0, 384]
    assert hits(opened, tmp_path, tokens[:400], model, n_ctx=1024) == 0


def test_models_of_equal_shape_are_told_apart_by_their_weights_and_not_by_their_path(
    opened: Any, models: Callable[..., Path], tokens: list[int], tmp_path: Path
) -> None:
    model, store = tmp_path / "model.gguf", tmp_path / "store"
    shutil.copy(models(), model)
    assert hits(opened, store, tokens[:400], model) == 0
    model.rename(tmp_path / "renamed.gguf")
    assert hits(opened, store, tokens[:400], tmp_path / "renamed.gguf") == 384
    shutil.copy(models(seed=1), model)
    assert hits(opened, store, tokens[:400], model) == 0


def test_file_that_was_replaced_under_a_loaded_model_is_refused(
    opened: Any, models: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(models(), model)
    with opened(model) as llm:
        shutil.copy(models(seed=1), tmp_path / "new")
        (tmp_path / "new").rename(model)
        with pytest.raises(UnsupportedModel, match="was replaced after the model was loaded"):
            attach(llm, tmp_path / "store")


def test_models_that_keep_states_are_refused_with_the_reason(opened: Any, tmp_path: Path) -> None:
    with opened(write_mamba(tmp_path / "mamba.gguf")) as llm:
        with pytest.raises(UnsupportedModel, match="layers that keep a state"):
            attach(llm, tmp_path / "store")
        assert ask(llm, [5, 6, 7]).ids
    # `kvtide calibrate` says so before it fits a profile for hours.
    with pytest.raises(UnsupportedModel, match="layers that keep a state"):
        check_lossy(tmp_path / "mamba.gguf")


@pytest.mark.parametrize(
    ("option", "reason"), [("embedding", "is for embeddings"), ("logits_all", "which are never stored")]
)
def test_contexts_of_other_uses_are_refused_with_reason(opened: Any, tmp_path: Path, option: str, reason: str) -> None:
    with opened(**{option: True}) as llm, pytest.raises(UnsupportedModel, match=reason):
        attach(llm, tmp_path / "store")


def test_machines_share_prompts_over_a_server(opened: Any, tokens: list[int]) -> None:
    with server_process("--tier", "memory://") as server:
        assert [hits(opened, server.url, tokens[:400]) for _ in range(2)] == [0, 384]
