"""Profiles of made-up models, fitted as real ones are."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.suites import block_meta, smooth_bits

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.rotary import Frequencies, Pairs, Rotary
from kvtide.codec.tide import APART_TOKENS, fit
from kvtide.codec.tide.fit import COSTS, Moments, TideCounts, draft_profiles, finished_profile

Block = tuple[BlockMeta, BlockBits]
# Three ranges of five layers.
LAYOUT = BlockLayout(layers=15, tokens=16, kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32)
# Rising, as a measured one would.
CURVE = np.array([[-40, 5, 1e-4], [0, 1, 1e-2], [30, 0.5, 1e-1]], dtype=np.float32)


def rotary_of(layout: BlockLayout) -> Rotary | None:
    """Rotary parameters for even heads."""
    return None if layout.head_dim % 2 else rotary_by(10_000.0, layout.head_dim)


def rotary_by(theta: float, dims: int) -> Rotary:
    """Rotary parameters of whole heads by a base, as Llama has them."""
    values = (theta ** (-np.arange(0, dims, 2) / dims)).astype(np.float32).tolist()
    return Rotary(Pairs.HALVES, 0, dims, (Frequencies(tuple(values), 1.0, 0),))


def blocks_of(layout: BlockLayout, make: Callable[[BlockLayout, int], BlockBits], count: int = 12) -> list[Block]:
    """Made blocks behind the tokens that are kept apart wherever they are."""
    meta = block_meta(layout, 0, -(-APART_TOKENS // layout.tokens))
    return [(meta, make(layout, seed)) for seed in range(count)]


def fitted(layout: BlockLayout, cost: str = "layer", blocks: int = 12) -> Profile:
    """A profile of normally distributed values."""
    return fitted_to(layout, cost, rotary_of(layout), blocks_of(layout, smooth_bits, blocks))


def alike_bits(layout: BlockLayout, seed: int) -> BlockBits:
    """A block in float32 whose heads have most in common."""
    extent = (layout.layers, 2, layout.tokens, layout.kv_heads, layout.head_dim)
    rng, channels = np.random.default_rng(seed), layout.kv_heads * layout.head_dim
    common = rng.normal(size=(*extent[:3], 6)) @ np.random.default_rng(1).normal(size=(6, channels))
    values = common + rng.normal(0, 0.2, (*extent[:3], channels))
    return np.ascontiguousarray(values.reshape(extent).astype(np.float32)).view(np.uint32)


def of_alike(layout: BlockLayout, cost: str) -> Profile:
    return fitted_to(layout, cost, rotary_of(layout), blocks_of(layout, alike_bits))


def staged(layout: BlockLayout) -> Profile:
    """The same with a transform in two stages, as those of wide layers are."""
    with patch.object(fit, "DENSE_VALUES_MAX", 0):
        return of_alike(layout, "layer")


# Of one head's eight dims: keys have two that are louder than others, as by a large bias, and one that is softer.
LOUDER = np.array([[1, 64, 1, 1, 1, 64, 1, 1 / 16], [1] * 8], dtype=np.float32)


def out_of_line_bits(layout: BlockLayout, seed: int) -> BlockBits:
    """The same block as `smooth_bits` makes, with a few dims of keys louder or softer. No RoPE."""
    values = smooth_bits(layout, seed).view(np.float32) * LOUDER[None, :, None, None]
    return np.ascontiguousarray(values).view(np.uint32)


def out_of_line(layout: BlockLayout, cost: str = "layer") -> Profile:
    """The profile of such blocks, whose loud dims the model reads as much more softly."""
    blocks = blocks_of(layout, out_of_line_bits)
    return fitted_to(layout, cost, None, blocks, np.tile(LOUDER, (1, layout.kv_heads)) ** -2)


def in_line(layout: BlockLayout, cost: str = "layer") -> Profile:
    """The profile of the same blocks without that."""
    return fitted_to(layout, cost, None, blocks_of(layout, smooth_bits))


def fitted_on(model: Any, layout: BlockLayout, prompt: Any) -> Profile:
    """A profile of what a tiny model makes of a prompt's tokens in many orders."""
    # Others need no torch.
    from kvtide.engines.transformers import contexts
    from kvtide_lab.judge.quality import block_metas, capture_blocks

    rng, ids = np.random.default_rng(1), prompt[0].numpy()
    pairs: list[Block] = []
    for _ in range(24):
        mixed = rng.permutation(ids).tolist()
        pairs += zip(block_metas(mixed, layout), capture_blocks(model, mixed, layout), strict=True)
    return fitted_to(layout, "layer", contexts.rotary_of(model), pairs)


def fitted_to(
    layout: BlockLayout, cost: str, rotary: Rotary | None, pairs: Sequence[Block], sensitivity: Any = 1.0
) -> Profile:
    """A profile of these blocks, whose curve is made up. sensitivity: of the model, by value."""
    moments = Moments(layout, COSTS[cost])
    for meta, bits in pairs:
        moments.add(meta, bits, rotary)
    moments.add_text(sensitivity * np.ones((layout.layers, 2, layout.kv_heads * layout.head_dim)))
    (draft,) = draft_profiles("made up", cost, [(layout, moments.state)], [rotary])
    counts = TideCounts(draft)
    for seed, (meta, bits) in enumerate(pairs):
        counts.add(meta, bits, seed)
    return finished_profile(draft, layout, counts.state, CURVE, CURVE)
