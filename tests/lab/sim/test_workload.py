from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvtide_lab.sim.workload import TraceSource, WekaReplay, build_trace, read_trace


def write(path: Path, *rows: dict[str, Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def mooncake(timestamp: int, *hash_ids: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": 9, "output_length": 1, "hash_ids": hash_ids}


def test_mooncake_times_are_milliseconds_and_order_is_by_time(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", mooncake(3000, 1, 2), mooncake(1000, 1)))
    assert [request.at_s for request in trace.requests] == [1.0, 3.0]
    assert (trace.block_tokens, trace.unique_blocks) == (512, 2)
    assert trace.requests[0].keys == trace.requests[1].keys[:1]


def test_equal_ids_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", mooncake(0, 1, 3), mooncake(1, 2, 3)))
    assert trace.unique_blocks == 4


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
        (b"\xff\n", "line 1 is no such request"),
        (b'{"timestamp": 1, "hash_ids": [1]}\n\n{"timestamp": 1, "hash_ids": ["x"]}\n', "line 3 is no such request"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, -4]]}\n', "run of blocks has length -4"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, 1e9]]}\n', "line 1 is no such request"),
        (b'{"sid": "a", "t": 1, "model": "m", "h": [[1, 999999999]]}\n', "run of blocks has length 999999999"),
    ],
)
def test_bad_traces_are_refused_with_the_place(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_too_long_request_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576"):
        build_trace("t", 16, [TraceSource(0.0, "a", range(1 << 20 | 1))])


def test_requests_without_a_block_are_left_out() -> None:
    assert build_trace("t", 16, [TraceSource(0.0, "a", ()), TraceSource(1.0, "a", (1,))]).unique_blocks == 1
