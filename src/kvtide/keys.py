"""Namespaces and chained block keys. A key names a prefix: equal keys mean equal tokens from the first one on.

key(block) = SHA-256(parent key || token ids as little-endian u32); the first parent is the namespace digest. A
block that depends on more (images, embeddings) hashes SHA-256(more) too, after its tokens.
Stable across processes, machines and Python versions (never Python's `hash`). See docs/format.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvtide.block import TOKENS_MAX, KVDtype
from kvtide.types import BlockKey, Namespace

TokenIds = Sequence[int] | NDArray[Any]

_NAMESPACE_TAG = b"kvtide-namespace-1"


def namespace_digest(
    fingerprint: bytes, dtype: KVDtype, layout: str, block_tokens: int, tenant_salt: bytes = b""
) -> Namespace:
    """Return the SHA-256 over all that two caches must agree on before one may use the other's blocks.

    fingerprint: of weights and config. layout: layers, heads, head size. The salt, a tenant's, is hashed, never stored.
    ValueError for an empty fingerprint or a block size out of its bounds.
    """
    if not fingerprint:
        raise ValueError("a namespace needs a model fingerprint, got an empty one")
    if not 1 <= block_tokens <= TOKENS_MAX:
        raise ValueError(f"block_tokens must be from 1 to {TOKENS_MAX}, got {block_tokens}")
    texts = (dtype.value.encode(), layout.encode())
    fields = (_NAMESPACE_TAG, fingerprint, *texts, block_tokens.to_bytes(4, "little"), tenant_salt)
    # No field's end can pass for the beginning of the next one.
    return Namespace(hashlib.sha256(b"".join(len(each).to_bytes(4, "little") + each for each in fields)).digest())


def tokens_array(tokens: TokenIds) -> NDArray[np.uint32]:
    """Return token ids, integers in [0, 2**32), as a contiguous little-endian u32 array. ValueError for others."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    if array.dtype != np.uint32 and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise ValueError(f"token ids must be in [0, 2**32), got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype="<u4")


def block_keys(namespace: Namespace, tokens: TokenIds, block_tokens: int) -> list[BlockKey]:
    """Return the keys of all full blocks of `tokens`. ValueError for bad token ids or `block_tokens` < 1."""
    return KeyChain(namespace, block_tokens).extend(tokens)


class KeyChain:
    """Keys of a growing sequence: a block gets its key when it fills. Cost is that of the new tokens alone."""

    def __init__(self, namespace: Namespace, block_tokens: int) -> None:
        if not 1 <= block_tokens <= TOKENS_MAX:
            raise ValueError(f"block_tokens must be from 1 to {TOKENS_MAX}, got {block_tokens}")
        self._parent: bytes = namespace
        self._block_bytes = 4 * block_tokens
        self._partial = b""
        self._count = 0

    def extend(self, tokens: TokenIds, extra: Callable[[int], bytes] | None = None) -> list[BlockKey]:
        """Append tokens; return the keys of blocks that they fill. extra: of block n besides its tokens, b"" if not."""
        data = self._partial + tokens_array(tokens).tobytes()
        sha256, block_bytes, parent = hashlib.sha256, self._block_bytes, self._parent
        # A NewType's call costs as much as a tenth of the hash: one cast for all keys instead.
        keys: list[bytes] = []
        stop = len(data) - len(data) % block_bytes
        for offset in range(0, stop, block_bytes):
            block = parent + data[offset : offset + block_bytes]
            more = extra(self._count + len(keys)) if extra is not None else b""
            # All blocks have one length, so that no tokens can stand for what is hashed of more.
            parent = sha256(block + sha256(more).digest() if more else block).digest()
            keys.append(parent)
        self._count += len(keys)
        self._parent = parent
        self._partial = data[stop:]
        return cast("list[BlockKey]", keys)
