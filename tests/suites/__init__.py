"""Public test helpers: conformance suites that every codec and tier must pass, and builders of blocks."""

from typing import cast

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.keys import block_keys, namespace_digest
from kvtide.types import BlockKey, Namespace, ObjectId

__all__ = ["bits_of", "block_bits", "block_meta", "chain", "layouts", "namespace", "smooth_bits"]


def namespace(model: str = "model", salt: bytes = b"") -> Namespace:
    return namespace_digest(model.encode(), KVDtype.FLOAT32, "test", 16, salt)


def chain(*numbers: int) -> list[BlockKey]:
    """Chained keys of made-up blocks of one token: equal numbers from the first on give equal keys."""
    return block_keys(namespace(), numbers, 1)


def block_meta(layout: BlockLayout, seed: int = 0, position: int = 0) -> BlockMeta:
    """Return the identity of block `position` of a made-up prompt."""
    space = namespace()
    tokens = np.arange(layout.tokens * (position + 1), dtype=np.uint32) + seed
    keys = [BlockKey(space), *block_keys(space, tokens, layout.tokens)]
    return BlockMeta(ObjectId(space, keys[-1]), keys[-2], position * layout.tokens, layout, "made-up float")


def layouts() -> st.SearchStrategy[BlockLayout]:
    """Draw small layouts of every element type."""
    return st.builds(
        BlockLayout,
        layers=st.integers(1, 4),
        tokens=st.integers(1, 20),
        kv_heads=st.integers(1, 3),
        head_dim=st.integers(1, 20),
        dtype=st.sampled_from(KVDtype),
    )


def block_bits(layout: BlockLayout, seed: int) -> BlockBits:
    """Return any bit patterns at all, NaN payloads, infinities and denormals included."""
    raw = np.random.default_rng(seed).bytes(layout.raw_bytes)
    return cast(BlockBits, np.frombuffer(raw, dtype=layout.bits_dtype).reshape(layout.shape).copy())


def bits_of(values: NDArray[np.float32], dtype: KVDtype) -> BlockBits:
    """Return the bit patterns of values; those of bfloat16 are cut off, not rounded."""
    if dtype is KVDtype.FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return words if dtype is KVDtype.FLOAT32 else (words >> 16).astype(np.uint16)


def smooth_bits(layout: BlockLayout, seed: int) -> BlockBits:
    """Return bit patterns of normally distributed values, as a model's cache has them."""
    return bits_of(np.random.default_rng(seed).normal(size=layout.shape).astype(np.float32), layout.dtype)
