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
        self._refused: Any = None

    def __bool__(self) -> bool:
        # llama-cpp-python hands a cache tokens alone, and asks for its truth first: the model is who asks.
        asking = sys._getframe(1).f_locals.get("self")
        if isinstance(asking, llama_cpp.Llama) and asking.cache is self:
            self.serve(asking)
        return False

    def serve(self, llm: Any) -> None:
        """Attach a model, in the place of the one before, unless it is attached already."""
        if llm is self._refused or (self.attached is not None and self.attached.llm is llm):
            return
        self.close()
        try:
            self.attached = attach(llm, self._store, **self._options).__enter__()
        except UnsupportedModel as error:
            self._refused = llm
            _log.warning("running without the cache: %s", error)

    def close(self) -> None:
        """Store what is queued and leave the model as it was. Idempotent; the end of the process does it too."""
        if self.attached is not None:
            self.attached.close()
        self.attached = None

    @property
    def cache_size(self) -> int:
        """Return the bytes in the store's tiers."""
        stats = self.attached.cache.stats().tiers if self.attached is not None else []
        return sum(tier.used_bytes for tier in stats)

    def __contains__(self, key: Sequence[int]) -> bool:
        return False

    def __getitem__(self, key: Sequence[int]) -> Any:
        raise KeyError("kvtide restores a prompt into the model's own context")

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Do nothing: blocks are stored behind each answer."""
