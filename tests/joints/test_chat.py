"""A chat on the real model with defaults and without a pause: every full block of the turns before is hit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.engines.transformers import attach
from kvtide.engines.transformers.cached import BLOCK_TOKENS
from kvtide.engines.transformers.smollm2 import converted_folder, load_model

pytestmark = pytest.mark.real_model

TURNS = 6
SAID_TOKENS, ANSWER_TOKENS = 150, 8


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(converted_folder())


def turn(cached: Any, talk: torch.Tensor, seed: int) -> torch.Tensor:
    """Say something and hear the answer; return the talk so far."""
    said = torch.randint(100, 40000, (1, SAID_TOKENS), generator=torch.Generator().manual_seed(seed))
    found: torch.Tensor = cached.generate(
        torch.cat([talk, said], dim=1), max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return found


@pytest.mark.timeout(900)
def test_every_turn_hits_all_that_came_before(model: Any, tmp_path: Path) -> None:
    talk = torch.empty((1, 0), dtype=torch.long)
    store = f"disk://{tmp_path}/store"
    with attach(model, store) as cached:
        for number in range(TURNS - 1):
            # An answer's last token has not been run.
            full = max(0, talk.shape[1] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            talk = turn(cached, talk, number)
            assert cached.last is not None and cached.last.hit_tokens == full
    with attach(model, store) as cached:
        full = (talk.shape[1] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        turn(cached, talk, TURNS)
        assert cached.last is not None and cached.last.hit_tokens == full == 768
