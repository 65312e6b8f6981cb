"""The bound: what a cache that knows the future would hit.

Belady's rule on blocks of one size: evict what is used again latest. A request uses all blocks before any that it uses,
so that a block's next use is never later than that of one after it; with ties evicted deepest first the rule never
breaks a prefix, and no policy, prefix-closed or not, hits more. Blocks of a request that are used again later than all
that is held are not kept at all: the bound covers admission too.
"""

from __future__ import annotations

import heapq

from kvtide.types import BlockKey
from kvtide_lab.sim.workload import Trace

_NEVER = 1 << 60


def belady_hits(trace: Trace, blocks_max: int) -> int:
    """Return the number of blocks, leading ones of their requests, that the best cache of this size would hit."""
    next_uses = _next_uses(trace)
    held: dict[BlockKey, tuple[int, int]] = {}
    latest: list[tuple[int, int, BlockKey]] = []
    hits = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        keys = request.keys
        hits += next((position for position, key in enumerate(keys) if key not in held), len(keys))
        for position, (key, use) in enumerate(zip(keys, uses, strict=True)):
            held[key] = (-use, -position)
            heapq.heappush(latest, (-use, -position, key))
        while len(held) > blocks_max:
            use, position, key = heapq.heappop(latest)
            if held.get(key) == (use, position):
                del held[key]
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    next_use: dict[BlockKey, int] = {}
    uses = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].keys
        uses.append([next_use.get(key, _NEVER) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    uses.reverse()
    return uses
