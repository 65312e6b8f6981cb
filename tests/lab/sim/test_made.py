"""Made-up traces, and what is simulated on them beside hit rates."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtide_lab.sim.made import MADE, made_trace
from kvtide_lab.sim.replay import standing
from kvtide_lab.sim.workload import read_trace


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
