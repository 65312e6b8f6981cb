"""Packing: an order of a block's tokens that puts important ones into the same chunks; what a choice then reads.

An order lists logical tokens as they are stored: `order[place] = token`. It never leaves its block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.importance.probe import Floats, top_tokens

CHUNK_TOKENS = 32
# (layers, tokens): for each layer the logical tokens as they are stored.
Orders = NDArray[np.uint16]


def packing_orders(scores: Floats) -> Orders:
    """Return orders, most important first, by scores (layers, tokens). ValueError for scores that are not finite."""
    if scores.ndim != 2 or not np.isfinite(scores).all():
        raise ValueError(f"expected finite scores (layers, tokens), got {scores.shape}")
    return np.argsort(-scores, axis=1, kind="stable").astype(np.uint16)


def is_order(orders: NDArray[np.uint16]) -> bool:
    """Tell whether each row has every token once."""
    return bool((np.sort(orders, axis=1) == np.arange(orders.shape[1], dtype=np.uint16)).all())


def chunks_of(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return the places [start, stop) of each chunk; the last may be shorter."""
    return [(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


def select_chunks(importance: Floats, orders: NDArray[np.uint16], count: int, chunk_tokens: int) -> NDArray[np.int64]:
    """Return the chunks of a layer that together have `count` tokens or just more, the most important ones.

    importance: (blocks, tokens), infinite for what must come; orders: (blocks, tokens). Chunks are numbered through
    all blocks: block times chunks of a block plus chunk.
    """
    blocks, tokens = orders.shape
    if importance.shape != orders.shape:
        raise ValueError(f"importance {importance.shape} of orders {orders.shape}")
    spans = chunks_of(tokens, chunk_tokens)
    stored = np.take_along_axis(importance.astype(np.float64), orders.astype(np.int64), axis=1)
    starts = [start for start, _ in spans]
    totals = np.add.reduceat(stored, starts, axis=1)
    sizes = np.broadcast_to(np.array([stop - start for start, stop in spans]), totals.shape)
    ranked = np.argsort(-(totals / sizes).reshape(-1), kind="stable")
    filled = np.cumsum(sizes.reshape(-1)[ranked])
    needed = int(np.searchsorted(filled, min(count, blocks * tokens))) + 1 if count else 0
    must = int(np.isinf(totals).sum())
    return np.sort(ranked[: max(needed, must)])


class Gain(NamedTuple):
    """Share of a block's chunks that its most important tokens touch: as it is stored now, and packed anew."""

    now: float
    packed: float


def expected_gain(scores: Floats, orders: Orders, ratio: float, chunk_tokens: int) -> Gain:
    """Return what packing by scores would change, in the mean over layers."""
    layers, tokens = orders.shape
    count = max(1, round(ratio * tokens))
    chunks = len(chunks_of(tokens, chunk_tokens))
    touched = 0
    for layer in range(layers):
        places = np.argsort(orders[layer], kind="stable")
        touched += len(np.unique(places[top_tokens(scores[layer], count)] // chunk_tokens))
    return Gain(touched / (layers * chunks), -(-count // chunk_tokens) / chunks)
