from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.types import BlockKey
from kvtide_lab.sim.belady import belady_hits
from kvtide_lab.sim.policies import POLICIES
from kvtide_lab.sim.replay import BELADY, capacity_blocks, compare, replay
from kvtide_lab.sim.workload import Trace, TraceSource, build_trace


def trace_of(*prompts: Sequence[int], tenants: str = "a") -> Trace:
    cycle = itertools.cycle(tenants)
    return build_trace("t", 16, [TraceSource(float(i), next(cycle), prompt) for i, prompt in enumerate(prompts)])


def best_hits(trace: Trace, blocks_max: int) -> int:
    """Try every way to keep a prefix-closed set after each request."""
    states: dict[frozenset[BlockKey], int] = {frozenset(): 0}
    parents = {key: before for r in trace.requests for before, key in zip([None, *r.keys[:-1]], r.keys, strict=True)}
    for request in trace.requests:
        nexts: dict[frozenset[BlockKey], int] = {}
        for held, hits in states.items():
            hit = next((i for i, key in enumerate(request.keys) if key not in held), len(request.keys))
            pool = held | set(request.keys)
            for size in range(min(blocks_max, len(pool)) + 1):
                for kept in map(frozenset, itertools.combinations(pool, size)):
                    if all(parents[key] is None or parents[key] in kept for key in kept):
                        nexts[kept] = max(nexts.get(kept, 0), hits + hit)
        states = nexts
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6),
    blocks_max=st.integers(0, 4),
)
def test_belady_is_the_best_of_all_ways(prompts: list[list[int]], blocks_max: int) -> None:
    trace = trace_of(*prompts)
    assert belady_hits(trace, blocks_max) == best_hits(trace, blocks_max)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    blocks_max=st.integers(0, 12),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_no_policy_beats_belady(prompts: list[list[int]], blocks_max: int, policy: str) -> None:
    trace = trace_of(*prompts)
    assert replay(trace, policy, blocks_max).hit_blocks <= belady_hits(trace, blocks_max)


@pytest.mark.parametrize("policy", POLICIES)
def test_cache_that_holds_everything_hits_every_repetition(policy: str) -> None:
    trace = trace_of([1, 2, 3], [1, 2, 4], [1, 2, 3], [9])
    result = replay(trace, policy, trace.unique_blocks)
    assert (result.blocks, result.hit_blocks) == (10, 5)


def test_tenants_with_equal_prompts_do_not_hit_each_other() -> None:
    result = replay(trace_of([1, 2], [1, 2], [1, 2], [1, 2], tenants="ab"), "lru", 100)
    assert [(each.tenant, each.requests, each.blocks, each.hit_blocks) for each in result.tenants] == [
        ("a", 2, 4, 2),
        ("b", 2, 4, 2),
    ]


def test_comparison_sets_each_policy_between_lru_and_the_bound() -> None:
    # A loop over three blocks: LRU with room for two hits nothing, the best cache keeps two and hits these.
    trace = trace_of(*([[n] for n in (1, 2, 3)] * 10))
    rows = {row.policy: row for row in compare(trace, ["lru", "arc"], [0.7])}
    assert rows["lru"].gap_closed == 0.0
    assert rows[BELADY].gap_closed == 1.0
    assert rows["lru"].hit_rate == 0.0
    assert rows[BELADY].hit_blocks == 18


def test_gap_is_unknown_where_lru_is_best() -> None:
    assert [row.gap_closed for row in compare(trace_of([1], [1]), ["lru"], [1.0])] == [None, None]


def test_unknown_policy_and_bad_share_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fifo'"):
        replay(trace_of([1]), "fifo", 1)
    with pytest.raises(ValueError, match="more than 0 and at most 1, got 0"):
        capacity_blocks(trace_of([1]), 0)
