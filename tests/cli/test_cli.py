"""`kvtide`: what it says of odd objects and of mistakes, before a demo and before it serves."""

import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from tests.doors.user import kvtide
from tests.server.worlds import ask, put
from tests.servers import RunningServer, running_server
from tests.store.test_cache import fill, metas_of
from tests.stores import open_disk, opened, stored_records
from tests.suites.tier_suite import object_bytes, object_id
from typer.testing import CliRunner

from kvtide.block import BlockLayout
from kvtide.cli import demo_run
from kvtide.cli.app import app, run
from kvtide.cli.demo import DemoJob, DemoRequest, shown
from kvtide.clock import SystemClock
from kvtide.errors import UnencodableBlock
from kvtide.importance import UseRecord, record_id
from kvtide.plan import JudgeRecord
from kvtide.server.settings import read_settings
from kvtide.store.notes import USES_CODEC, write_judge, write_note
from kvtide.tier.disk import DiskTier
from kvtide.tier.http.tier import http_tier
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object

Command = Callable[..., tuple[object, str, str]]


def refused(*words: Any) -> str:
    """Return a command's complaint, one line; nothing else is printed."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, ValueError), result.output
    assert result.stdout == "" and "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a program with these words; return its status, what it printed, and what it complained of."""

    def ended(*words: str, program: typer.Typer = app) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtide", *words])
        with pytest.raises(SystemExit) as status:
            run(program)
        return status.value.code, *capsys.readouterr()

    return ended


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> Path:
    fill(open_cache(tmp_path / "store"), metas_of(layout, 3))
    return tmp_path / "store"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(60))))
    return tmp_path / "tokens.json"


def test_ls_shows_good_and_broken_objects(store: Path) -> None:
    stored_records(store)[0].write_body(b"garbage")
    rows = kvtide("ls", "--store", store)["rows"]
    assert sorted(bool(row["problem"]) for row in rows) == [False, False, True]
    record = stored_records(store)[1]
    record.write_body(record.body()[:-1] + bytes([record.body()[-1] ^ 1]))
    for words, problems in (((), 1), (("--verify",), 2)):
        assert sum(bool(row["problem"]) for row in kvtide("ls", *words, "--store", store)["rows"]) == problems
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["ls", "--store", str(store)]).stdout
    assert sorted(re.findall(r"\[\d+, \d+\)", shown)) == sorted(
        f"[{row['start']}, {row['start'] + row['tokens']})" for row in rows if not row["problem"]
    )


def test_a_record_of_uses_and_what_a_judge_knows_are_listed_as_such(store: Path, layout: BlockLayout) -> None:
    """Issue 11: they lie beside blocks, and are neither blocks nor a problem."""
    block = metas_of(layout, 1)[0].id
    importance = np.ones((layout.layers, layout.tokens), dtype=np.float32)
    record = UseRecord(block.key, layout.layers, layout.tokens).noted(b"writer-1", importance, 1e9)
    with closing(open_disk(store)) as tier:
        assert write_note(tier, record_id(block), USES_CODEC, record.to_bytes())
        assert write_judge(tier, JudgeRecord(bytes_per_s=1e9))
    for verify in ([], ["--verify"]):
        rows = kvtide("ls", *verify, "--store", store)["rows"]
        assert [row["problem"] for row in rows] == [""] * 5
        found = next(row for row in rows if row["codec"] == USES_CODEC)
        assert (found["model"], found["tokens"]) == ("uses of a block", 0)
    stats = kvtide("stats", "--store", store)
    counts = sorted((row["codec"][:8], row["objects"], row["tokens"]) for row in stats["rows"])
    assert (stats["problems"], counts) == (0, [("judge-1", 1, 0), ("lossless", 3, 48), ("uses-1", 1, 0)])


def test_explain_shows_a_models_name_as_it_is(store: Path, layout: BlockLayout, tokens: Path) -> None:
    meta, parts = replace(metas_of(layout, 2)[1], model="[/b]"), SectionId(SectionKind.DATA, 0, 0, layout.layers)
    with closing(open_disk(store)) as tier:
        assert tier.delete(meta.id, "removed")
        assert tier.put_from(meta.id, pack_object(meta, "odd-1", [Section(parts, b"?")]))
    words = ["explain", "--tokens", tokens, "--block-tokens", 16, "--store", store]
    assert "of model [/b]" in CliRunner().invoke(app, [*map(str, words)]).stdout


@pytest.mark.parametrize("words", [[], ["xyzq"], ["ab"], ["abcd", "--all"]])
def test_rm_without_a_clear_choice_removes_nothing(words: list[str], store: Path) -> None:
    refused("rm", *words, "--store", store)
    assert len(stored_records(store)) == 3


def test_rm_that_may_not_remove_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "delete", lambda *given: False)
    assert "3 objects could not be removed, 0 were" in refused("rm", "--all", "--yes", "--store", store)


@pytest.mark.parametrize("content", ["", "{}", "[1, 'a']", '["a"]', "\xff"])
def test_explain_refuses_a_bad_token_file(content: str, store: Path, tokens: Path) -> None:
    tokens.write_text(content, encoding="latin-1")
    refused("explain", "--tokens", tokens, "--store", store)


@pytest.mark.parametrize(("target", "said"), [("file", "not a directory"), ("no", "nowhere"), ("store", "nowhere")])
def test_doctor_names_a_store_that_is_a_file_or_a_link_to_none(target: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "store").symlink_to(target)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["doctor", "--store", str(tmp_path / "store")])
    assert result.exit_code == 1
    assert said in result.stdout


def test_chart_says_which_waits_were_not_measured() -> None:
    measured = [DemoRequest("", "", 10 * n, 0, 0.5, float(n), n in (1, 10), None) for n in range(1, 11)]
    console = Console(width=80, record=True, file=io.StringIO())
    for each in shown(measured, "SmolLM2-135M", 1536):
        console.print(each)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.count("~") for line in lines[4:]] == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert lines[-1].count("█") + lines[-1].count("░") == 27


def test_demo_s_processes_end_by_ctrl_c_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = dict[int, Any]()
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(sys, "stdin", ())
    demo_run.main()
    assert handlers == {signal.SIGINT: signal.SIG_DFL}


def test_demo_makes_no_store_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine gave its disk more than the usual room: what is above that is not evicted."""
    attach, ids = Mock(side_effect=ValueError), Mock(input_ids=torch.tensor([1, 2]))
    monkeypatch.setattr("kvtide.engines.transformers.attach", attach)
    monkeypatch.setattr("kvtide.engines.transformers.model_fingerprint", Mock())
    tokenizer = Mock(return_value=ids, **{"apply_chat_template.return_value": "a<<said>>b"})
    with pytest.raises(ValueError):
        next(demo_run._runs(DemoJob("", str(tmp_path), "raw", 256, 2, ["What?"], [1, 2, 3]), tokenizer, Mock()))
    assert attach.call_args.kwargs["limits"].disk_bytes_max > 1 << 60


def test_example_configuration_is_valid() -> None:
    settings = read_settings(Path(__file__).parents[2] / "deploy/kvtide.toml", {})
    assert [grant.tenant for grant in settings.grants] == ["search", "operators"]
    assert (settings.sending.weights, settings.quotas["*"].ttl_s) == ({"search": 2.0}, 1209600)


def test_unix_socket_serves_and_is_taken_over_from_a_killed_server(tmp_path: Path) -> None:
    path = tmp_path / "kvtide.sock"
    for _ in range(2):
        command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", f"unix:{path}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and str(path) in process.stdout.readline()
            with opened(http_tier(f"http+unix://{path}", SystemClock())) as tier:
                assert tier.put_from(object_id(1), object_bytes(1)) and tier.contains(object_id(1))
            process.kill()


# `kvtide invalidate` and `kvtide record` against servers in this process.

SPACE = object_id(1).namespace.hex()


@pytest.fixture
def servers(stack: ExitStack) -> list[RunningServer]:
    return [stack.enter_context(running_server()) for _ in range(2)]


def said(*words: str) -> str:
    return CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_invalidation_reaches_every_server_of_a_pool(servers: list[RunningServer]) -> None:
    url = f"pool://{servers[0].address},{servers[1].address}"
    for server in servers:
        put(server, 1)
    ask(servers[1], "PUT", f"/v1/records/generation/{SPACE}", b"4")
    report = json.loads(said("invalidate", SPACE, "--server", url, "--json"))
    assert (report["generation"], report["namespace"]) == (5, SPACE)
    for server in servers:
        assert ask(server, "GET", 1)[0].status == 404
        assert server.records.generation("", object_id(1).namespace) == 5


def test_records_are_backed_up_removed_and_restored(servers: list[RunningServer], tmp_path: Path) -> None:
    one, two = servers
    file = str(tmp_path / "backup.json")
    (tmp_path / "backup.part").write_text("somebody's")
    said("record", "alias", "chat", SPACE, "--server", one.url)
    said("record", "profile", "p", "some text", "--server", one.url)
    assert "generation 1" in said("invalidate", "chat", "--server", one.url)
    for _ in range(2):
        said("invalidate", SPACE, "--server", one.url)
    assert "3 records backed up" in said("record", "--backup", file, "--server", one.url)
    assert (tmp_path / "backup.part").read_text() == "somebody's"
    assert "removed" in said("record", "alias", "chat", "--remove", "--server", one.url)
    with pytest.raises(ValueError, match="there is no alias"):
        said("record", "alias", "chat", "--server", one.url)
    report = json.loads(said("record", "--restore", file, "--server", f"pool://{one.address},{two.address}", "--json"))
    assert report["records"] == 3
    for server in servers:
        assert said("record", "alias", "chat", "--server", server.url).strip() == SPACE
        assert said("record", "profile", "p", "--server", server.url).strip() == "some text"
        assert server.records.generation("", object_id(1).namespace) == 3
        server.records.check()


@pytest.mark.parametrize(
    "words",
    [
        "invalidate nobody",
        "invalidate no/name",
        f"invalidate {64 * 'Z'}",
        f"invalidate {SPACE} --server ftp://x",
        "record alias chat nonsense",
        "record profile absent",
        "record --restore {tmp}/none",
        "record --backup {tmp}/a --restore {tmp}/a",
        "record --backup {tmp}",
        "record alias chat --backup {tmp}/a",
        "record alias",
        "record",
        "record alias chat x --remove",
        f"record generation {SPACE} --remove",
    ],
)
def test_mistakes_with_records_are_one_clear_line(servers: list[RunningServer], tmp_path: Path, words: str) -> None:
    place = [] if "--server" in words else ["--server", servers[0].url]
    refused(*words.format(tmp=tmp_path).split(), *place)


def test_file_that_can_t_be_written_is_one_line(servers: list[RunningServer], tmp_path: Path, command: Command) -> None:
    status, _, said = command("record", "--backup", str(tmp_path / "none" / "file"), "--server", servers[0].url)
    assert (status, said.count("\n"), "No such file or directory" in said) == (2, 1, True)


# What beginners get wrong: one line on stderr that names the option and the next command, and nothing on stdout.

# Words, and what the line must have. FOLDER is empty, FILE holds text; nobody listens at port 1.
MISTAKES = """
stat                                       | Did you mean 'stats'; see kvtide --help
stats --stroe FOLDER                       | --stroe (Possible options: --json, --store); see kvtide stats --help
stats --store FOLDER                       | kvtide doctor --store URL
stats --store DEFAULT                      | kvtide demo
ls --store memory://                       | --store http://HOST:PORT; see kvtide ls --help
ls --store htp://host                      | expected one of disk://; see kvtide ls --help
ls --limit many                            | '--limit'; see kvtide ls --help
ping http://127.0.0.1:1                    | said with --store; see kvtide ping --help
ping --store http://127.0.0.1:1            | refused; kvtide doctor --store URL
ping --store STORE --prefill-tokens-s inf  | positive and finite; see kvtide ping --help
size                                       | '--model'; see kvtide size --help and docs/sizing.md
size --model CONFIG --disk-gb inf          | '--disk-gb'; see kvtide size --help
size --model FOLDER                        | kvtide size --model
size --model CONFIG --trace FOLDER         | has no full block; *.jsonl
size --model CONFIG --trace FILE           | line 1 is no request; cut off
size --model CONFIG --trace FILE --policy x | 'x'; see kvtide size --help
explain --store FOLDER                     | kvtide explain --text FILE --model FOLDER
explain --tokens FILE --store STORE        | kvtide explain --text FILE
explain --tokens TOKENS --store STORE      | --namespace; kvtide stats
explain --tokens TOKENS --quality -1       | '--quality'; see kvtide explain --help
explain --tokens /dev/zero --store STORE   | no JSON list; malformed
rm --store STORE                           | kvtide ls
rm abc --store STORE                       | at least 4 hex digits; kvtide ls
rm --all --store STORE                     | nobody can be asked: add --yes
serve --listen 0.0.0.0:7421                | kvtide token; 127.0.0.1; --open-to-all
serve --listen 203.0.113.1:7421 --open-to-all | can't serve; kvtide doctor --store URL
serve --listen nowhere                     | host:port or unix:/path; see kvtide serve --help
serve --listen TAKEN                       | in use; kvtide doctor --store URL
serve --config /absent.toml                | /absent.toml; see kvtide serve --help
serve --tier ftp://host                    | 'ftp'; see kvtide serve --help and docs/operations.md
calibrate FOLDER                           | --store URL; kvtide calibrate FOLDER --store URL
calibrate FOLDER --output none/file         | got none/file; see kvtide calibrate --help
calibrate FOLDER --output FOLDER           | --output names a file; see kvtide calibrate --help
calibrate none/model --output FILE           | none/model; see kvtide calibrate --help
calibrate FOLDER --codec zip --output FILE | --codec 'zip'; see kvtide calibrate --help
invalidate chat --server http://127.0.0.1:1 | kvtide doctor --store URL
llama                                      | 'model'; see kvtide llama --help and docs/llamacpp.md
demo --codec zip                           | 'zip'; see kvtide demo --help
"""
CONFIG = '{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}'


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_mistake_is_answered_by_one_line_that_names_the_next_command(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    words, _, expected = row.partition("|")
    monkeypatch.setattr("kvtide.cli.store.DEFAULT_STORE", str(tmp_path / "DEFAULT"))
    monkeypatch.setattr(sys, "stdin", None)
    for name, content in (("FILE", "once upon a time"), ("TOKENS", "[1, 2, 3]"), ("CONFIG", CONFIG)):
        (tmp_path / name).write_text(content)
    for name in ("FOLDER", "STORE/segments"):
        (tmp_path / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {name: str(tmp_path / name) for name in ("FILE", "TOKENS", "CONFIG", "FOLDER", "STORE", "DEFAULT")}
        places["TAKEN"] = f"127.0.0.1:{taken.getsockname()[1]}"
        status, printed, said = command(*(places.get(word, word) for word in words.split()))
    assert (status, printed, said.count("\n")) == (2, "", 1), said
    assert [part for part in expected.strip().split("; ") if part not in said] == [], said


def test_module_that_is_missing_and_a_block_that_can_t_be_kept_are_one_line(command: Command) -> None:
    errors = [UnencodableBlock("not finite"), ModuleNotFoundError("No module named 'torch'", name="torch")]
    program = typer.Typer(name="kvtide")

    @program.command()
    def fail() -> None:
        raise errors.pop()

    for line in ("torch is not installed: pip install torch==", "not finite; see kvtide --help"):
        status, _, said = command(program=program)
        assert status == 2 and said.startswith(f"kvtide: {line}")


def test_without_a_command_it_says_what_to_try(command: Command) -> None:
    status, said, _ = command()
    assert status == 0
    assert [name for name in ("doctor", "demo", "serve", "stats", "--help") if f"kvtide {name} " not in said] == []
