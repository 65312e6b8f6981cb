from __future__ import annotations

import msgspec
import pytest

from kvtide_lab.bench import index as bench


def test_every_policy_is_measured_at_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BLOCKS_SMALL", 500)
    monkeypatch.setattr(bench, "BLOCKS_LARGE", 2000)
    monkeypatch.setattr(bench, "MEASURED_BLOCKS_QUICK", 2000)
    monkeypatch.setattr(bench, "KEY_TOKENS", 1600)
    result = bench.run(quick=True)
    assert [(row.policy, row.resident_blocks) for row in result.rows] == [
        (policy, blocks) for policy in ("lru", "mix") for blocks in (500, 2000)
    ]
    assert result.ns_per_block == result.rows[1].ns_per_block > 0
    assert result.growth == result.ns_per_block / result.rows[0].ns_per_block
    assert 50 < result.bytes_per_block < 400
    assert set(msgspec.to_builtins(result)) >= {"ns_per_block", "growth", "bytes_per_block", "key_ns_per_block"}
