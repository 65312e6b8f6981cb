"""kvtide below vLLM's own tiering, in the real engine."""

import mmap
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.families import EXACT, checkpoint, families
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS, offloading
from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtide.engines.vllm.tiering import KVTideTier
from kvtide.store.load import LoadReport, MissReason
from kvtide_lab.config import engine_environment

pytestmark = pytest.mark.timeout(900)

CHUNK_BYTES = 4096


def _transfer(store: Path) -> dict[str, Any]:
    return offloading(secondary_tiers=[{"type": "KVTideTier", "store": str(store)}])


def test_restarted_engine_restores_what_its_own_tiering_gave_to_kvtide(
    engine: Any, plain: Any, tokens: list[int], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with engine(_transfer(store)) as process:
        process.ask(tokens[:PROMPT_TOKENS], 2)
    with engine(_transfer(store)) as process:
        answer = process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)
    assert answer["ids"] == plain["long"]["ids"]
    assert answer["cached_tokens"] == (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS


# Llama is the model of the test above; by day one of windows and one of states stand for the others.
BY_DAY = {"gemma3", "nemotron_h"}
TIERED = [each for each in families("tier", EXACT) if each != "llama"]


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.nightly] * (each not in BY_DAY)) for each in TIERED]
)
def test_any_groups_of_layers_come_back_as_they_were(answers_of: Any, family: str, tmp_path: Path) -> None:
    model, prompt = checkpoint(family, tmp_path / "model"), [3 + 7 * i % 1000 for i in range(700)]
    # Nemotron-H's kernel on a processor makes states at the ends of forwards alone.
    options = {"max_num_batched_tokens": 128} if family == "nemotron_h" else {}
    transfer = _transfer(tmp_path / "store")
    ((cold,), (warm,)) = answers_of(model, [transfer, transfer], [prompt], ANSWER_TOKENS, **options)
    assert cold["ids"] == warm["ids"]
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_python_hashes_are_pinned_as_vllms_chunk_names_need() -> None:
    assert engine_environment({})["PYTHONHASHSEED"] == "0"
    assert engine_environment({"X": "1"})["X"] == "1"
    assert engine_environment({}).keys() >= os.environ.keys()


def _tier(folder: Path, store: Path, ranks: int, *, is_canonical: bool, dtype: str = "float32", **options: Any) -> Any:
    """A tier of an engine with so many tensor-parallel ranks."""
    parallel = config.OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, True)
    made = config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(16, ("a", "b"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES // ranks,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=config.OffloadingModelConfig(str(folder), dtype),
        cache=config.OffloadingCacheConfig(16, 1),
        parallel=parallel,
        canonical_layout=is_canonical,
        kv_cache_layout="LBHNC",
    )
    view = memoryview(mmap.mmap(-1, 2 * CHUNK_BYTES)).cast("B", (2, CHUNK_BYTES))
    options = {"store": str(store), "fingerprint": "f", **options}
    return KVTideTier(SimpleNamespace(config=made), view, "KVTideTier", **options)


def _store(tier: Any) -> bool:
    """Store a chunk and end the tier; return whether the chunk was there before."""
    found = tier.lookup(b"key", None) is LookupResult.HIT
    tier.submit_store(TransferJob(1, [b"key"], np.array([0]), False, None))
    tier.shutdown()
    # As vLLM does with its memory then.
    memory = tier._primary_kv_view.obj
    tier._primary_kv_view.release()
    memory.close()
    return found


def test_model_of_another_config_with_the_same_weights_shares_nothing(tmp_path: Path) -> None:
    found = list[bool]()
    for config_text in ("{}", '{"rope_theta": 1}', "{}"):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text(config_text)
        found.append(_store(_tier(folder, tmp_path / "store", 1, is_canonical=False, fingerprint="")))
    assert found == [False, False, True]


def test_speed_that_only_sglang_needs_to_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefill_tokens_per_s is an option for SGLang"):
        _tier(tmp_path, tmp_path, 1, is_canonical=False, prefill_tokens_per_s=1000.0)


@pytest.mark.parametrize("is_canonical", [False, True])
def test_bytes_of_another_type_are_others_whatever_name_the_model_is_given(tmp_path: Path, is_canonical: bool) -> None:
    make = partial(_tier, tmp_path, tmp_path / "store", 1, is_canonical=is_canonical)
    tiers = (make(dtype=dtype) for dtype in ("bfloat16", "float16", "bfloat16"))
    assert [_store(tier) for tier in tiers] == [False, False, True]


def test_ranks_of_any_number_share_the_portable_order_and_no_other(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for is_canonical, shared in ((False, {(1, False)}), (True, {(1, True), (2, True), (1, False)})):
        _store(_tier(tmp_path, store, 1, is_canonical=is_canonical))
        for ranks in (1, 2):
            for other in (False, True):
                reader = _tier(tmp_path, store, ranks, is_canonical=other)
                found = reader.lookup(b"key", None) is LookupResult.HIT
                reader.shutdown()
                assert found == ((ranks, other) in shared), (ranks, other)


def test_jobs_are_done_where_no_thread_can_be_had_later(tmp_path: Path) -> None:
    tier = _tier(tmp_path, tmp_path / "store", 1, is_canonical=False)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        for number in range(2):
            tier.submit_load(TransferJob(number, [b"key"], np.array([0]), True, None))
    tier.drain_jobs()
    assert [each.success for each in tier.get_finished_jobs()] == [False, False]
    tier.shutdown()


def test_chunk_that_did_not_come_is_missing_until_it_is_stored_again_and_all_are_after_a_reset(tmp_path: Path) -> None:
    tier, job = _tier(tmp_path, tmp_path / "store", 1, is_canonical=False), partial(TransferJob, 1, [b"key"])
    tier.submit_store(job(np.array([0]), False, None))
    assert all(future.result() for future in tier._pending)
    assert [each.success for each in tier.get_finished_jobs()] == [True]
    assert tier.lookup(b"key", None) is LookupResult.HIT
    with patch.object(tier._store.cache, "load", return_value=LoadReport(0, 0, MissReason.DEADLINE)):
        tier.submit_load(job(np.array([1]), True, None))
        assert all(future.result() for future in tier._pending)
    assert [each.success for each in tier.get_finished_jobs()] == [False]
    assert tier.lookup(b"key", None) is LookupResult.MISS
    tier.submit_store(job(np.array([0]), False, None))
    assert tier.lookup(b"key", None) is LookupResult.HIT
    # vLLM resets its caches, as after an update of the weights.
    tier.drain_jobs()
    assert tier.lookup(b"key", None) is LookupResult.MISS
    tier.shutdown()
