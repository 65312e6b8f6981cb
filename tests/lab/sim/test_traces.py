"""Traces: read, made up, replayed by every policy beside the best possible, and with advice derived from them."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.types import BlockKey
from kvtide_lab.sim.made import MADE, made_trace
from kvtide_lab.sim.policies import POLICIES
from kvtide_lab.sim.replay import BELADY, HINTS, belady_hits, compare, hints_of, replay, standing
from kvtide_lab.sim.workload import Trace, TraceSource, WekaReplay, build_trace, read_trace


def write(path: Path, *rows: dict[str, Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def mooncake(timestamp: int, *hash_ids: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": 9, "output_length": 1, "hash_ids": hash_ids}


def test_mooncake_times_are_milliseconds_order_is_by_time_and_equal_ids_behind_other_prefixes_are_others(
    tmp_path: Path,
) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", mooncake(3000, 1, 2), mooncake(2000), mooncake(1000, 1)))
    assert [request.at_s for request in trace.requests] == [1.0, 3.0]
    assert (trace.block_tokens, trace.unique_blocks) == (512, 2)
    assert trace.requests[0].keys == trace.requests[1].keys[:1]
    assert read_trace(write(tmp_path / "a.jsonl", mooncake(0, 1, 3), mooncake(1, 2, 3))).unique_blocks == 4


def test_bailian_has_seconds_small_blocks_and_types_as_tenants(tmp_path: Path) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "type": "text", "turn": 1, "hash_ids": [4, 5]}
    trace = read_trace(write(tmp_path / "b.jsonl", row, {**row, "type": "search"}))
    assert (trace.block_tokens, trace.requests[0].at_s, trace.requests[0].tenant) == (16, 2.5, "text")
    assert not set(trace.requests[0].keys) & set(trace.requests[1].keys)


def weka(sid: str, t: float, *h: tuple[int, int]) -> dict[str, Any]:
    return {"sid": sid, "t": t, "depth": 0, "in": 1, "out": 1, "model": "m", "api": 1.0, "think": 0.0, "h": h}


def test_weka_sessions_are_staggered_and_keep_to_themselves(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl.gz", weka("s2", 5.0, (1, 17)), weka("s1", 7.0, (1, 8), (40, 8)))
    trace = read_trace(path)
    assert [(request.at_s, len(request.keys)) for request in trace.requests] == [(7.0, 2), (125.0, 2)]
    assert (trace.block_tokens, trace.unique_blocks) == (512, 4)


def test_weka_takes_the_first_sessions_by_id(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", *(weka(f"s{n}", 0.0, (1, 8)) for n in (3, 1, 2)))
    assert len(read_trace(path, WekaReplay(sessions_max=2)).requests) == 2
    assert len(read_trace(path, WekaReplay(sessions_max=None, join=4)).requests[0].keys) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "has no requests"),
        (b"{}\n", "no known trace format"),
        (b"[1]\n", "line 1 is no such request"),
        (b"\xff\n", "line 1 is no"),
        (b'{"hash_ids": ' + b"[" * 100_000, "line 1 is no request"),
        (b'{"timestamp": 1, "hash_ids": []}\n', "no request of a full block"),
        (gzip.compress(b'{"timestamp": 1, "hash_ids": []}\n', mtime=0)[:-9], "can't read"),
        (b'{"timestamp": 1, "hash_ids": [1]}\n\n{"timestamp": 1, "hash_ids": ["x"]}\n', "line 3 is no such request"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, -4]]}\n', "run of blocks has length -4"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, 1e9]]}\n', "line 1 is no such request"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, 999999999]]}\n', "run of blocks has length 999999999"),
    ],
)
def test_bad_traces_are_refused_with_the_place(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / ("bad.gz" if text.startswith(b"\x1f") else "bad.jsonl")
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


@pytest.mark.parametrize("name", MADE)
def test_made_up_traces_repeat_and_are_in_order_of_time(name: str) -> None:
    trace = made_trace(name, 300)
    assert trace == made_trace(name, 300)
    assert trace != made_trace(name, 300, seed=1)
    times_s = [request.at_s for request in trace.requests]
    assert times_s == sorted(times_s)
    assert len(times_s) == 300
    assert trace.unique_blocks < sum(len(request.keys) for request in trace.requests)


@pytest.mark.parametrize("name", ["templates", "drift", "sessions"])
def test_mix_is_close_to_the_best_fixed_policy(name: str) -> None:
    found = standing(made_trace(name, 1500), "mix", ["lru", "s3fifo", "arc", "reuse"], 0.1)
    assert found.regret < 0.02
    assert found.regret == found.hit_rates[found.best] - found.hit_rates["mix"]


def test_sessions_of_texts_are_read_from_a_folder(tmp_path: Path) -> None:
    for session in ("a", "b"):
        rows = [{"timestamp": 10**6 * n, "input": session * 256 * (n + 1), "output": ""} for n in (1, 0, 2)]
        with gzip.open(tmp_path / f"{session}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))
    trace = read_trace(tmp_path)
    assert [(request.at_s, len(request.keys)) for request in trace.requests[:3]] == [(0.0, 1), (1.0, 2), (2.0, 3)]
    assert (len(trace.requests), trace.unique_blocks) == (6, 6)


def trace_of(*prompts: Sequence[int], tenants: str = "a") -> Trace:
    cycle = itertools.cycle(tenants)
    # In pairs; to what comes before, the difference adds up to a little more than the second of a pair.
    sources = (TraceSource((36 + 296 * ((i + 1) // 2)) * 1e-3, next(cycle), each) for i, each in enumerate(prompts))
    return build_trace("t", 16, sources)


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
    found = [(each.tenant, each.requests, each.blocks, each.hit_blocks) for each in result.tenants]
    assert found == [("a", 2, 4, 2), ("b", 2, 4, 2)]


def test_comparison_sets_each_policy_between_lru_and_the_bound() -> None:
    # A loop over three blocks: LRU with room for two hits nothing, the best cache keeps two and hits these.
    trace = trace_of(*([[n] for n in (1, 2, 3)] * 10))
    rows = {row.policy: row for row in compare(trace, ["lru", "arc"], [0.7])}
    assert rows["lru"].gap_closed == 0.0
    assert rows[BELADY].gap_closed == 1.0
    assert rows["lru"].hit_rate == 0.0
    assert rows[BELADY].hit_blocks == 18
    # The gap is unknown where LRU is best.
    assert [row.gap_closed for row in compare(trace_of([1], [1]), ["lru"], [1.0])] == [None, None]


TRACE = build_trace(
    "three sessions",
    16,
    [
        TraceSource(0.0, "a", [1, 2, 3]),
        TraceSource(1.0, "a", [4, 5, 6]),
        # The last block of the turn before was filled in part.
        TraceSource(2.0, "a", [1, 2, 7, 8]),
        TraceSource(3.0, "b", [4, 5, 6, 9]),
    ],
)


def test_ends_are_requests_that_no_longer_one_of_the_tenant_goes_on_from() -> None:
    assert [hint.is_last for hint in hints_of(TRACE, "ends")] == [False, True, True, True]
    assert [hint.is_last for hint in hints_of(TRACE, "lies")] == [True, False, False, False]
    assert [hint.is_last for hint in hints_of(TRACE, "turncoat")] == [False, True, False, False]


def test_retention_comes_from_earlier_gaps_alone() -> None:
    turns = [TraceSource(100.0 * n + 40.0 * turn, "a", [n, *range(2 + turn)]) for n in range(30) for turn in range(2)]
    firsts = [hint.retain_s for hint in hints_of(build_trace("turns", 16, turns), "retain")][::2]
    assert firsts[0] is None
    assert firsts[-1] == pytest.approx(40.0)


@pytest.mark.parametrize("kind", HINTS)
def test_policy_that_takes_no_advice_is_not_changed_by_it(kind: str) -> None:
    trace = made_trace("sessions", 200)
    assert replay(trace, "lru", 50, hints=kind) == replay(trace, "lru", 50)


def test_true_ends_help_and_lies_cost_little() -> None:
    trace = made_trace("sessions", 1500)
    plain, told, lied = (replay(trace, "reuse", 250, hints=kind).hit_rate for kind in (None, "ends", "lies"))
    assert told > plain
    assert lied > plain - 0.01
