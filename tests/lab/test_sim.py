"""Commands of simulators: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtide_lab.cli.sim import app


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * n, "hash_ids": [0, n % 5, n % 3]} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def reported(*words: object) -> Any:
    return json.loads(CliRunner().invoke(app, [*map(str, words), "--json"]).stdout)


def test_trace_prints_hit_rates_between_lru_and_bound(trace_file: Path) -> None:
    report = reported("trace", trace_file, "--policy", "arc", "--capacity", 4)
    assert [row["policy"] for row in report["rows"]] == ["lru", "arc", "belady"]
    assert report["rows"][0]["capacity_blocks"] == 4
    assert report["rows"][2]["gap_closed"] == 1.0
    assert report["rows"][0]["hit_rate"] <= report["rows"][2]["hit_rate"]


def test_share_of_the_blocks_is_written_with_a_percent_sign(trace_file: Path) -> None:
    report = reported("trace", trace_file, "--capacity", "50%", "--capacity", 3)
    assert [row["capacity_blocks"] for row in report["rows"]] == [report["unique_blocks"] // 2] * 3 + [3] * 3


def test_prompts_prints_both_figures() -> None:
    report = reported("prompts")
    assert len(report["rows"]) == 10
    assert set(report["rows"][0]) >= {"p", "hit_rate", "items_per_s", "items_per_s_uncached"}


def test_fairness_prints_a_row_for_each_policy() -> None:
    arguments = ["fairness", "--seconds", "3", "--client", "4096:1", "--client", "256:3:2:1.5"]
    report = reported(*arguments)
    assert [row["policy"] for row in report["rows"]] == ["fifo", "lottery", "vtc"]
    assert report["clients"] == 4
    assert report["jain_vtc"] > report["jain_fifo"]
    assert "lottery" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace nowhere.jsonl", "no trace at nowhere.jsonl"),
        ("trace FILE --policy fifo", "unknown policy 'fifo'"),
        ("trace FILE --capacity 0", "--capacity must be positive"),
        ("trace FILE --capacity -3%", "--capacity must be positive"),
        ("trace FILE --capacity nan%", "--capacity must be positive"),
        ("trace FILE --capacity 0.03", "a share as in 3%, got '0.03'"),
        ("trace FILE --capacity many", "a share as in 3%, got 'many'"),
        ("trace FILE --sessions -1", "--sessions must not be negative"),
        ("fairness --client 16", "--client is KIB:COUNT"),
        ("fairness --client 16:x", "--client is KIB:COUNT"),
        ("fairness --client 16:1:1:1:1", "--client is KIB:COUNT"),
        ("fairness --link 0", "link_bits_s must be positive"),
        ("stream --link nowhere", "unknown link 'nowhere'"),
        ("stream --link EMPTY", "no traces in"),
        ("stream --policy best", "unknown policy 'best'"),
        ("stream --mean-gbit -1", "--mean-gbit must not be negative"),
        ("stream --trials -1", "must be given and positive"),
        ("stream --context 0", "must be given and positive"),
    ],
)
def test_bad_arguments_are_refused(trace_file: Path, tmp_path: Path, words: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    given = words.replace("FILE", str(trace_file)).replace("EMPTY", str(tmp_path / "empty"))
    result = CliRunner().invoke(app, given.split())
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_several_traces_give_a_line_each(trace_file: Path) -> None:
    arguments = ["trace", str(trace_file), str(trace_file), "--compare", "--capacity", "3"]
    report = reported(*arguments)
    assert len(report["rows"]) == 2
    assert set(report["rows"][0]["hit_rates"]) >= {"lru", "s3fifo", "arc", "reuse", "mix", "belady"}
    assert report["regret_max"] == max(row["regret"] for row in report["rows"])
    assert report["gap_closed_mean"] == report["rows"][0]["gap_closed"] == report["rows"][1]["gap_closed"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_traces_share_a_cache_as_tenants_and_hints_come_with_each(trace_file: Path) -> None:
    both = f"{trace_file}+{trace_file}"
    rows = reported("trace", both, trace_file, "--compare", "--hints", "ends", "--capacity", 3)["rows"]
    assert rows[0]["trace"] == f"{trace_file.name}+{trace_file.name}"
    alone = reported("trace", trace_file, "--capacity", 999)
    shared = reported("trace", both, "--capacity", 999)
    assert shared["unique_blocks"] == 2 * alone["unique_blocks"]
    assert [each["blocks"] for each in shared["rows"][0]["tenants"]] == [alone["blocks"]] * 2
    assert shared["rows"][0]["hit_rate"] == alone["rows"][0]["hit_rate"]


FAST = ["--context", "9600", "--slo", "1", "--trials", "4"]


def test_rows_have_what_they_promise(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("0,100\n1,5000\n2,1\n", encoding="utf-8")
    (tmp_path / "a.down").write_text("1\n1\n3\n7\n", encoding="utf-8")
    report = reported("stream", "--link", "ar1", "--link", tmp_path, "--policy", "all", *FAST)
    keys = ["link", "context_tokens", "slo_s", "policy", "miss_rate", "kl_mean", "ttft_p50_s", "ttft_p95_s"]
    assert all({*keys, "text_share"} <= set(row) for row in report["rows"])
    assert list(dict.fromkeys(row["link"] for row in report["rows"])) == ["ar1", "a.down", "b.csv"]
    assert {"cachegen", "two-ended", "oracle"} <= {row["policy"] for row in report["rows"]}
    assert report["setup"]["context_tokens"] == [9600]


def test_traces_keep_their_own_mean_if_asked(tmp_path: Path) -> None:
    # 1 Mbit/s: nobody loads 9,600 tokens in a second.
    (tmp_path / "slow.csv").write_text("0 1\n9 1\n", encoding="utf-8")
    words = ("stream", "--link", tmp_path / "slow.csv", "--mean-gbit", 0, "--policy", "layered", *FAST)
    rows = reported(*words)["rows"]
    assert rows[0]["miss_rate"] == 1
    assert rows[0]["ttft_p50_s"] > 10
