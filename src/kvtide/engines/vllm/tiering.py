"""kvtide below vLLM's own offloading, as a secondary tier: its stores, checksums and lossless codecs (docs/vllm.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtide.block import BlockLayout
from kvtide.engines.chunks import ChunkStore, chunk_layout
from kvtide.engines.paged import files_fingerprint
from kvtide.engines.settings import ConnectorSettings
from kvtide.engines.vllm.model import check_version, model_folder
from kvtide.evict import Recent

TRANSFER_THREADS = 2
MISSED_MAX = 1 << 16


class KVTideTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed for us
    """A secondary tier of vLLM's. Options are those of the connector that concern the store. Faults are misses.

    Chunks are opaque: keys and values of any kind of layer, whatever their element type, named by vLLM's own hashes:
    set PYTHONHASHSEED, or a restarted engine finds nothing. Ranks of any number share them in vLLM's portable order.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: object,
    ) -> None:
        check_version()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        settings = ConnectorSettings.parse(options)
        if settings.prefill_tokens_per_s:
            raise ValueError("prefill_tokens_per_s is an option for SGLang: vLLM itself decides what to ask a tier for")
        fingerprint = settings.fingerprint.encode() or _fingerprint(config)
        text = f"vllm chunks of {self.block_size_bytes} bytes, {_order(config)}"
        self._store = ChunkStore(settings, _layout(config, self.block_size_bytes), fingerprint, text)
        self._chunks = np.frombuffer(primary_kv_view.cast("B"), dtype=np.uint8).reshape(-1, self.block_size_bytes)
        self._store.cache.open()
        self._workers = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="kvtide-tier")
        # Now, as later there may be none to be had: an error of the engine's, whose job is done all the same.
        started = threading.Barrier(TRANSFER_THREADS)
        wait([self._workers.submit(started.wait, 5.0) for _ in range(TRANSFER_THREADS)])
        self._pending: set[Future[JobResult]] = set()
        # What did not come is missing until it is stored again, whatever the store says: vLLM would ask on for it.
        self._missed, self._lock = Recent[bytes, None](MISSED_MAX), threading.Lock()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say if the store seems to have the chunk."""
        return LookupResult.HIT if key not in self._missed and self._store.contains(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be copied, then encoded and stored in the background."""
        with self._lock:
            for key in job_metadata.keys:
                self._missed.pop(key, None)
        self._submit(self._store_chunks, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into the primary tier in the background."""
        self._submit(self._load_chunks, job_metadata)

    def _submit(self, action: Callable[[TransferJob], JobResult], job: TransferJob) -> None:
        failed, guarded = JobResult(job_id=job.job_id, success=False), self._store.cache.guarded
        self._pending.add(self._workers.submit(guarded, "move chunks", partial(action, job), failed))

    def _store_chunks(self, job: TransferJob) -> JobResult:
        pairs = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        stored = [self._store.store(key, memoryview(self._chunks[chunk])) for key, chunk in pairs]
        return JobResult(job_id=job.job_id, success=all(stored), transfer_bytes=sum(stored) * self.block_size_bytes)

    def _load_chunks(self, job: TransferJob) -> JobResult:
        keys, chunks = list(job.keys), job.chunk_ids.tolist()

        def write(position: int, chunk: memoryview) -> None:
            self._chunks[chunks[position]] = np.frombuffer(chunk, dtype=np.uint8)

        count = self._store.load(keys, write)
        size, found = count * self.block_size_bytes, keys[:count]
        with self._lock:
            for key in keys[count:]:
                self._missed[key] = None
        return JobResult(job_id=job.job_id, success=found == keys, successful_keys=found, transfer_bytes=size)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what was finished since the last call."""
        done = {future for future in self._pending if future.done()}
        self._pending -= done
        return [future.result() for future in done]

    def has_pending_work(self) -> bool:
        """True while jobs run, so that the engine asks for them."""
        return bool(self._pending)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return no preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job touches the primary tier. vLLM resets its cache next: names change, as weights may have."""
        wait(self._pending)
        self._store.forget()

    def shutdown(self) -> None:
        """Finish jobs, store what is queued, give everything back."""
        self.drain_jobs()
        self._workers.shutdown()
        self._store.cache.close()
        self._chunks = np.empty((0, 0), np.uint8)  # vLLM unmaps the memory next


def _layout(config: Any, chunk_bytes: int) -> BlockLayout:
    """Return the layout of a chunk: layers and tokens of a lone group, else bytes whose meaning differs by group."""
    if len(config.groups) > 1:
        return chunk_layout(chunk_bytes, 1, 1)
    (group,) = config.groups
    return chunk_layout(chunk_bytes, len(group.layer_names), group.tokens_per_block * config.cache.blocks_per_chunk)


def _order(config: Any) -> str:
    """Return what decides the order of a chunk's bytes: vLLM's portable order, or its ranks' own."""
    parallel = config.parallel
    groups = [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups]
    what = f"{config.model.dtype} {groups} {config.kv_cache_layout}"
    own = f"tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} dcp={parallel.dcp_size}"
    if not config.canonical_layout:
        return f"direct {own}{' of one rank' if config.replicated_layout else ''} {what}"
    format_id = canonical_format_id(config.kv_cache_layout)
    return f"canonical {format_id} {'of any ranks' if parallel.is_parallelism_agnostic else own} {what}"


def _fingerprint(config: Any) -> bytes:
    folder = model_folder(config.model.name)
    written = folder / "config.json"
    return files_fingerprint(folder, {"config": written.read_text(encoding="utf-8") if written.is_file() else ""})
