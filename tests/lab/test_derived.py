"""Models made from SmolLM2's weights: another cache, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtide.engines.transformers import converted_folder, load_model, load_tokenizer
from kvtide_lab.judge.derived import DERIVED, derived_model

TEXT = "The cache keeps keys and values of a prefix, so that nobody computes them again. " * 3


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, list[int]]:
    folder = converted_folder()
    return load_model(folder), load_tokenizer(folder)(TEXT).input_ids


def said_and_kept(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), past_key_values=past, use_cache=True).logits[0]
    return logits, past.layers[3].keys


@pytest.mark.parametrize("kind", DERIVED)
def test_derived_model_says_the_same_of_another_cache(kind: str, smollm: tuple[Any, list[int]]) -> None:
    model, ids = smollm
    logits, keys = said_and_kept(model, ids)
    others, made = said_and_kept(derived_model(kind, model, ids), ids)
    # Of numbers up to 40, in float32.
    assert float((others - logits).abs().max()) < 1e-3
    assert made.shape != keys.shape or float((made - keys).abs().max()) > 1
    assert kind != "biased" or float(made.abs().max()) > 20 * float(keys.abs().max())
