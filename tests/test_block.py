from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtide.block import BlockLayout, BlockMeta, KVDtype, check_bits
from kvtide.types import BlockKey, Namespace, ObjectId

KEY, NAMESPACE = BlockKey(b"k" * 32), Namespace(b"n" * 32)


def test_layout_counts_bytes() -> None:
    layout = BlockLayout(layers=2, tokens=4, kv_heads=3, head_dim=5, dtype=KVDtype.BFLOAT16)
    assert layout.shape == (2, 2, 4, 3, 5)
    assert layout.layer_bytes == 2 * 4 * 3 * 5 * 2
    assert layout.raw_bytes == 2 * layout.layer_bytes


@pytest.mark.parametrize("field", ["layers", "tokens", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1.5, "4"])
def test_dimension_out_of_bounds_is_refused(field: str, value: Any) -> None:
    sizes: dict[str, Any] = {"layers": 1, "tokens": 1, "kv_heads": 1, "head_dim": 1, field: value}
    with pytest.raises(ValueError, match=field):
        BlockLayout(**sizes, dtype=KVDtype.FLOAT32)


def test_layout_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="raw bytes"):
        BlockLayout(layers=4096, tokens=65536, kv_heads=4096, head_dim=8192, dtype=KVDtype.FLOAT32)


def test_dtype_must_be_a_kv_dtype() -> None:
    with pytest.raises(ValueError, match="KVDtype"):
        BlockLayout(1, 1, 1, 1, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_dtype_code_round_trips(dtype: KVDtype) -> None:
    assert KVDtype.from_code(dtype.code) is dtype


def test_unknown_dtype_code_is_refused() -> None:
    with pytest.raises(ValueError, match="code 9"):
        KVDtype.from_code(9)


def test_meta_refuses_short_digests_and_crooked_starts(layout: BlockLayout) -> None:
    good = ObjectId(NAMESPACE, KEY)
    with pytest.raises(ValueError, match="parent"):
        BlockMeta(good, BlockKey(b"short"), 0, layout)
    with pytest.raises(ValueError, match="key"):
        BlockMeta(ObjectId(NAMESPACE, BlockKey(b"short")), KEY, 0, layout)
    for start in (-16, 5):
        with pytest.raises(ValueError, match="start"):
            BlockMeta(good, KEY, start, layout)


def test_bits_of_another_type_shape_or_order_are_refused(layout: BlockLayout) -> None:
    bits: Any = np.zeros(layout.shape, dtype=np.uint32)
    check_bits(bits, layout)
    for wrong in (bits.astype(np.uint16), bits.view(np.float32), bits[:2], np.asfortranarray(bits)):
        with pytest.raises(ValueError, match="block bits must"):
            check_bits(wrong, layout)
