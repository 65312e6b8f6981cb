"""kvtide below vLLM's own offloading, as a secondary tier: its stores, checksums and lossless codecs.

secondary_tiers: [{"type": "KVTideTier", "module_path": "kvtide.engines.vllm.tiering", "store": "disk:///var/cache/x"}]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtide.block import HEAD_DIM_MAX, BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.cache import LoadReport, MissReason, PendingBlock, cache_for
from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry
from kvtide.engines.paged.gate import WriteGate
from kvtide.engines.paged.identity import files_fingerprint
from kvtide.engines.paged.settings import ConnectorSettings
from kvtide.engines.vllm.model import model_folder
from kvtide.errors import UnsupportedModel
from kvtide.keys import NamespaceSpec
from kvtide.types import BlockKey, Namespace, ObjectId

__all__ = ["KVTideTier", "chunk_layout"]

TRANSFER_THREADS = 2
# Bytes are stored in two-byte units: most caches are of half precision, and any bytes make whole units.
_UNIT = KVDtype.BFLOAT16


def chunk_layout(chunk_bytes: int, layers: int, tokens: int) -> BlockLayout:
    """Return a block layout of exactly so many bytes.

    A chunk's bytes are kept, not understood: keys and values may lie in it in any order, so that only lossless codecs
    may be used. UnsupportedModel if its size can't be split so.
    """
    elements, rest = divmod(chunk_bytes, 2 * layers * tokens * _UNIT.item_bytes)
    heads = next((n for n in range(1, elements + 1) if elements % n == 0 and elements // n <= HEAD_DIM_MAX), 0)
    if rest or not heads:
        raise UnsupportedModel(f"a chunk of {chunk_bytes} bytes is not {layers} layers of {tokens} tokens")
    return BlockLayout(layers, tokens, heads, elements // heads, _UNIT)


class KVTideTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed for us
    """A secondary tier of vLLM's. Options are those of the connector that concern the store. Faults are misses.

    vLLM names chunks by its own hashes: set PYTHONHASHSEED, or a restarted engine finds nothing.
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
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = ConnectorSettings.parse(options)
        codec = CodecRegistry().make(settings.codec)
        if not codec.is_lossless:
            raise ValueError(
                f"vLLM's tiers hold bytes of any order: codec must be lossless or raw, got {settings.codec}"
            )
        config = offloading_spec.config
        if len(config.groups) != 1:
            raise UnsupportedModel(f"hybrid models are not supported: {len(config.groups)} groups of layers")
        (group,) = config.groups
        chunk_tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        self._layout = chunk_layout(self.block_size_bytes, len(group.layer_names), chunk_tokens)
        self._namespace = _namespace(config, settings, self._layout)
        self._chunks = np.frombuffer(primary_kv_view.cast("B"), dtype=np.uint16).reshape(-1, self.block_size_bytes // 2)
        self._load_s_max = settings.load_s_max
        self._cache = cache_for(settings.store, codec, limits=settings.limits(), clock=SystemClock())
        self._cache.open()
        self._workers = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="kvtide-tier")
        self._pending: set[Any] = set()

    def _meta(self, key: bytes) -> BlockMeta:
        name = BlockKey(hashlib.sha256(self._namespace + key).digest())
        # Chunks stand alone: vLLM knows what comes before which.
        return BlockMeta(ObjectId(self._namespace, name), BlockKey(self._namespace), 0, self._layout)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Tell whether the store seems to have the chunk."""
        return LookupResult.HIT if self._cache.match([self._meta(key).id]) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be copied, then encoded and stored in the background."""
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into the primary tier in the background."""
        self._submit(self._load, job_metadata)

    def _submit(self, action: Any, job: TransferJob) -> None:
        failed = JobResult(job_id=job.job_id, success=False)
        future = self._workers.submit(self._cache.guarded, "move chunks", lambda: action(job), failed)
        self._pending.add(future)

    def _store(self, job: TransferJob) -> JobResult:
        blocks = []
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            bits: BlockBits = self._chunks[chunk].reshape(self._layout.shape).copy()
            blocks.append(PendingBlock(self._meta(key), partial(np.asarray, bits)))
        stored = [self._cache.store([block]) for block in blocks]
        return JobResult(job_id=job.job_id, success=all(stored), transfer_bytes=sum(stored) * self.block_size_bytes)

    def _load(self, job: TransferJob) -> JobResult:
        keys, chunks, gate = list(job.keys), job.chunk_ids.tolist(), WriteGate()

        def sink(position: int, bits: BlockBits) -> None:
            with gate.enter() as is_in:
                if is_in:
                    self._chunks[chunks[position]] = bits.reshape(-1)

        failed = LoadReport(0, 0, MissReason.FAULT)
        metas = [self._meta(key) for key in keys]
        report = self._cache.guarded("load", lambda: self._cache.load(metas, sink, self._load_s_max), failed)
        gate.close()
        return JobResult(
            job_id=job.job_id,
            success=report.blocks == len(keys),
            successful_keys=keys[: report.blocks],
            transfer_bytes=report.blocks * self.block_size_bytes,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what was finished since the last call."""
        done = {future for future in self._pending if future.done()}
        self._pending -= done
        return [future.result() for future in done]

    def has_pending_work(self) -> bool:
        """Tell whether jobs run, so that the engine asks for them."""
        return bool(self._pending)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return no preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job touches the primary tier."""
        wait(self._pending)

    def shutdown(self) -> None:
        """Finish jobs, store what is queued, give everything back."""
        self.drain_jobs()
        self._workers.shutdown()
        self._cache.close()


def _namespace(config: Any, settings: ConnectorSettings, layout: BlockLayout) -> Namespace:
    what = {"dtype": config.model.dtype, "layers": config.groups[0].layer_names, "page": config.kv_cache_layout}
    fingerprint = settings.fingerprint.encode() or files_fingerprint(model_folder(config.model.name), what)
    parallel = config.parallel
    text = (
        f"vllm chunks of {config.cache.blocks_per_chunk} blocks, bytes={layout.raw_bytes} world={parallel.world_size}"
    )
    return NamespaceSpec(fingerprint, layout.dtype, text, layout.tokens, settings.tenant_salt.encode()).digest()
