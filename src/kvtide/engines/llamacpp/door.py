"""llama-cpp-python's own door for caches: `llm.set_cache(KVTideCache(...))`, for what takes a `BaseLlamaCache`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from kvtide.engines.llamacpp.cached import CachedLlama, attach
from kvtide.errors import UnsupportedModel

_log = logging.getLogger(__name__)


class KVTideCache(llama_cpp.BaseLlamaCache):  # type: ignore[misc]  # llama_cpp is not typed here
    """A cache as `Llama.set_cache` takes it, with the options of `attach`: the model that asks first is attached.

    It is false, as an empty container is: llama-cpp-python copies its whole context for a cache that is true. A model
    that kvtide can't serve runs without it, and the log says why.
    """

    def __init__(self, store: str | Path, **options: Any) -> None:
        super().__init__()
        self._store, self._options = store, options
        self.attached: CachedLlama | None = None
        self._served: Any = None

    def __bool__(self) -> bool:
        # llama-cpp-python hands a cache tokens alone, and asks for its truth first: the model is who asks.
        asking = sys._getframe(1).f_locals.get("self")
        if isinstance(asking, llama_cpp.Llama) and asking.cache is self and asking is not self._served:
            self.close()
            self._served = asking
            try:
                self.attached = attach(asking, self._store, **self._options).__enter__()
            except UnsupportedModel as error:
                _log.warning("running without the cache: %s", error)
        return False

    def close(self) -> None:
        """Store what is queued and leave the model as it was. Idempotent; the end of the process does it too."""
        if self.attached is not None:
            self.attached.close()
        self.attached = self._served = None

    @property
    def cache_size(self) -> int:
        """Return the bytes in the store's tiers."""
        return sum(tier.used_bytes for tier in self.attached.cache.stats().tiers) if self.attached else 0

    def __contains__(self, key: Sequence[int]) -> bool:
        return False

    def __getitem__(self, key: Sequence[int]) -> Any:
        raise KeyError("kvtide restores a prompt into the model's own context")

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Do nothing: blocks are stored behind each answer."""
