"""Several sequences in one call: answers are the plain model's, and each row restores its own prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.engines.transformers.groups import RestoredRoom

BLOCK, PAD = 16, 0
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}


def rows_of(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return rows as one call takes them, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.full((width - len(row),), PAD), row]) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def text(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 90, (tokens,), generator=torch.Generator().manual_seed(seed))


def said(model: Any, store: Path, batch: dict[str, torch.Tensor], **arguments: Any) -> CachedModel:
    """Answer as a new process would, and hold the answer and its logits to the plain model's."""
    wanted = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, **arguments}
    with attach(model, store, block_tokens=BLOCK) as cached:
        output, plain = cached.generate(**batch, **wanted), model.generate(**batch, **wanted)
        assert cached.flush(10)
        cached.cache.check()
    assert torch.equal(output.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), rtol=0, atol=1e-4)
    return cached


def hit(cached: CachedModel) -> int:
    assert cached.last is not None and cached.last.bypass is None
    return cached.last.hit_tokens


SHARED = text(70, 0)
ROWS = (torch.cat([SHARED, text(10, 1)]), torch.cat([SHARED, text(3, 2)]), text(60, 3))


def test_rows_of_one_length_restore_what_all_have(tiny_model: Any, tmp_path: Path) -> None:
    batch = rows_of(ROWS[0], torch.cat([SHARED, text(10, 4)]))
    assert hit(said(tiny_model, tmp_path, batch)) == 0
    # Five blocks of the prompts are stored, the last token runs: 79 columns, of which 64 are whole blocks.
    assert hit(said(tiny_model, tmp_path, batch)) == 2 * 64


def test_padded_rows_restore_up_to_the_column_that_all_reach(tiny_model: Any, tmp_path: Path) -> None:
    batch = rows_of(*ROWS)
    assert hit(said(tiny_model, tmp_path, batch)) == 0
    # Pads 0, 7 and 20; stored 64, 64 and 48: columns 64, 71 and 68, so 64 of all.
    assert hit(said(tiny_model, tmp_path, batch)) == 64 + 57 + 44


def test_batch_and_single_calls_share_their_blocks(tiny_model: Any, tmp_path: Path) -> None:
    said(tiny_model, tmp_path, rows_of(*ROWS))
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        for row, blocks in zip(ROWS, (4, 4, 3), strict=True):
            assert cached.hit_tokens(row[None]) == blocks * BLOCK
            output = cached.generate(row[None], **GREEDY)
            assert torch.equal(output, tiny_model.generate(row[None], **GREEDY))
        assert cached.flush(10)
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0], ROWS[2]))) == 64 + 44


def test_one_padded_row_restores_too(tiny_model: Any, tmp_path: Path) -> None:
    said(tiny_model, tmp_path, rows_of(ROWS[0]))
    batch = {"input_ids": torch.cat([torch.full((5,), PAD), ROWS[0]])[None]}
    # Without a mask transformers takes the padding for what it is.
    assert hit(said(tiny_model, tmp_path, batch)) == 64
    batch["attention_mask"] = (torch.arange(85) >= 5).long()[None]
    assert hit(said(tiny_model, tmp_path, batch)) == 64


def test_padding_is_nothing_whatever_was_in_memory(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", lambda shape, dtype: np.full(shape, np.iinfo(dtype).max, dtype))
        room = RestoredRoom(model_layout(tiny_model, BLOCK), BLOCK, pads=[5])
    past = DynamicCache(config=tiny_model.config)
    room.fill(past, BLOCK, tiny_model.device)
    assert all(not tensor[:, :, :5].any() for layer in past.layers for tensor in (layer.keys, layer.values))


def test_row_without_a_stored_prefix_leaves_the_others_their_padding_alone(tiny_model: Any, tmp_path: Path) -> None:
    said(tiny_model, tmp_path, rows_of(ROWS[0]))
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0], text(80, 9)))) == 0
    # The other row begins after 20 columns, which the first may have restored.
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0], text(60, 10)))) == 20


def test_answer_that_ends_early_is_stored_up_to_its_end(tiny_model: Any, tmp_path: Path) -> None:
    rows = (text(30, 5), text(30, 6))
    plain = tiny_model.generate(**rows_of(*rows), **{**GREEDY, "max_new_tokens": 24})
    eos = int(plain[0, 32])
    cached = said(tiny_model, tmp_path, rows_of(*rows), max_new_tokens=24, eos_token_id=eos)
    assert cached.last is not None
    lengths = [[*plain[row, 30:53].tolist(), eos].index(eos) + 30 for row in (0, 1)]
    assert cached.last.blocks_queued == sum(length // BLOCK for length in lengths)


def test_damaged_rows_are_computed(tiny_model: Any, tmp_path: Path) -> None:
    batch = rows_of(*ROWS)
    said(tiny_model, tmp_path, batch)
    for segment in (tmp_path / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        for offset in range(9_000, len(data), 1 << 14):
            data[offset] ^= 0x55
        segment.write_bytes(bytes(data))
    assert hit(said(tiny_model, tmp_path, batch)) < 64 + 57 + 44


@pytest.mark.parametrize("padding", ["right", "a hole"])
def test_other_masks_run_without_the_cache(tiny_model: Any, padding: str, tmp_path: Path) -> None:
    batch = rows_of(*ROWS)
    batch["attention_mask"][1] = 1
    batch["attention_mask"][1, -3 if padding == "right" else 40] = 0
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        output = cached.generate(**batch, **GREEDY)
        assert cached.last is not None and cached.last.bypass == "the attention mask hides tokens"
    assert torch.equal(output, tiny_model.generate(**batch, **GREEDY))


def test_static_cache_is_filled_as_it_is_made(tiny_model: Any, tmp_path: Path) -> None:
    for batch, expected in ((rows_of(ROWS[0]), 64), (rows_of(*ROWS), 64 + 57 + 44)):
        said(tiny_model, tmp_path, batch, cache_implementation="static")
        cached = said(tiny_model, tmp_path, batch, cache_implementation="static")
        assert hit(cached) == expected
    # What a static cache has left is a prefix for any other.
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0]))) == 64
