"""Mistakes are errors at the start, a tier that can't be had is left out, and commands that look only look."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.joints.conftest import no_threads
from tests.lanes import ROOT
from tests.store.test_cache import fill, metas_of
from tests.stores import nothing_pinned, open_memory
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.block import BlockLayout
from kvtide.clock import ManualClock
from kvtide.codec.base import RawCodec
from kvtide.config import Limits
from kvtide.engines.chunks import ChunkStore, chunk_layout
from kvtide.engines.settings import ConnectorSettings
from kvtide.errors import TierUnavailable
from kvtide.server.settings import ServerSettings, records_path
from kvtide.store.cache import cache_for
from kvtide.tier import stack_of
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.tier.stack.invalidation import Invalidations

HOSTS = ["a..b", ".a", "h" * 64, "\N{SNOWMAN}" * 64]
MISTAKES = {
    "": "must not be empty",
    " ": "blank",
    "bogus": r"expected a store URL .*, or a path that begins with .*'bogus'",
    "-": "a path that begins with",
    "some/folder": "a path that begins with",
    "disk:/path": "a path that begins with",
    " disk:///x": "blank",
    "/x\n": "blank",
    "disk:///x\x00": "control",
    "disk:///x%00": "zero byte",
    "memory://  http://h:1": "blank",
    "disk:///my folder": "a path that begins with",
    "disk://x": "three slashes",
    "memory://1GiB": "policy=NAME and nothing else",
    "htp://h:1": "unknown store scheme 'htp'",
    "http://": "HOST:PORT",
    "http://:7421": "HOST:PORT",
    "http://h": "HOST:PORT",
    "http://h:99999": "from 1 to 65535, got 'h:99999'",
    "http://h:\u0661": "from 1 to 65535",
    "http://user@:99999": "no user or password",
    "http://u:secret@h:1": r"^((?!secret).)*$",
    "http://u:secret@h:1 ": r"^((?!secret).)*$",
    "http://[::1": "no store URL",
    "http://h:1/path": "begins with http:// or https:// and has no path",
    "http://h:1?x=1": "store",
    "http://h:1?write=some": "write",
    "http://h:1?token_file=/absent": "token",
    "https://h:1?ca_file=/absent": "store",
    "http://a:1,b": "store",
    "http://h:1?force_latest=yes": "force_latest is 0 or 1",
    "http+unix://host/path": "unix",
    "pool://h:1?write=some": "write",
    "disk://": "store",
    "pool://a": "HOST:PORT",
    "disk:///proc/x": "no permission in /proc",
    "disk:///dev/null": "not a directory",
    "disk:///dev/null/x": "not a directory",
    "/" + "x" * 300: "too long",
    **{f"{kind}?policy=best": "expected one of lru, s3fifo, mix, pool" for kind in ("memory://", "disk:///x")},
    **{f"{kind}?polcy=lru": "policy=NAME and nothing else" for kind in ("memory://", "disk:///x")},
    # Hosts that no name server takes.
    **{f"{kind}://{host}:1": "expected HOST:PORT" for kind in ("http", "pool", "valkey") for host in HOSTS},
}


@pytest.mark.parametrize("url", MISTAKES, ids=repr)
def test_mistake_in_a_store_url_is_one_line_at_start(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=MISTAKES[url]) as caught:
        cache_for(url, RawCodec())
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_connector_option_is_checked_at_the_start() -> None:
    with pytest.raises(ValueError, match="a path that begins with"):
        ChunkStore(ConnectorSettings(store="bogus", codec="raw"), chunk_layout(4096, 2, 16), b"x", "test")


def test_link_that_leads_nowhere_and_folder_without_permission_are_mistakes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="leads nowhere"):
        cache_for(f"{tmp_path}/link", RawCodec())


@pytest.mark.parametrize("url", [".", "..", "./a", "../a", "~/a", "/tmp/a b", "disk:///tmp/a%20b"])
def test_path_that_says_where_it_is_names_a_store_and_makes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    stack = stack_of(url, Limits(), ManualClock(), nothing_pinned)
    assert stack.tier_names == ["memory", "disk"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]
    records, folder = records_path(ServerSettings(tiers=(url,))), Path(unquote(url.removeprefix("disk://")))
    assert records is not None
    assert records.parent == stack._places[1].tier.root == folder.expanduser()  # type: ignore[attr-defined]


def test_folder_as_a_path_is_a_disk_store_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path / "of 100%25?#ä", tmp_path / os.fsdecode(b"\xff"), Path("word"), Path("~/home")):
        with cache_for(folder, RawCodec()) as cache:
            assert cache.tiers.tier_names == ["memory", "disk"]
        assert (tmp_path / folder.name / "segments").is_dir()
    with pytest.raises(ValueError, match="is not a directory"):
        cache_for(Path("/dev/null"), RawCodec())


def test_disk_that_fails_after_the_start_is_a_miss(tmp_path: Path, layout: BlockLayout) -> None:
    cache = cache_for(str(tmp_path / "store"), RawCodec())
    (tmp_path / "store").write_text("somebody was faster")
    with cache:
        metas = metas_of(layout, 2)
        fill(cache, metas)
        assert [tier.name for tier in cache.stats().tiers] == ["memory"]


SHORT_OF_MEMORY = """
import resource, sys
import numpy
from kvtide.block import BlockLayout, KVDtype
from kvtide.store import cache_for
from kvtide.codec.base import RawCodec
from kvtide.store.load import Whole
from tests.store.test_cache import Collector, fill, metas_of
metas = metas_of(BlockLayout(2, 16, 2, 8, KVDtype.FLOAT32), 3)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20),) * 2)
with cache_for(sys.argv[1], RawCodec()) as cache:
    fill(cache, metas)
    print([tier.name for tier in cache.stats().tiers], cache.load(metas, Whole(Collector())).blocks)
"""


def test_engine_short_of_memory_starts_without_the_memory_tier(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert run.stdout == "['disk'] 3\n", run.stderr
    assert run.stderr.count("(memory tier)") == 1


SHORTAGES = [OSError(12, "no memory"), MemoryError(), RuntimeError("can't start new thread")]


# A thread is needed at the start alone; a later RuntimeError is a bug, which shows.
@pytest.mark.parametrize(
    ("when", "error"),
    [
        *(("open", each) for each in (*SHORTAGES, AttributeError("a bug"), TierUnavailable("off"))),
        *(("later", each) for each in SHORTAGES[:2]),
    ],
)
def test_tier_that_can_not_be_opened_or_asked_is_left_out(
    when: str, error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> Any:
        raise error

    clock = ManualClock()
    disk = DiskTier(tmp_path, 1 << 20, clock, nothing_pinned)
    for verb in ("open",) if when == "open" else ("contains", "get_into", "put_from"):
        setattr(disk, verb, fail)
    stack = TierStack([disk, open_memory()])
    stack.open()
    for _ in range(2):
        assert stack.put_from(object_id(1), object_bytes(1)) and stack.contains(object_id(1))
        assert read_all(stack, 1) == object_bytes(1)
    assert caplog.text.count("(disk tier)") == (1 if when == "open" else 3), "once for each verb"


def test_no_thread_to_follow_invalidations_leaves_the_tiers() -> None:
    memory = open_memory()
    stack = TierStack([memory], invalidations=Invalidations(lambda: [], [memory], None, ManualClock()))
    with no_threads():
        stack.open()
        assert stack.put_from(object_id(1), object_bytes(1))
        stack.close()


def test_two_tiers_of_one_kind_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Only the one that asked for it gets what memory evicts, and each has its own faults."""
    url = "memory:// http://127.0.0.1:1 http://127.0.0.1:2?write=evicted"
    stack = stack_of(url, Limits(), ManualClock(), nothing_pinned)
    assert stack.tier_names == ["memory", "http-1", "http-2"]
    sent: list[tuple[str, bytes]] = []

    def cut() -> bool:
        raise OSError("cut")

    def put(name: str) -> Any:
        return lambda object_id, buffer: sent.append((name, bytes(buffer))) or True

    memory, always, evicted = (place.tier for place in stack._places)
    for name, tier in (("always", always), ("evicted", evicted)):
        tier.contains = lambda object_id: False  # type: ignore[method-assign]
        tier.put_from = put(name)  # type: ignore[method-assign]
    stack.open()
    stack.put_from(object_id(1), b"at once")
    assert sent == [("always", b"at once")]
    assert isinstance(memory, MemoryTier)
    memory._offer(object_id(2), 1, lambda buffer: True)
    assert stack.demoter.wait(10) and sent[1:] == [("evicted", b"\0")]
    assert stack.guard("read", cut, False, "http-2") is False
    assert [(each.name, each.faults) for each in stack.tier_stats()] == [("memory", 0), ("http-1", 0), ("http-2", 1)]
    assert "can't read (http-2 tier), served as a miss: cut" in caplog.text
    stack.close()


# Random interleavings of all that users do with caches, against the plain model (see `driver`).

SECONDS, SECONDS_NIGHTLY = 8, 600
SEED = 20261122
# To start and to end beside the time of the run; a hung step ends the driver before.
SLACK_S = 200


@pytest.mark.timeout(SECONDS_NIGHTLY + 2 * SLACK_S)
def test_no_order_of_operations_gives_a_wrong_answer_or_an_error(request: pytest.FixtureRequest) -> None:
    is_nightly = request.config.getoption("--nightly")
    seconds, seed = (SECONDS_NIGHTLY, int(time.time())) if is_nightly else (SECONDS, SEED)
    command = [sys.executable, "-m", "tests.joints.driver", "--seconds", str(seconds), "--seed", str(seed)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds + SLACK_S)
    print(ran.stderr, ran.stdout)
    found = json.loads(ran.stdout)
    assert (found["wrong_answers"], found["failed"], ran.returncode) == (0, 0, 0), ran.stderr
    assert found["steps"] > 25
