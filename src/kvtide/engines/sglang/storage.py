"""The storage backend that SGLang's hierarchical cache loads: pages of the host pool in and out.

Invariant: nothing leaves it but a value of the interface; a fault is a page that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtide.engines.chunks import ChunkStore, chunk_layout
from kvtide.engines.settings import ConnectorSettings
from kvtide.errors import UnsupportedModel

# What the factory reads of the options, or hands to every backend; the rest is ours.
_FACTORY_OPTIONS = {"backend_name", "module_path", "class_name", "interface_v1"}


class KVTideStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed for us
    """Keys are SGLang's page hashes, which chain. UnsupportedModel for pools with more than keys and values."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        given = {**(storage_config.extra_config or {}), **(kwargs or {})}
        options = {name: value for name, value in given.items() if name not in _FACTORY_OPTIONS}
        self._settings, self._config = ConnectorSettings.parse(options), storage_config
        if not self._settings.fingerprint:
            raise ValueError("SGLang tells a model's name alone: give the option `fingerprint`, which changes with it")
        self._store: ChunkStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool, whose pages are stored, and open the store."""
        super().register_mem_pool_host(mem_pool_host)
        page, config = mem_pool_host.get_dummy_flat_data_page(), self._config
        # Of latents all ranks have the same, and SGLang has the first alone store them.
        rank = 0 if config.is_mla_model else config.tp_rank
        shard = f"tp={rank}/{config.tp_size} pp={config.pp_rank}/{config.pp_size}"
        spread = f"cp={config.attn_cp_rank}/{config.attn_cp_size} mla={config.is_mla_model}"
        # The device's type: the host pool holds floats of eight bits, whichever, as bytes.
        order = f"{mem_pool_host.layout} {mem_pool_host.device_pool.dtype} {page.nbytes} bytes"
        layout = chunk_layout(page.nbytes, 1, mem_pool_host.page_size)
        text = f"sglang pages {config.model_name} {shard} {spread} {order} from layer {mem_pool_host.start_layer}"
        self._store = ChunkStore(self._settings, layout, self._settings.fingerprint.encode(), text)
        self._store.open()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools besides the one of keys and values: their pages would have to come and go together."""
        if host_pool_name != "kv":
            raise UnsupportedModel(f"pages of pool {host_pool_name} are not supported")

    @property
    def store(self) -> ChunkStore:
        """The open store; only after the host pool was registered."""
        assert self._store is not None, "no host pool is registered"
        return self._store

    def exists(self, key: str) -> bool:
        """True if the page seems to be stored."""
        return self.store.contains(key.encode())

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many leading pages seem to be stored; none where computing them is expected to be faster."""
        return self.store.leading([key.encode() for key in keys])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into the tensor `target_location` and return it; None if it is not there."""
        (found,) = self.batch_get([key], [target_location])
        return found

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages into tensors; None for the first that is not there and all after it."""
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(target is None for target in targets):
            raise ValueError(f"every page needs a tensor to be read into, got {len(keys)} keys")

        def write(position: int, chunk: memoryview) -> None:
            _bytes_of(targets[position])[:] = np.frombuffer(chunk, dtype=np.uint8)

        count = self.store.load([key.encode() for key in keys], write)
        return [target if i < count else None for i, target in enumerate(targets)]

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool at the first index of each page; tell for each whether it is there."""
        pool = self.mem_pool_host
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        found = [page is not None for page in self.batch_get(keys, pages)]
        for index, page, is_found in zip(self._starts(keys, host_indices), pages, found, strict=True):
            if is_found:
                pool.set_from_flat_data_page(index, page)
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Queue a page to be stored. False if the queue is full."""
        if value is None:
            raise ValueError("a page's tensor must be given as value")
        return self.store.store(key.encode(), memoryview(_bytes_of(value)))

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Queue pages in order; False, and the rest dropped, once the queue is full."""
        return all(self.set(key, value) for key, value in zip(keys, values or [], strict=True))

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Queue pages of the host pool; tell for each whether it was taken."""
        pool, starts = self.mem_pool_host, self._starts(keys, host_indices)
        return [self.set(key, pool.get_data_page(index, flat=True)) for key, index in zip(keys, starts, strict=True)]

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        starts: list[int] = host_indices[:: self.mem_pool_host.page_size].tolist()
        if len(starts) != len(keys):
            raise ValueError(f"{len(keys)} keys need as many pages of the host pool, got {len(starts)}")
        return starts

    def clear(self) -> None:
        """Serve nothing that was stored before, as after an update of the weights: names change from now on."""
        self.store.forget()

    def close(self) -> None:
        """Store what is queued and close. Idempotent."""
        if self._store is not None:
            self._store.cache.close()


def _bytes_of(page: torch.Tensor) -> Any:
    """Return a page's bytes as an array; ValueError if they don't lie in one piece of this machine's memory."""
    if not page.is_contiguous() or page.device.type != "cpu":
        raise ValueError(f"a page must be contiguous in host memory, got strides {page.stride()} on {page.device}")
    return page.reshape(-1).view(torch.uint8).numpy()
