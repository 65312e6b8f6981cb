"""A request of vLLM's: what names its blocks besides its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvtide.engines.paged import files_fingerprint

# Extra keys of vLLM's that the salt has already.
_SALTED = {"lora", "cache_salt"}


class ServedRequest(NamedTuple):
    """A request whose blocks have names. extra: what a block depends on besides its tokens; None for nothing."""

    request: Any
    salt: bytes
    extra: Callable[[int, int], bytes] | None

    @classmethod
    def of(cls, request: Any) -> Self | None:
        """Return a request of vLLM's as it is served, None if it can't be: it pools, or its prompt goes on changing.

        ValueError or OSError for an adapter (LoRA) whose weights can't be read.
        """
        if request.pooling_params is not None or request.resumable:
            return None
        salt, lora = (request.cache_salt or "").encode(), request.lora_request
        if lora is not None:
            # A name may come to mean other weights: these name the blocks.
            salt += b"\0lora " + _adapter_digest(Path(lora.lora_path))
        depends_on_more = bool(request.mm_features) or request.prompt_embeds is not None
        return cls(request, salt, partial(_extra, request) if depends_on_more else None)


def _adapter_digest(folder: Path) -> bytes:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return files_fingerprint(folder, {"adapter": config})


def _extra(request: Any, start: int, stop: int) -> bytes:
    """Return what the images and embeddings in a block are, as vLLM's own block hashes have it."""
    keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
    own = [key for key in keys or () if key[0] not in _SALTED]
    return repr(own).encode() if own else b""
