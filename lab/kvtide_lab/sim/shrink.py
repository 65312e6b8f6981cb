"""Blocks that shrink before they go: under pressure a `tide` object loses its refinements first, and is hit rough.

Two indexes under one policy: one says which blocks are held at all, a smaller one which of them are held whole; their
sizes are chosen so that all bytes together are those of a cache of whole blocks. What was shrunk stays rough until it
is computed again, though its place among the whole ones is charged again when it is used: bytes are never too few.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.types import BlockKey
from kvtide_lab.sim.curves import CURVES
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.replay import capacity_blocks
from kvtide_lab.sim.workload import Trace, tenant_namespace

# How many times as many blocks are held as fit whole.
SPREADS = (1.0, 1.5, 2.0, 3.0)
_TIDE = CURVES["tide"]


class ShrinkRow(msgspec.Struct, frozen=True):
    """One way to spend the bytes. `kept`: refinements of a shrunk block; `kl`: mean over hit blocks, as stored."""

    capacity_share: float
    kept: int
    held_blocks: int
    whole_blocks: int
    hit_rate: float
    rough_share: float
    kl: float


class ShrinkReport(msgspec.Struct, frozen=True):
    """All ways, at equal bytes for each capacity; the first of each shrinks nothing."""

    trace: str
    policy: str
    rows: list[ShrinkRow]


def run_shrink(trace: Trace, policy: str, shares: Sequence[float]) -> ShrinkReport:
    """Replay a trace for every capacity, count of kept refinements and spread that the bytes allow."""
    rows, whole_bits = [], sum(_TIDE.bits)
    for share in shares:
        blocks_max = capacity_blocks(trace, share)
        rows.append(_row(trace, policy, share, len(_TIDE.bits), blocks_max, blocks_max))
        for kept in range(1, len(_TIDE.bits)):
            bits = sum(_TIDE.bits[:kept])
            for spread in SPREADS[1:]:
                held = int(spread * blocks_max)
                whole = int((blocks_max * whole_bits - held * bits) / (whole_bits - bits))
                if whole > 0:
                    rows.append(_row(trace, policy, share, kept, held, whole))
    return ShrinkReport(trace.name, policy, rows)


def _row(trace: Trace, policy: str, share: float, kept: int, held_max: int, whole_max: int) -> ShrinkRow:
    clock = ManualClock(trace.requests[0].at_s)
    held, whole = (RadixIndex(clock, policy_named(policy), blocks_max) for blocks_max in (held_max, whole_max))
    rough: set[BlockKey] = set()
    asked = hits = rough_hits = 0
    for at_s, tenant, keys in trace.requests:
        clock.advance(at_s - clock.monotonic_s())
        namespace, hit = tenant_namespace(tenant), held.match(keys)
        asked, hits = asked + len(keys), hits + hit
        rough_hits += sum(key in rough for key in keys[:hit])
        # What is computed now is whole, for as long as there is room.
        rough.difference_update(keys[hit:])
        shrunk, gone = whole.insert(namespace, keys), held.insert(namespace, keys)
        rough.update(shrunk)
        rough.difference_update(gone)
    rough_share = rough_hits / max(1, hits)
    kl = rough_share * _TIDE.kl[kept - 1] + (1 - rough_share) * _TIDE.kl[-1]
    return ShrinkRow(share, kept, held_max, whole_max, hits / max(1, asked), rough_share, kl)
