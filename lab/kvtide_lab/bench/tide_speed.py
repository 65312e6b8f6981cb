"""Speed of tide on blocks of the real model on one pinned core, beside the model's prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.engines.calibrate.judge import block_metas, capture_blocks
from kvtide_lab.bench.codec_speed import TideSpeed, measure, pinned

QUALITY = 5e-3
REFINEMENTS = (0, 1, 2)
PREFILL_TOKENS = 1024
SECONDS_FULL, SECONDS_QUICK = 6.0, 0.7


class _Work(NamedTuple):
    meta: BlockMeta
    bits: BlockBits


def run(
    model: Any, ids: Sequence[int], layout: BlockLayout, profiles: Sequence[Profile], quick: bool
) -> list[TideSpeed]:
    """Measure every tide profile that fits on the text's third block, as bfloat16. ValueError for a shorter text."""
    if len(ids) < PREFILL_TOKENS:
        raise ValueError(f"the text must have {PREFILL_TOKENS} tokens, got {len(ids)}")
    ids = ids[:PREFILL_TOKENS]
    prefill_s = _prefill_s_per_token(lambda: capture_blocks(model, ids, layout))
    block = capture_blocks(model, ids, layout)[2]
    narrow = BlockLayout(layout.layers, layout.tokens, layout.kv_heads, layout.head_dim, KVDtype.BFLOAT16)
    work = _Work(block_metas(ids, narrow)[2], _bfloat(block))
    seconds = SECONDS_QUICK if quick else SECONDS_FULL
    with pinned():
        return [
            _measured(profile, refinements, work, prefill_s, seconds)
            for profile in profiles
            if profile.kind.startswith("tide") and profile.fits(narrow)
            for refinements in REFINEMENTS
        ]


def _prefill_s_per_token(prefill: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        prefill()
        times.append(time.perf_counter() - start)
    return median(times) / PREFILL_TOKENS


def _bfloat(bits: NDArray[Any]) -> BlockBits:
    """Return float32 patterns as bfloat16 ones, cut: what is measured is speed."""
    return (bits >> np.uint32(16)).astype(np.uint16)


def _measured(profile: Profile, refinements: int, work: _Work, prefill_s: float, seconds: float) -> TideSpeed:
    codec, (meta, bits) = TideCodec(profile, QUALITY, refinements), work
    sections, out = codec.encode(meta, bits), np.empty_like(bits)
    # One thread: its CPU time is what it takes on a core of its own, whatever else runs.
    decode = measure(lambda: codec.decode(meta, sections, out), bits.size, seconds, time.thread_time)
    encode = measure(lambda: codec.encode(meta, bits), bits.size, seconds, time.thread_time)
    decode_s = bits.size / meta.layout.tokens / (decode.median * 1e9)
    return TideSpeed(
        profile=profile.kind,
        kv_dtype=meta.layout.dtype.value,
        quality=QUALITY,
        refinements=refinements,
        bits_per_element=8 * sum(len(section.data) for section in sections) / bits.size,
        decode_gelem_s=decode.median,
        decode_spread=decode.spread,
        encode_gelem_s=encode.median,
        encode_spread=encode.spread,
        decode_s_per_token=decode_s,
        prefill_s_per_token=prefill_s,
        decode_over_prefill=decode_s / prefill_s,
        encode_over_decode=decode.median / encode.median,
    )
