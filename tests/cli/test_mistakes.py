"""What beginners get wrong: one line on stderr that names the option and the next command, and nothing on stdout."""

import socket
import sys
from pathlib import Path

import pytest
import typer

from kvtide.cli.app import app, run

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
size                                       | '--model'; see kvtide size --help and docs/sizing.md
size --model FOLDER                        | kvtide size --model
size --model CONFIG --trace FOLDER         | has no full block; *.jsonl
size --model CONFIG --trace FILE           | line 1 is no request; cut off
size --model CONFIG --trace FILE --policy x | 'x'; see kvtide size --help
explain --store FOLDER                     | kvtide explain --text FILE --model FOLDER
explain --tokens FILE --store STORE        | kvtide explain --text FILE
explain --tokens TOKENS --store STORE      | --namespace; kvtide stats
rm --store STORE                           | kvtide ls
rm abc --store STORE                       | at least 4 hex digits; kvtide ls
serve --listen 0.0.0.0:7421                | kvtide token; 127.0.0.1; --open-to-all
serve --listen 203.0.113.1:7421 --open-to-all | can't serve; kvtide doctor --store URL
serve --listen nowhere                     | host:port or unix:/path; see kvtide serve --help
serve --listen TAKEN                       | in use; kvtide doctor --store URL
serve --config /absent.toml                | /absent.toml; see kvtide serve --help
serve --tier ftp://host                    | 'ftp'; see kvtide serve --help and docs/operations.md
calibrate FOLDER                           | --store URL; kvtide calibrate FOLDER --store URL
calibrate FOLDER --codec zip --output FILE | --codec 'zip'; see kvtide calibrate --help
invalidate chat --server http://127.0.0.1:1 | kvtide doctor --store URL
llama                                      | 'model'; see kvtide llama --help and docs/llamacpp.md
demo --codec zip                           | 'zip'; see kvtide demo --help
"""
CONFIG = '{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}'


def status_of(program: typer.Typer) -> object:
    with pytest.raises(SystemExit) as ended:
        run(program)
    return ended.value.code


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_mistake_is_answered_by_one_line_that_names_the_next_command(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _, expected = row.partition("|")
    monkeypatch.setattr("kvtide.cli.store.DEFAULT_STORE", str(tmp_path / "DEFAULT"))
    for name, content in (("FILE", "once upon a time"), ("TOKENS", "[1, 2, 3]"), ("CONFIG", CONFIG)):
        (tmp_path / name).write_text(content)
    for name in ("FOLDER", "STORE/segments"):
        (tmp_path / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {name: str(tmp_path / name) for name in ("FILE", "TOKENS", "CONFIG", "FOLDER", "STORE", "DEFAULT")}
        places["TAKEN"] = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["kvtide", *(places.get(word, word) for word in words.split())])
        assert status_of(app) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1), said
    assert [part for part in expected.strip().split("; ") if part not in said.err] == [], said.err


def test_module_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    program = typer.Typer(name="kvtide")
    program.command()(fail)
    monkeypatch.setattr(sys, "argv", ["kvtide"])
    assert status_of(program) == 2
    assert capsys.readouterr().err.startswith("kvtide: torch is not installed: pip install torch==")


def test_without_a_command_it_says_what_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtide"])
    assert status_of(app) == 0
    said = capsys.readouterr().out
    assert [name for name in ("doctor", "demo", "serve", "stats", "--help") if f"kvtide {name} " not in said] == []
