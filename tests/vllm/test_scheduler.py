"""The connector's scheduler half under vLLM's own scheduler, without an engine: also on sources of another version.

KVTIDE_VLLM_SOURCES=FOLDER (an unpacked wheel) has all tests of this folder import vLLM from there.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

from kvtide.engines.paged import LoadOutcome
from kvtide.engines.paged.sequence import LoadOrder, StepCommands, WorkerReport
from kvtide.engines.settings import TAIL_TOKENS
from kvtide.engines.vllm.connector import KVTideConnector, StepMetadata, StepReport
from kvtide_lab.bench.engine_process import kvtide_transfer

PAGE, PROMPT = 128, list(range(5, 665))


class Stepped:
    """vLLM's scheduler with our half in it; each step ends as the test says that the workers' ended."""

    def __init__(self, model: Path, load: str = "async") -> None:
        transfer = KVTransferConfig(**kvtide_transfer("memory://", fingerprint="f", load=load))
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True}
        config = EngineArgs(
            model=str(model), dtype="float32", kv_transfer_config=transfer, **options
        ).create_engine_config()
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.float32)
        group = KVCacheGroupSpec([f"layers.{layer}" for layer in range(30)], spec)
        caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[group])
        config.cache_config.num_gpu_blocks = 64
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE, sha256)
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), block_size=PAGE)
        # The prompt is stored, and its pages are nobody's any more.
        self.add("a")
        self.first = self.step()
        assert self.scheduler.reset_prefix_cache()

    def add(self, name: str) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=1)
        sampling.update_from_generation_config({}, eos_token_id=2)
        request = Request(name, PROMPT, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, aborted: Sequence[str] = (), **said: Any) -> tuple[dict[str, int], StepCommands]:
        """Return the tokens that a step computes, by request, and our orders. aborted: requests that end within it."""
        output = self.scheduler.schedule()
        self.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        orders = output.kv_connector_metadata.orders
        tokens = dict(output.num_scheduled_tokens)
        report = StepReport(WorkerReport(orders.step))
        result = KVConnectorOutput(**{"finished_recving": set(), "kv_connector_worker_meta": report, **said})
        names = list(tokens)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            kv_connector_output=result,
        )
        self.scheduler.update_from_output(output, ran)
        return tokens, orders


@pytest.fixture
def stepped(model: Path) -> Any:
    made = Stepped(model)
    yield made
    made.scheduler.shutdown()


def test_prompt_is_ordered_to_be_stored_and_loaded_by_the_next_request(stepped: Stepped) -> None:
    tokens, orders = stepped.first
    assert (tokens, len(orders.stores), orders.loads) == ({"a": len(PROMPT)}, len(PROMPT) // PAGE + 1, ())
    request = stepped.add("b")
    tokens, orders = stepped.step()
    (load,) = orders.loads
    assert (tokens, load.request, len(load.blocks), len(load.tail), len(load.pages)) == ({}, "b", 5, 1, 6)
    stepped.step(finished_recving={"b"})
    tokens, orders = stepped.step()
    assert (tokens, orders.stores) == ({"b": len(PROMPT) - 5 * PAGE - TAIL_TOKENS}, ())
    assert request.is_finished()
    stepped.scheduler.connector.scheduler.check()


def test_pages_that_a_load_did_not_fill_are_computed(stepped: Stepped) -> None:
    request = stepped.add("b")
    (load,) = stepped.step()[1].loads
    stepped.step(finished_recving={"b"}, invalid_block_ids=set(load.pages[2:]))
    tokens, _ = stepped.step()
    assert tokens == {"b": len(PROMPT) - 2 * PAGE}
    assert request.is_finished()


def test_pages_that_a_load_did_not_fill_are_found_by_nobody_if_its_request_is_aborted_in_that_step(model: Path) -> None:
    stepped = Stepped(model, "layers")
    stepped.add("b")
    (load,) = stepped.step(aborted=["b"], invalid_block_ids=set(range(64)))[1].loads
    request = stepped.add("c")
    (again,) = stepped.step()[1].loads
    assert (load.is_in_step, len(again.blocks)) == (True, len(load.blocks))
    assert request.is_finished()
    stepped.scheduler.shutdown()


def test_pages_a_load_did_not_fill_are_left_to_nobody_if_its_request_is_aborted_after_that_step(
    model: Path,
) -> None:
    stepped = Stepped(model, "layers")
    stepped.add("b")
    stepped.add("shares")
    tokens, orders = stepped.step(invalid_block_ids=set(range(64)))
    assert (set(tokens), orders.loads[0].request) == ({"b", "shares"}, "b")
    stepped.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    stepped.add("c")
    tokens, orders = stepped.step()
    # Without this, on top of what nobody has filled.
    assert (tokens["shares"], [len(load.blocks) for load in orders.loads]) == (len(PROMPT), [5])
    stepped.scheduler.shutdown()


@pytest.mark.parametrize("error", [None, MemoryError(), SystemExit()])
def test_step_that_broke_off_stores_nothing_and_none_ends_its_own_loads(error: BaseException | None) -> None:
    connector = KVTideConnector.__new__(KVTideConnector)
    connector._scheduler = connector._cache_counts = None
    connector._model, connector._worker = Mock(), Mock()
    connector._worker.ended.return_value = LoadOutcome(set(), set(), set())
    # Of a request that has the name of one that has ended.
    loads = (LoadOrder("again", (), (), 0, 0.0),)
    metadata = StepMetadata(StepCommands(1, loads, (), is_idle=False))
    step = SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=True, finished_req_ids={"again", "gone"})
    run = runner.KVConnectorModelRunnerMixin._get_kv_connector_output
    place = patch.multiple(runner, get_kv_transfer_group=lambda: connector, get_forward_context=Mock())
    with place, suppress(MemoryError, SystemExit), run(step):
        if error is not None:
            raise error
    assert connector._worker.store.called == (error is None)
    connector._worker.ended.assert_called_once_with({"gone"}, False)
