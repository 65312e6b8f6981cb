"""The report's random prompt generator and its two figures: hit rate and items per second against p.

An engine of one slot: prefill of the tokens that no block gives, then decoding. Freed blocks stay in a pool of
`pool_blocks` until their space is needed, in the order of `?policy=pool`; the table is the real one. Time is counted,
not measured: every number repeats.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.keys import block_keys
from kvtide.types import BlockKey
from kvtide_lab.sim.policies import policy_named
from kvtide_lab.sim.workload import tenant_namespace

PROBABILITIES = tuple(step / 10 for step in range(1, 11))
_VOCABULARY = 32_000
_NAMESPACE = tenant_namespace("prompts")


class PromptSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The report's parameters, and what it leaves open: block size, pool sizes, the price of a token and of a block.

    The prices make the engine without a cache serve about as many items per second as the report's (417).
    """

    requests: int = 1000
    prompt_tokens: int = 15
    frequent_sequences: int = 50
    block_tokens: int = 4
    pool_blocks: int = 4096
    output_tokens_mean: float = 16.0
    prefill_token_s: float = 60e-6
    decode_token_s: float = 90e-6
    # Hashing and pool keeping of one block in Python, with the engine's own bookkeeping.
    block_overhead_s: float = 14e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt_tokens, self.frequent_sequences, self.block_tokens) < 1:
            raise ValueError(f"counts of requests, tokens and sequences must be at least 1, got {self}")
        if self.pool_blocks < 0:
            raise ValueError(f"pool_blocks must not be negative, got {self.pool_blocks}")


class PromptPoint(msgspec.Struct, frozen=True):
    """One point of both figures. Hit rates by full blocks of the prompts, and by all blocks, generated ones too."""

    p: float
    hit_rate: float
    hit_rate_all: float
    items_per_s: float
    items_per_s_uncached: float


class PromptReport(msgspec.Struct, frozen=True):
    """Both figures of the report's experiment; `identical` is its case of one single prompt."""

    setup: PromptSetup
    rows: list[PromptPoint]
    identical: PromptPoint


class FreePool:
    """Blocks with reference count 0. `add`, `take_back` and the eviction that `add` may cause are O(log n)."""

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max >= 0
        self.blocks_max = blocks_max
        # Of each block its last use and the negative length of its prefix: what is least goes first.
        self._ranks: dict[BlockKey, tuple[float, int]] = {}
        # One entry for each block, and some of blocks that were taken back.
        self._heap: list[tuple[tuple[float, int], BlockKey]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, key: BlockKey, last_use_s: float, prefix_blocks: int) -> BlockKey | None:
        """Free a block that is not here; return the one that has to go for it, which may be itself."""
        assert key not in self._ranks
        rank = self._ranks[key] = (last_use_s, -prefix_blocks)
        heapq.heappush(self._heap, (rank, key))
        return self.evict() if len(self._ranks) > self.blocks_max else None

    def take_back(self, key: BlockKey) -> bool:
        """Remove a block that comes back into use. False if it is not here."""
        return self._ranks.pop(key, None) is not None

    def evict(self) -> BlockKey | None:
        """Remove the block that goes first and return it; None if the pool is empty."""
        while self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) == rank:
                del self._ranks[key]
                return key
        return None

    def check(self) -> None:
        """AssertionError if the pool contradicts itself."""
        assert len(self._ranks) <= self.blocks_max
        assert {(rank, key) for key, rank in self._ranks.items()} <= set(self._heap)


class _Engine:
    """Counts what one run costs, block by block."""

    def __init__(self, setup: PromptSetup) -> None:
        self._setup = setup
        self._clock = ManualClock()
        # The pool bounds the free blocks; besides them only those of one request exist.
        self._index = RadixIndex(self._clock, policy_named("lru"), setup.pool_blocks + 4 * setup.prompt_tokens + 4096)
        self.pool = FreePool(setup.pool_blocks)
        self.prompt_blocks = self.hit_blocks = self.all_blocks = 0
        self.cached_s = self.uncached_s = 0.0

    def serve(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        setup = self._setup
        keys = block_keys(_NAMESPACE, [*prompt, *output], setup.block_tokens)
        prompt_blocks = len(prompt) // setup.block_tokens
        hits = self._index.match(keys[:prompt_blocks])
        for key in keys[:hits]:
            self.pool.take_back(key)
        self._index.pin(keys)
        self._index.insert(_NAMESPACE, keys)
        decode_s = len(output) * setup.decode_token_s
        self.uncached_s += len(prompt) * setup.prefill_token_s + decode_s
        missed_tokens = len(prompt) - hits * setup.block_tokens
        self.cached_s += missed_tokens * setup.prefill_token_s + decode_s + len(keys) * setup.block_overhead_s
        self._clock.advance(self.cached_s - self._clock.monotonic_s())
        self._index.unpin(keys)
        self._free(keys)
        self.prompt_blocks += prompt_blocks
        self.hit_blocks += hits
        self.all_blocks += len(keys)

    def _free(self, keys: Sequence[BlockKey]) -> None:
        now_s = self._clock.monotonic_s()
        for position, key in enumerate(keys):
            # A generated block may have come back without a look-up: the same text was generated before.
            self.pool.take_back(key)
            evicted = self.pool.add(key, now_s, position + 1)
            if evicted is not None:
                self._index.remove(evicted)


def run_prompts(setup: PromptSetup, probabilities: Sequence[float] = PROBABILITIES) -> list[PromptPoint]:
    """Run the generator once for each p. ValueError for a p outside [0, 1]."""
    if not all(0 <= p <= 1 for p in probabilities):
        raise ValueError(f"probabilities must be from 0 to 1, got {list(probabilities)}")
    return [_point(setup, p) for p in probabilities]


def _point(setup: PromptSetup, p: float) -> PromptPoint:
    rng = random.Random(f"{setup.seed} {p}")
    frequent = [_tokens(rng, setup.prompt_tokens) for _ in range(setup.frequent_sequences)]
    engine = _Engine(setup)
    for _ in range(setup.requests):
        prompt = rng.choice(frequent) if rng.random() < p else _tokens(rng, setup.prompt_tokens)
        engine.serve(prompt, _tokens(rng, 1 + int(rng.expovariate(1 / setup.output_tokens_mean))))
    return PromptPoint(
        p,
        engine.hit_blocks / max(1, engine.prompt_blocks),
        engine.hit_blocks / max(1, engine.all_blocks),
        setup.requests / engine.cached_s,
        setup.requests / engine.uncached_s,
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
