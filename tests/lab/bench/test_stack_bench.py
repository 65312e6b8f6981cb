from __future__ import annotations

from pathlib import Path

import pytest

from kvtide_lab.bench import stack
from kvtide_lab.sim.workload import read_trace


def test_every_policy_replays_the_same_look_ups() -> None:
    result = stack.run(quick=True, requests=stack.synthetic_trace(200))
    assert [row.policy for row in result.rows] == ["lru", "lfu", "score"]
    for row in result.rows:
        assert row.device_hit_ratio + row.memory_hit_ratio + row.disk_hit_ratio == pytest.approx(1.0)
        assert 0 < row.fast_hit_ratio < 1
        assert row.evicted_write_gb == 0


def test_score_keeps_what_is_important_where_uses_are_equal() -> None:
    requests = [[block] for _ in range(6) for block in range(100)]
    importance = {block: 256.0 if block % 20 == 7 else 1.0 for block in range(100)}
    rows = {row.policy: row for row in stack.run(False, requests, importance).rows}
    assert rows["score"].fast_important_ratio > max(rows["lru"].fast_important_ratio, rows["lfu"].fast_important_ratio)


def test_run_repeats() -> None:
    first, second = (stack.run(True, stack.synthetic_trace(100)).rows for _ in range(2))
    assert first == second


def test_trace_files_are_read(tmp_path: Path) -> None:
    rows = [(0, [7, 9]), (1, [7]), (2, [7, 8])]
    (tmp_path / "trace").write_text("".join(f'{{"timestamp": {at}, "hash_ids": {ids}}}\n' for at, ids in rows))
    assert list(stack.trace_requests(read_trace(tmp_path / "trace"))) == [[0, 1], [0], [0, 2]]


def test_no_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        stack.run(True, [])
