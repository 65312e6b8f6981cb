"""Layout and identity of a block. Its array holds bit patterns, so that every value survives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvtide.types import DIGEST_BYTES, BlockKey, ObjectId

# (layers, 2, tokens, kv_heads, head_dim); axis 1: 0 = K, 1 = V; dtype is BlockLayout.bits_dtype, C-contiguous.
BlockBits = NDArray[np.uint16] | NDArray[np.uint32]

LAYERS_MAX = 4096
TOKENS_MAX = 65536
KV_HEADS_MAX = 4096
HEAD_DIM_MAX = 8192
RAW_BYTES_MAX = 4 << 30


class KVDtype(Enum):
    """Element type of a KV cache. The value is its name everywhere; `code` is what is stored (docs/format.md)."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    code: int
    item_bytes: int

    @classmethod
    def from_code(cls, code: int) -> KVDtype:
        """Return the type with this stored number; ValueError if there is none."""
        for dtype in cls:
            if dtype.code == code:
                return dtype
        raise ValueError(f"unknown KV dtype code {code}, expected one of {[dtype.code for dtype in cls]}")


KVDtype.FLOAT32.code, KVDtype.FLOAT32.item_bytes = 1, 4
KVDtype.FLOAT16.code, KVDtype.FLOAT16.item_bytes = 2, 2
KVDtype.BFLOAT16.code, KVDtype.BFLOAT16.item_bytes = 3, 2


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and element type of a block. ValueError if a dimension is not in its named bound.

    shape: (layers, 2, tokens, kv_heads, head_dim). bits_dtype: the little-endian unsigned type that holds one element's
    bits. layer_bytes: raw bytes of one layer, K and V. raw_bytes: of the whole block.
    """

    layers: int
    tokens: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype
    shape: tuple[int, int, int, int, int] = field(init=False, repr=False, compare=False)
    bits_dtype: np.dtype[np.uint16] | np.dtype[np.uint32] = field(init=False, repr=False, compare=False)
    layer_bytes: int = field(init=False, repr=False, compare=False)
    raw_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("layers", self.layers, LAYERS_MAX),
            ("tokens", self.tokens, TOKENS_MAX),
            ("kv_heads", self.kv_heads, KV_HEADS_MAX),
            ("head_dim", self.head_dim, HEAD_DIM_MAX),
        ):
            if not isinstance(value, int) or not 1 <= value <= bound:
                raise ValueError(f"{name} must be a whole number from 1 to {bound}, got {value!r}")
        if not isinstance(self.dtype, KVDtype):
            raise ValueError(f"dtype must be a KVDtype, got {self.dtype!r}")
        layer_bytes = 2 * self.tokens * self.kv_heads * self.head_dim * self.dtype.item_bytes
        if (raw_bytes := self.layers * layer_bytes) > RAW_BYTES_MAX:
            raise ValueError(f"a block may have {RAW_BYTES_MAX} raw bytes, this layout has {raw_bytes}")
        # Asked for at every step of a load.
        object.__setattr__(self, "shape", (self.layers, 2, self.tokens, self.kv_heads, self.head_dim))
        object.__setattr__(self, "bits_dtype", np.dtype(f"<u{self.dtype.item_bytes}"))
        object.__setattr__(self, "layer_bytes", layer_bytes)
        object.__setattr__(self, "raw_bytes", raw_bytes)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """All that identifies a block: object id, parent key, position of its first token, layout; `model`, for people."""

    id: ObjectId
    parent: BlockKey
    start: int
    layout: BlockLayout
    model: str = ""

    def __post_init__(self) -> None:
        namespace, key = self.id
        if not len(namespace) == len(key) == len(self.parent) == DIGEST_BYTES:
            sizes = f"{len(namespace)}, {len(key)}, {len(self.parent)}"
            raise ValueError(f"namespace, key and parent must be {DIGEST_BYTES} bytes, got {sizes}")
        if self.start < 0 or self.start % self.layout.tokens:
            raise ValueError(f"start must be a multiple of {self.layout.tokens} tokens, got {self.start}")


def check_bits(bits: BlockBits, layout: BlockLayout) -> None:
    """Raise ValueError unless `bits` is a C-contiguous array of exactly this layout."""
    if bits.dtype != layout.bits_dtype or bits.shape != layout.shape or not bits.flags.c_contiguous:
        found = f"{bits.dtype} of {bits.shape}, strides {bits.strides}"
        raise ValueError(f"block bits must be {layout.bits_dtype} of shape {layout.shape}, C-contiguous, got {found}")


def values_of(bits: BlockBits, dtype: KVDtype) -> NDArray[np.float32]:
    """Return the numbers that bit patterns stand for, in their shape."""
    if dtype is KVDtype.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype is KVDtype.FLOAT32 else np.float16).astype(np.float32)
