"""vLLM's own tiered offloading on a processor: its workers copy by CUDA only, so that this one copies memory.

Use it as `spec_name: CpuTieringSpec, spec_module_path: kvtide_lab.vllm.cpu_offload` of vLLM's OffloadingConnector.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not typed for us
    """Copies pages between the engine's cache and the primary tier at once, one group of layers after the other."""

    def __init__(self, kv_caches: Any, pages_per_chunk: int, region: Any) -> None:
        self._pages_per_chunk = pages_per_chunk
        self._region = region
        self._done: list[TransferResult] = []
        sizes = [each.page_size_bytes for each in kv_caches.tensors]
        pages = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._pages = [each.view(-1, size) for each, size in zip(pages, sizes, strict=True)]
        self._chunks = [region.create_next_worker_view(size * pages_per_chunk) for size in sizes]
        self._refs = kv_caches.group_data_refs

    def _copy(self, job_id: int, engine: Any, primary: Any, is_store: bool) -> bool:
        started_s, moved = time.monotonic(), 0
        taken, chunks = engine.block_ids.tolist(), primary.block_ids.tolist()
        for refs, count, index in zip(self._refs, engine.group_sizes, engine.block_indices, strict=True):
            first = index % self._pages_per_chunk
            for position, page in enumerate(taken[:count], first):
                chunk, slot = divmod(position, self._pages_per_chunk)
                for ref in refs:
                    pages = self._pages[ref.tensor_idx]
                    size = pages.shape[1]
                    row = self._chunks[ref.tensor_idx][chunks[chunk], slot * size : (slot + 1) * size]
                    (row.copy_(pages[page]) if is_store else pages[page].copy_(row))
                    moved += size
            # Groups lie one behind the other, each from the begin of a chunk.
            taken = taken[count:]
            chunks = chunks[-(-(first + count) // self._pages_per_chunk) if count else 0 :]
        seconds = time.monotonic() - started_s
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=seconds))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages of the engine's to the primary tier."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks of the primary tier to pages of the engine's."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return what was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Return at once: what was submitted has been copied."""

    def shutdown(self) -> None:
        """Give the primary tier's memory back."""
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with a worker that copies memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker, made at the first call."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
