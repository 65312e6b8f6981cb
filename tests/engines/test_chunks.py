"""Chunk layouts have exactly the chunks' bytes."""

from __future__ import annotations

import pytest

from kvtide.engines.chunks import chunk_layout


@pytest.mark.parametrize(
    ("size", "layers", "tokens", "heads", "head_dim"),
    [(2 * 2 * 30 * 128 * 192, 30, 128, 1, 192), (2 * 2 * 3 * 8192, 1, 1, 3, 8192), (2 * 2 * 30 * 128, 30, 128, 1, 1)],
)
def test_layout_has_exactly_the_chunks_bytes(size: int, layers: int, tokens: int, heads: int, head_dim: int) -> None:
    layout = chunk_layout(size, layers, tokens)
    assert (layout.kv_heads, layout.head_dim, layout.raw_bytes) == (heads, head_dim, size)


@pytest.mark.parametrize("size", [0, 12_345])
def test_chunk_of_a_size_that_fits_no_layout_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="is not 30 layers"):
        chunk_layout(size, 30, 128)
