"""The connector that vLLM loads: its calls, turned into those of the two halves. Decides nothing itself.

Invariant: a request never fails for the cache's sake; pages that could not be filled are reported and recomputed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvtide.clock import SystemClock
from kvtide.codec import AwaitingCodec, CodecRegistry, LayeredCodec, LosslessCodec, ProfileShape
from kvtide.engines import calibrate_command
from kvtide.engines.paged import (
    LoadOutcome,
    ScheduledRequest,
    SchedulerHalf,
    StepCommands,
    WorkerHalf,
    WorkerReport,
    join_pages,
)
from kvtide.engines.settings import ConnectorSettings, is_local
from kvtide.engines.vllm.model import SALTS_MAX, ServedRequest, check_policy, profile_fingerprint, served_model
from kvtide.engines.vllm.pages import page_pools
from kvtide.engines.vllm.stats import CacheCounts, LoadMetrics, LoadStats, option_counts
from kvtide.evict import Recent
from kvtide.group import ALL_ROWS, state_every
from kvtide.store import Cache, cache_for
from kvtide.tier import shown_url

# vLLM shows what its own loggers say.
_log = logging.getLogger("vllm.kvtide")

# The scheduler half only asks; what it would keep in memory is of no use to the workers.
ASKING_MEMORY_BYTES = 1 << 20
EPOCH_BYTES = 16


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
        return StepReport(self.report.joined(other.report))


class KVTideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector for vLLM. Options are `ConnectorSettings`; UnsupportedModel for what can't be served exactly."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        # Read after the connector is made: a block that can't be loaded is computed, never a failed request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        if role is KVConnectorRole.WORKER:
            check_policy(get_current_vllm_config_or_none())
        self._settings = settings = ConnectorSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        device = vllm_config.device_config.device_type
        settings.check_device(device)
        self._clock = SystemClock()
        self._registry = CodecRegistry(settings.read_profiles())
        is_exact = self._registry.make(settings.codec).is_lossless
        self._model = served_model(vllm_config, kv_cache_config, settings, is_exact)
        # Where there are several groups their rows are one block, and need the profile of such.
        shape = ProfileShape(self._model.layout, "" if self._model.layers.slots is None else ALL_ROWS)
        self._codec = self._registry.make_by_group(settings.codec, [shape])
        self._layers = {name: position for position, name in enumerate(self._model.layers.names)}
        # Layers that come in turn are worth waiting for where they come from this machine and into its memory.
        self._may_load_in_step = is_local(settings.store) and isinstance(self._codec, LayeredCodec) and device == "cpu"
        self._requests: dict[str, ServedRequest] = {}
        self._adapters = Recent[int, bytes](SALTS_MAX)
        self._worker: WorkerHalf | None = None
        self._cache_counts: CacheCounts | None = None
        # Of proofs and of what requests say.
        self._counts: Counter[str] = Counter()
        self._outcome = LoadOutcome(set(), set(), set())
        # In which vLLM finds computed pages, and those of who runs in a step that loads.
        self._block_pool: Any = None
        self._loading: dict[str, Sequence[int]] = {}
        self._scheduler: SchedulerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_half()
            self._cache_counts = CacheCounts(self._scheduler.cache, self._clock, has_blocks=False)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is a future miss."""
        return False

    # The scheduler's side

    def _scheduler_half(self) -> SchedulerHalf:
        settings, layout, states = self._settings, self._model.layout, self._model.layers.states
        limits = replace(settings.limits(), memory_bytes_max=ASKING_MEMORY_BYTES)
        cache = cache_for(settings.store, self._codec, self._registry, limits, self._clock)
        cache.open()
        every = 0 if states is None else settings.state_every_tokens
        if states is not None and not every:
            every = state_every(states.layout.raw_bytes, layout.raw_bytes / layout.tokens)
        return SchedulerHalf(
            cache,
            self._model.namespaces,
            layout.tokens,
            self._model.layers.page_tokens,
            self._clock,
            settings.match_s_max,
            every,
            self._model.is_drafted,
            self._model.tail_tokens,
        )

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half; only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's pages, in whose prefix cache none may be that no load has filled."""
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Remember the request: its tokens are needed when its blocks fill."""
        name = partial(ServedRequest.of, request, self._settings, self._vllm_config, self._adapters)
        served = self.scheduler.cache.guarded("name the request's blocks", name, None)
        if served is not None:
            self._requests[request.request_id] = served
            self._counts.update(option_counts(served.options))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load after the computed ones, None to be asked again, and whether between steps."""
        served = self._requests.get(request.request_id)
        if served is None:
            return 0, False
        asked = (served.salt, request.all_token_ids, num_computed_tokens, served.options, served.extra)
        tokens = self.scheduler.match(request.request_id, *asked)
        return tokens, bool(tokens) and not self._is_in_step()

    def _is_in_step(self) -> bool:
        """True if a load that is ordered now is for the step itself: there, nobody else would wait for it."""
        if self._model.layers.slots is not None:
            return False
        is_alone = self._may_load_in_step and len(self._requests) == 1 and self._settings.start_within_s is None
        return self._settings.load == "layers" or (self._settings.load == "auto" and is_alone)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load into the pages that the request got."""
        if num_external_tokens:
            pages = self._joined(blocks.get_block_ids())
            self.scheduler.allocated(request.request_id, pages, num_external_tokens, self._is_in_step())

    def _joined(self, pages: Sequence[Sequence[int]]) -> list[int]:
        """Return a request's pages; where there are groups, each with those of all."""
        return list(pages[0]) if self._model.layers.slots is None else join_pages(pages, self._model.layers.counts)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's orders."""
        total = scheduler_output.total_num_scheduled_tokens
        orders = self.scheduler.plan(self._scheduled(scheduler_output), total)
        names = scheduler_output.num_scheduled_tokens if any(load.is_in_step for load in orders.loads) else ()
        self._loading = {name: self._pages(scheduler_output.kv_connector_block_state, name) for name in names}
        return StepMetadata(orders)

    def _scheduled(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            if name in self._requests:
                request = self._requests[name].request
                pages = partial(self._pages, scheduler_output.kv_connector_block_state, name)
                yield ScheduledRequest(name, request.all_token_ids, request.num_computed_tokens + tokens, pages)

    def _pages(self, block_state: Any, request: str) -> Sequence[int]:
        return self._joined(block_state.get_block_ids(request))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn from the workers' reports."""
        if connector_output.kv_connector_worker_meta is not None:
            self.scheduler.heard(connector_output.kv_connector_worker_meta.report)
        for name, pages in self._loading.items():
            filled = next((n for n, page in enumerate(pages) if page in connector_output.invalid_block_ids), len(pages))
            # vLLM hashes pages before a load within the step has ended, and has one request compute what others share:
            # one that may be aborted or preempted before it does.
            self._block_pool.evict_blocks(set(pages[filled:]))
            if name in self._requests and filled < len(pages):
                self._requests[name].request.num_computed_tokens = filled * self._model.layers.page_tokens

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Say where loaded tokens come from: by the store, in front of which a worker's memory may have them."""
        # vLLM 0.31 has no such sources, and does not ask.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        source = CacheHitSource.DISK if is_local(self._settings.store) else CacheHitSource.EXTERNAL_UNSPECIFIED
        if self._settings.store.startswith("memory://"):
            source = CacheHitSource.HOST
        return {source: num_external_tokens} if num_external_tokens else {}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its pages may be reused at once: what is stored was copied within its steps."""
        self._requests.pop(request.request_id, None)
        summary = self.scheduler.finished(request.request_id)
        if summary is not None:
            _log.info("kvtide, request %s: %s", request.request_id, summary.text(shown_url(self._settings.store)))
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Serve nothing that was stored before, as after an update of the weights: names change from now on."""
        self.scheduler.reset(os.urandom(EPOCH_BYTES))
        return True

    # The workers' side

    @property
    def worker(self) -> WorkerHalf:
        """The worker half; only in a worker's process, once the pages are there."""
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> StepCommands:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages, if they are proved. UnsupportedModel if they are not as kvtide knows them."""
        settings, model, codec = self._settings, self._model, self._codec
        # States, and what a lossy codec can't keep, are stored losslessly.
        codecs = [codec.make(first) for first in codec.first] if isinstance(codec, AwaitingCodec) else [codec]
        codecs += [] if any(isinstance(each, LosslessCodec) for each in codecs) else [LosslessCodec()]
        found = page_pools(model, kv_caches, self._vllm_config, settings, codecs, self._clock)
        pool = found.pool
        # Pages that windows have given up can't be kept as they are.
        kept_bytes_max = settings.kept_bytes_max if model.layers.slots is None else 0
        limits = replace(settings.limits(), memory_bytes_max=settings.memory_bytes_max - kept_bytes_max)
        encoder = codec.through(pool.encoder) if isinstance(codec, AwaitingCodec) else pool.encoder(codec)
        rank, device = get_tensor_model_parallel_rank(), pool.memory if settings.device_bytes_max else None
        cache = cache_for(settings.store, encoder, self._registry, limits, self._clock, device=device)
        cache.open()
        if isinstance(codec, AwaitingCodec):
            self._seek_profile(cache, codec)
        self._cache_counts = counts = CacheCounts(cache, self._clock, has_blocks=True)
        self._worker = WorkerHalf(
            cache,
            pool,
            rank,
            model.label,
            self._clock,
            kept_bytes_max,
            found.states,
            model.tail_tokens,
            bool(found.refused),
            # Of servers nobody asks what they hold.
            lambda: counts.has_room or not is_local(settings.store),
        )
        self._counts.update(found.counts)
        if not found.refused:
            self._worker.take_memory()

    def _seek_profile(self, cache: Cache, codec: AwaitingCodec) -> None:
        """Have the cache look for the model's profile in the store, and say how to make one."""
        given, salt = self._settings.fingerprint.encode(), self._settings.tenant_salt.encode()
        folder = str(self._vllm_config.model_config.model)
        command = calibrate_command(folder, self._settings.store, codec.profile_kind, given, bool(salt))
        cache.profiles.seek(profile_fingerprint(self._vllm_config, self._settings), salt, command)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads."""
        self.worker.start(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for what this step loads of a layer, as it did before one that attends to its; none between steps."""
        self.worker.wait_layer(self._layers.get(layer_name, 0))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored when all their layers are there."""

    def wait_for_save(self) -> None:
        """Copy what the step completed; encoding and storing happen in the background."""
        self.worker.wait_loads()
        # vLLM comes here too when an error or the process's end breaks off a step, whose pages are not computed then.
        if sys.exc_info()[0] is None:
            self.worker.store(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended; loads of finished requests end here."""
        # Where drafts are made vLLM asks before `wait_for_save`.
        self.worker.wait_loads()
        # A load of this step is of a request that took the name of one that has ended.
        gone = finished_req_ids - {load.request for load in self._orders.loads}
        self._outcome = self.worker.ended(gone, self._orders.is_idle)
        # vLLM hears of those within the step through their pages alone.
        return None, self._outcome.requests

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that the loads just reported could not fill."""
        return self._outcome.failed_pages if self._model.layers.slots is None else set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and which failed where several groups' pages can't tell."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = set() if self._model.layers.slots is None else self._outcome.failed
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler half should know."""
        return StepReport(self.worker.report(self._orders.step))

    def get_kv_connector_stats(self) -> LoadStats | None:
        """Return what this side has counted since it was asked last."""
        half = self._scheduler or self._worker
        if half is None or self._cache_counts is None:
            return None
        counts = {**half.take_counts(), **self._cache_counts.take(), **self._counts}
        self._counts.clear()
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
        for each in (self._cache_counts, self._worker, self._scheduler):
            if each is not None:
                each.close()
