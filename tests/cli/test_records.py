"""`kvtide invalidate` and `kvtide record` against servers in this process."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server.worlds import ask, put
from tests.servers import RunningServer, running_server
from tests.suites.tier_suite import object_id
from typer.testing import CliRunner

from kvtide.cli.app import app

SPACE = object_id(1).namespace.hex()


@pytest.fixture
def servers() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server()) for _ in range(2)]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_invalidation_reaches_every_server_of_a_pool(servers: list[RunningServer]) -> None:
    url = f"pool://{servers[0].address},{servers[1].address}"
    for server in servers:
        put(server, 1)
    ask(servers[1], "PUT", f"/v1/records/generation/{SPACE}", b"4")
    report = json.loads(run("invalidate", SPACE, "--server", url, "--json"))
    assert (report["generation"], report["namespace"]) == (5, SPACE)
    for server in servers:
        assert ask(server, "GET", 1)[0].status == 404
        assert server.records.generation("", object_id(1).namespace) == 5


@pytest.mark.parametrize(
    "words",
    [
        ("invalidate", "nobody", "--server", "{url}"),
        ("invalidate", "no/name", "--server", "{url}"),
        ("invalidate", SPACE, "--server", "ftp://x"),
        ("invalidate", SPACE, "--server", "http://127.0.0.1:9"),
        ("invalidate", "Z" * 64, "--server", "{url}"),
        ("record", "alias", "chat", "nonsense", "--server", "{url}"),
        ("record", "profile", "absent", "--server", "{url}"),
    ],
)
def test_mistakes_and_faults_are_one_clear_line(servers: list[RunningServer], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        run(*(word.format(url=servers[0].url) for word in words))
    assert "\n" not in str(caught.value)


def test_records_are_backed_up_removed_and_restored(servers: list[RunningServer], tmp_path: Path) -> None:
    one, two = servers
    file = str(tmp_path / "backup.json")
    run("record", "alias", "chat", SPACE, "--server", one.url)
    run("record", "profile", "p", "some text", "--server", one.url)
    assert "generation 1" in run("invalidate", "chat", "--server", one.url)
    for _ in range(2):
        run("invalidate", SPACE, "--server", one.url)
    assert "3 records backed up" in run("record", "--backup", file, "--server", one.url)
    assert "removed" in run("record", "alias", "chat", "--remove", "--server", one.url)
    with pytest.raises(ValueError, match="there is no alias"):
        run("record", "alias", "chat", "--server", one.url)
    report = json.loads(run("record", "--restore", file, "--server", f"pool://{one.address},{two.address}", "--json"))
    assert report["records"] == 3
    for server in servers:
        assert run("record", "alias", "chat", "--server", server.url).strip() == SPACE
        assert run("record", "profile", "p", "--server", server.url).strip() == "some text"
        assert server.records.generation("", object_id(1).namespace) == 3
        server.records.check()


@pytest.mark.parametrize(
    "words",
    [
        ("--restore", "{tmp}/none"),
        ("--backup", "{tmp}/a", "--restore", "{tmp}/a"),
        ("alias", "chat", "--backup", "{tmp}/a"),
        ("alias",),
        (),
        ("alias", "chat", "x", "--remove"),
        ("generation", SPACE, "--remove"),
    ],
)
def test_records_refuse_what_makes_no_sense(
    servers: list[RunningServer], tmp_path: Path, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError):
        run("record", *(word.format(tmp=tmp_path) for word in words), "--server", servers[0].url)
