"""Answers of an attached model: the plain model's, whatever was restored, of one sequence or several."""

import copy
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from tests.doors.user import PROMPT
from tests.families import model_of_family
from tests.server.worlds import invalidate, region_processes
from tests.servers import ServerProcess, counted, running_server
from tests.stores import flip_bytes
from transformers import DynamicCache, GenerationConfig, cache_utils

from kvtide.config import Limits
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.engines.transformers.groups import RestoredRoom
from kvtide.errors import UnsupportedModel
from kvtide.tier.stack import TierStack

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def answer(model: Any, store: Path | str, prompt: torch.Tensor, **arguments: Any) -> tuple[Any, CachedModel]:
    """Answer in a cache of its own, as a new process would."""
    with attach(model, str(store), block_tokens=16) as cached:
        output = cached.generate(prompt, **{**GREEDY, **arguments})
        assert cached.cache.flush(60)
    return output, cached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restored_answer_is_that_of_the_plain_model(dtype: torch.dtype, tiny_model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model).to(dtype)
    (cold, first), (warm, second) = (answer(model, tmp_path, PROMPT, return_dict_in_generate=True) for _ in range(2))
    assert (first.last.hit_tokens, second.last.hit_tokens) == (0, 96)
    assert torch.equal(cold.sequences, warm.sequences)
    if dtype is torch.float32:
        assert torch.equal(warm.sequences, model.generate(PROMPT, **GREEDY))
    for one, other in zip(cold.past_key_values.layers, warm.past_key_values.layers, strict=True):
        assert torch.equal(one.keys[:, :, :96], other.keys[:, :, :96])
        assert torch.equal(one.values[:, :, :96], other.values[:, :, :96])


# A shared prefix; whole blocks, whose last token runs; less than a block.
@pytest.mark.parametrize(("stored", "asked", "hit_tokens"), [(50, 100, 48), (96, 96, 80), (3, 3, 0)])
def test_whole_blocks_before_the_last_token_are_restored(
    stored: int, asked: int, hit_tokens: int, tiny_model: Any, tmp_path: Path
) -> None:
    answer(tiny_model, tmp_path, PROMPT[:, :stored])
    output, cached = answer(tiny_model, tmp_path, PROMPT[:, :asked])
    assert cached.last.hit_tokens == hit_tokens
    assert hit_tokens or cached.last.blocks_queued == 0
    assert torch.equal(output, tiny_model.generate(PROMPT[:, :asked], **GREEDY))


@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (5,)])
def test_empty_or_flat_prompt_is_a_value_error(shape: tuple[int, ...], tiny_model: Any, tmp_path: Path) -> None:
    cached = attach(tiny_model, str(tmp_path), block_tokens=16)
    with pytest.raises(ValueError, match="at least one token"):
        cached.generate(torch.zeros(shape, dtype=torch.long))


def test_looking_up_and_restoring_follow_the_model_as_generate_does(tiny_model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    with attach(model, str(tmp_path), block_tokens=16) as cached:
        cached.generate(PROMPT, **GREEDY)
        hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1)
        assert (cached.hit_tokens(PROMPT), cached.restored(PROMPT).get_seq_length()) == (0, 0)
        hook.remove()
        assert cached.restored(PROMPT).get_seq_length() == cached.hit_tokens(PROMPT) == 96
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert (cached.restored(PROMPT).get_seq_length(), cached.hit_tokens(PROMPT)) == (0, 0)
        assert torch.equal(cached.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"do_sample": True, "num_return_sequences": 2},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4, pad_token_id=0)},
    ],
)
def test_what_it_cannot_help_with_runs_without_it(arguments: dict[str, Any], tiny_model: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    output, cached = answer(tiny_model, tmp_path, PROMPT, **arguments)
    torch.manual_seed(0)
    assert torch.equal(output, tiny_model.generate(PROMPT, **{**GREEDY, **arguments}))
    assert cached.last is not None and cached.last.bypass
    assert cached.last.blocks_queued == 0


def test_sampling_with_a_seed_gives_the_same_answer_warm(tiny_model: Any, tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(answer(tiny_model, tmp_path, PROMPT, do_sample=True, top_k=0)[0])
    assert torch.equal(outputs[0], outputs[1])


def test_streamer_and_stopping_criteria_of_the_caller_are_kept(tiny_model: Any, tmp_path: Path) -> None:
    seen = list[torch.Tensor]()
    streamer = SimpleNamespace(put=seen.append, end=lambda: None)
    # A tokenizer is for stop strings.
    stops = [lambda ids, scores: ids.shape[1] >= 104]
    given = {"streamer": streamer, "stopping_criteria": stops, "tokenizer": object()}
    output, cached = answer(tiny_model, tmp_path, PROMPT, **given)
    assert (output.shape[1], cached.last.bypass) == (104, None)
    assert len(seen) == 5


def test_unsupported_model_or_bad_settings_are_refused_before_any_work(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="eval"):
        attach(copy.deepcopy(tiny_model).train(), str(tmp_path))
    with pytest.raises(UnsupportedModel, match="meta"):
        attach(cpu_offload(copy.deepcopy(tiny_model), "cpu"), str(tmp_path))
    bad: list[dict[str, Any]] = [{"codec": "zip"}, {"block_tokens": 0}, {"store": ""}]
    for settings, message in zip(bad, ("unknown codec", "tokens", "store"), strict=True):
        with pytest.raises(ValueError, match=message):
            attach(tiny_model, **{"store": str(tmp_path), **settings})
    assert list(tmp_path.iterdir()) == []


def test_failing_cache_never_fails_the_answer(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model.generate(PROMPT, **GREEDY)
    answer(tiny_model, tmp_path, PROMPT)
    with attach(tiny_model, str(tmp_path), block_tokens=16) as cached:
        monkeypatch.setattr(cached.cache.tiers, "get_into", Mock(side_effect=RuntimeError("anything")))
        assert torch.equal(cached.generate(PROMPT, **GREEDY), plain)
        assert cached.last is not None and cached.last.hit_tokens == 0


BLOCK, PAD = 16, 0
SHORT: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}


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
    wanted = {**SHORT, "return_dict_in_generate": True, "output_logits": True, **arguments}
    with attach(model, store, block_tokens=BLOCK) as cached:
        output, plain = cached.generate(**batch, **wanted), model.generate(**batch, **wanted)
        assert cached.flush(60)
        cached.cache.check()
    assert torch.equal(output.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), rtol=0, atol=1e-4)
    return cached


def hit(cached: CachedModel) -> int:
    assert cached.last is not None and cached.last.bypass is None
    return cached.last.hit_tokens


SHARED = text(70, 0)
ROWS = (torch.cat([SHARED, text(10, 1)]), torch.cat([SHARED, text(3, 2)]), text(60, 3))


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
            output = cached.generate(row[None], **SHORT)
            assert torch.equal(output, tiny_model.generate(row[None], **SHORT))
        assert cached.flush(60)
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0], ROWS[2]))) == 64 + 44


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


@pytest.mark.usefixtures("unhurried")
def test_rows_that_begin_alike_are_all_whole(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 columns are left, as the first row's second block is gone: one block of the next row, but two of the last.
    batch, plain = rows_of(text(76, 4), ROWS[1], ROWS[0]), TierStack.get_into
    gone = said(tiny_model, tmp_path, batch).prefixes.row(text(76, 4).numpy()).metas[0][1].id
    monkeypatch.setattr(TierStack, "get_into", lambda *given: None if given[1] == gone else plain(*given))
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **more: np.full(shape, -1).astype(dtype))
    assert hit(said(tiny_model, tmp_path, batch)) == 16 + 13 + 20


def test_answer_that_ends_early_is_stored_up_to_its_end(tiny_model: Any, tmp_path: Path) -> None:
    rows = (text(30, 5), text(30, 6))
    plain = tiny_model.generate(**rows_of(*rows), **{**SHORT, "max_new_tokens": 24})
    eos = int(plain[0, 32])
    cached = said(tiny_model, tmp_path, rows_of(*rows), max_new_tokens=24, eos_token_id=eos)
    lengths = [[*plain[row, 30:53].tolist(), eos].index(eos) + 30 for row in (0, 1)]
    assert cached.last.blocks_queued == sum(length // BLOCK for length in lengths)


def test_damaged_rows_are_computed(tiny_model: Any, tmp_path: Path) -> None:
    batch = rows_of(*ROWS)
    said(tiny_model, tmp_path, batch)
    assert flip_bytes(tmp_path, 9_000, 1 << 14)
    assert hit(said(tiny_model, tmp_path, batch)) < 64 + 57 + 44


@pytest.mark.parametrize(("where", "what"), [(-3, 0), (40, 0), (slice(40, None), 2)])
def test_other_masks_run_without_the_cache(tiny_model: Any, where: int | slice, what: int, tmp_path: Path) -> None:
    batch = rows_of(*ROWS)
    batch["attention_mask"][1] = 1
    batch["attention_mask"][1, where] = what
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        output = cached.generate(**batch, **SHORT)
        assert cached.last is not None and cached.last.bypass == "the attention mask hides tokens"
    assert torch.equal(output, tiny_model.generate(**batch, **SHORT))


def test_static_cache_is_filled_as_it_is_made(tiny_model: Any, tmp_path: Path) -> None:
    for batch, expected in ((rows_of(ROWS[0]), 64), (rows_of(*ROWS), 64 + 57 + 44)):
        said(tiny_model, tmp_path, batch, cache_implementation="static")
        cached = said(tiny_model, tmp_path, batch, cache_implementation="static")
        assert hit(cached) == expected
    # What a static cache has left is a prefix for any other.
    assert hit(said(tiny_model, tmp_path, rows_of(ROWS[0]))) == 64


@pytest.mark.parametrize("made", [tuple, torch.tensor])
def test_ends_of_an_answer_come_in_any_form(made: Callable[..., Any], tiny_model: Any, tmp_path: Path) -> None:
    ends, batch = made([PAD, 3]), torch.cat([torch.tensor([PAD, PAD]), ROWS[0]])[None]
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        output = cached.generate(batch, eos_token_id=ends, **SHORT)
        # Nothing is taken for padding.
        assert cached.hit_tokens(batch) == 80
    assert torch.equal(output, tiny_model.generate(batch, eos_token_id=ends, **SHORT))


def test_a_model_of_several_groups_makes_its_special_cache_itself(tmp_path: Path) -> None:
    model, ids = model_of_family("deepseek_v3"), torch.arange(3, 53)[None]
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "cache_implementation": "static"}
    output, cached = answer(model, tmp_path, ids, **options)
    assert torch.equal(output, model.generate(ids, **GREEDY, **options))
    assert cached.last.bypass == "cache_implementation=static, of a model with several groups or with importance"


def test_a_configuration_of_the_model_counts_where_a_given_one_is_silent(tiny_model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    model.generation_config.num_beams = 2
    given = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    with attach(model, tmp_path, block_tokens=BLOCK) as cached:
        assert torch.equal(cached.generate(PROMPT, given), model.generate(PROMPT, given))
        assert cached.last is not None and "beam" in str(cached.last.bypass)
        model.generation_config.num_beams, model.generation_config.cache_implementation = 1, "static"
        output = cached.generate(PROMPT, given, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, cache_utils.StaticCache)
        # As configurations on the hub have it, of models with windows: transformers makes the usual cache.
        model.generation_config.cache_implementation = "hybrid"
        assert torch.equal(cached.generate(PROMPT, given), model.generate(PROMPT, given))
        assert cached.last.bypass is None


def test_a_static_cache_has_room_for_what_nobody_bounds(tiny_model: Any, tmp_path: Path) -> None:
    with attach(tiny_model, tmp_path, block_tokens=BLOCK) as cached:
        with pytest.warns(UserWarning, match="generation length"):
            output = cached.generate(PROMPT, cache_implementation="static", do_sample=False, eos_token_id=None)
        with pytest.warns(UserWarning, match="generation length"):
            plain = tiny_model.generate(PROMPT, do_sample=False, eos_token_id=None)
    assert torch.equal(output, plain)


# Servers behind an engine: the latest of all regions, and figures that are the engine's own.


def restored(cached: CachedModel, prompt: torch.Tensor, **arguments: Any) -> int:
    """Answer a prompt; return how much of it was restored, the answer's blocks stored."""
    cached.generate(prompt, max_new_tokens=1, do_sample=False, **arguments)
    assert cached.cache.flush(60)
    return hit(cached)


def test_request_for_the_latest_finds_what_another_region_has_and_no_stale_copy(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines hear of what is invalidated when they start, and not again.
    monkeypatch.setattr("kvtide.tier.stack.invalidation._POLL_S", 3600.0)
    with region_processes(tmp_path) as (_, *regions), ExitStack() as stack:
        one, two = (stack.enter_context(attach(tiny_model, each.url, block_tokens=16)) for each in regions)
        assert restored(one, PROMPT) == 0
        assert restored(two, PROMPT, kvtide_force_latest=True) == 96
        assert restored(one, PROMPT, kvtide_force_latest=True) == 96
        invalidate(regions[1].url, one.identity.namespace)
        assert restored(one, PROMPT) == 96, "its memory has not heard of it"
        assert restored(one, PROMPT, kvtide_force_latest=True) == 0


def test_latest_of_a_store_without_servers_is_what_it_has(tiny_model: Any, tmp_path: Path) -> None:
    with attach(tiny_model, str(tmp_path), block_tokens=16) as cached:
        assert [restored(cached, PROMPT, kvtide_force_latest=True) for _ in range(2)] == [0, 96]


def test_latest_that_nobody_can_tell_is_a_miss(tiny_model: Any) -> None:
    server = ServerProcess()
    with attach(tiny_model, server.url, block_tokens=16) as cached:
        assert restored(cached, PROMPT) == 0
        server.kill()
        assert [restored(cached, PROMPT, kvtide_force_latest=latest) for latest in (True, False)] == [0, 96]


def test_server_that_is_silent_holds_up_one_look_up(tiny_model: Any) -> None:
    expected = tiny_model.generate(PROMPT, **GREEDY)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store, limits = f"http://127.0.0.1:{silent.getsockname()[1]}", Limits(close_s_max=0.1)
        with attach(tiny_model, store, block_tokens=16, limits=limits) as cached:
            started_s = time.monotonic()
            for _ in range(3):
                assert torch.equal(cached.generate(PROMPT, **GREEDY), expected)
            # Without a bound of its own the first would wait for 10 s.
            assert time.monotonic() - started_s < 9


def test_server_says_which_tokens_its_engines_restored(tiny_model: Any) -> None:
    # Three turns of 2, 4 and 6 full blocks of 16 tokens: each finds what the one before has stored, 6 of 12.
    with running_server() as server:
        for tokens in (33, 65, 97):
            with attach(tiny_model, server.url, block_tokens=16) as cached:
                cached.generate(PROMPT[:, :tokens], max_new_tokens=1, do_sample=False)
                assert cached.cache.flush(60)
    space = cached.identity.namespace.hex()[:12]
    metric, labels = "kvtide_prompt_tokens_total", {"namespace": space, "tenant": "(open)"}
    assert counted(server, metric, decision="load", reason="in_time", **labels) == 96
    assert counted(server, metric, decision="recompute", reason="absent", **labels) == 96
    assert counted(server, metric) == 192
    # A load takes several ranges of an object, a store asks for it before it sends it: neither counts again.
    reads = "kvtide_object_reads_total"
    assert counted(server, reads) == counted(server, reads, result="found") == 6
