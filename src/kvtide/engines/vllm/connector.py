"""The connector that vLLM loads: its calls, turned into those of the two halves. Decides nothing itself.

Invariant: a request never fails for the cache's sake; pages that could not be filled are reported and recomputed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvtide.clock import SystemClock
from kvtide.codec import Codec, CodecRegistry, LayeredCodec
from kvtide.config import Limits
from kvtide.engines import installed_profiles
from kvtide.engines.paged import LoadOutcome, ScheduledRequest, SchedulerHalf, StepCommands, WorkerHalf, WorkerReport
from kvtide.engines.settings import ConnectorSettings
from kvtide.engines.vllm.model import page_pool, served_model
from kvtide.engines.vllm.stats import LoadMetrics, LoadStats
from kvtide.store import Cache, cache_for
from kvtide.tier.ram.device import DeviceMemory

# The scheduler half only asks; what it would keep in memory is of no use to the workers.
ASKING_MEMORY_BYTES = 1 << 20
EPOCH_BYTES = 16
# A request's own option, in its `kv_transfer_params`: copies of this machine won't do.
LATEST_OPTION = "kvtide_force_latest"


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for us
    """Commands that travel to the workers with a step."""

    orders: StepCommands


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Reports that travel back from the workers."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join what two workers found out in one step."""
        assert isinstance(other, StepReport)
        mine, theirs = self.report, other.report
        loads, lost, failed = mine.loads + theirs.loads, mine.lost + theirs.lost, mine.failed + theirs.failed
        return StepReport(WorkerReport(mine.step, loads, lost, failed, mine.rough + theirs.rough))


class KVTideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector for vLLM. Options are `ConnectorSettings`; UnsupportedModel for what can't be served exactly."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        # Read after the connector is made: a block that can't be loaded is computed, never a failed request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._settings = ConnectorSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._settings.check_device(vllm_config.device_config.device_type)
        self._clock = SystemClock()
        registry = CodecRegistry(installed_profiles())
        self._model = served_model(
            vllm_config, kv_cache_config, self._settings, registry.make(self._settings.codec).is_lossless
        )
        self._codec = registry.make(self._settings.codec, self._model.layout)
        self._layers = {name: position for position, name in enumerate(self._model.layer_names)}
        # Layers that come in turn are worth waiting for where they come from this machine and into its memory.
        has_layers = isinstance(self._codec, LayeredCodec) and vllm_config.device_config.device_type == "cpu"
        self._may_load_in_step = self._settings.is_local and has_layers
        self._requests: dict[str, Any] = {}
        self._worker: WorkerHalf | None = None
        self._outcome = LoadOutcome(set(), set())
        self._scheduler = self._scheduler_half() if role is KVConnectorRole.SCHEDULER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a block that is not stored is a future miss."""
        return False

    def _cache(self, codec: Codec, limits: Limits, device: DeviceMemory | None = None) -> Cache:
        profiles = installed_profiles()
        cache = cache_for(self._settings.store, codec, profiles, limits, self._clock, device=device)
        cache.open()
        return cache

    # The scheduler's side

    def _scheduler_half(self) -> SchedulerHalf:
        return SchedulerHalf(
            self._cache(self._codec, replace(self._settings.limits(), memory_bytes_max=ASKING_MEMORY_BYTES)),
            self._model.namespaces,
            self._model.layout.tokens,
            self._model.page_tokens,
            self._clock,
            self._settings.match_s_max,
        )

    @property
    def scheduler(self) -> SchedulerHalf:
        """Return the scheduler half; only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load after the computed ones, None to be asked again, and whether between steps."""
        if not _is_plain(request):
            return 0, False
        salt = (request.cache_salt or "").encode()
        params = request.kv_transfer_params or {}
        is_latest, stream = bool(params.get(LATEST_OPTION)), self._settings.stream_order(params)
        ids = request.all_token_ids
        tokens = self.scheduler.match(request.request_id, salt, ids, num_computed_tokens, is_latest, stream)
        return tokens, bool(tokens) and not self._is_in_step()

    def _is_in_step(self) -> bool:
        """Tell whether a load that is ordered now is for the step itself: there, nobody else would wait for it."""
        is_alone = self._may_load_in_step and len(self._requests) == 1 and self._settings.start_within_s is None
        return self._settings.load == "layers" or (self._settings.load == "auto" and is_alone)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load into the pages that the request got."""
        if num_external_tokens:
            (pages,) = blocks.get_block_ids()
            self.scheduler.allocated(request.request_id, pages, num_external_tokens, self._is_in_step())

    def on_new_request(self, request: Any) -> None:
        """Remember the request: its tokens are needed when its blocks fill."""
        if _is_plain(request):
            self._requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's orders."""
        total = scheduler_output.total_num_scheduled_tokens
        return StepMetadata(self.scheduler.plan(self._scheduled(scheduler_output), total))

    def _scheduled(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(name)
            if request is not None:
                pages = partial(_pages, scheduler_output.kv_connector_block_state, name)
                yield ScheduledRequest(name, request.all_token_ids, request.num_computed_tokens + tokens, pages)

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn from the workers' reports."""
        if connector_output.kv_connector_worker_meta is not None:
            self.scheduler.heard(connector_output.kv_connector_worker_meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its pages may be reused at once: what is stored was copied within its steps."""
        self._requests.pop(request.request_id, None)
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Serve nothing that was stored before, as after an update of the weights: names change from now on."""
        self.scheduler.reset(os.urandom(EPOCH_BYTES))
        return True

    # The workers' side

    @property
    def worker(self) -> WorkerHalf:
        """Return the worker half; only in a worker's process, once the pages are there."""
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> StepCommands:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages. UnsupportedModel if they are not as kvtide knows them."""
        pool = page_pool(self._model, kv_caches, self._vllm_config, self._settings)
        limits, kept_bytes_max = self._settings.limits(), self._settings.kept_bytes_max
        device = pool.memory if self._settings.device_bytes_max else None
        limits = replace(limits, memory_bytes_max=limits.memory_bytes_max - kept_bytes_max)
        cache = self._cache(pool.encoder(self._codec), limits, device)
        rank = get_tensor_model_parallel_rank()
        self._worker = WorkerHalf(cache, pool, rank, self._model.label, self._clock, kept_bytes_max)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads."""
        self.worker.start(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for what this step loads of a layer; nobody waits for loads between steps."""
        self.worker.wait_layer(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored when all their layers are there."""

    def wait_for_save(self) -> None:
        """Copy what the step completed; encoding and storing happen in the background."""
        self.worker.wait_loads()
        self.worker.store(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended; loads of finished requests end here."""
        self._outcome = self.worker.ended(finished_req_ids, self._orders.is_idle)
        # vLLM hears of those within the step through their pages alone.
        return None, self._outcome.requests

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that the loads just reported could not fill."""
        return self._outcome.failed_pages

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler half should know."""
        return StepReport(self.worker.report(self._orders.step))

    def get_kv_connector_stats(self) -> LoadStats | None:
        """Return what ended loads brought since the last step; None of the scheduler's half."""
        counts = self._worker.take_counts() if self._worker is not None else None
        return LoadStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats:
        """Return stats as they came from a worker."""
        return LoadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> LoadMetrics:
        """Return the counters of vLLM's `/metrics`."""
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Store what is queued and give everything back. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _pages(block_state: Any, request: str) -> Sequence[int]:
    (pages,) = block_state.get_block_ids(request)
    return list(pages)


def _is_plain(request: Any) -> bool:
    """Tell whether the request's keys and values depend on its tokens alone."""
    return (
        request.lora_request is None
        and request.pooling_params is None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
    )
