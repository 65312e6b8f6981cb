"""Fixtures shared by all tests. Nothing here reaches the network: hubs are told that they are offline."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtide.block import BlockLayout, KVDtype
from kvtide.clock import ManualClock
from kvtide.codec import CodecRegistry
from kvtide.config import Limits, wait_passively
from kvtide.store.cache import Cache, cache_for
from tests.lanes import is_quick

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch or llama.cpp is here: lanes side by side leave no core to threads that spin.
wait_passively()


_FAILED: set[str] = set()
NIGHTLY_FACTOR = 30
# Skips that stay skips where KVTIDE_NO_SKIPS makes failures of all others: what can't be installed here.
HARDWARE_REASONS = (
    "needs a processor with AVX-512",
    "needs a processor with AMX",
    "needs a CUDA device",
    "the kernels are for x86-64",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help=f"{NIGHTLY_FACTOR} times as many faults, and the tests so marked"
    )
    parser.addoption("--quick", action="store_true", help="only modules that need no torch and start no process")
    parser.addoption("--rest", action="store_true", help="only the other modules, for who has run --quick already")
    parser.addoption("--again", action="store_true", help="a second chance: refuse all that is not marked real_time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, before it is imported, what `make check` has no time for; or what it has taken."""
    is_module = collection_path.match("test_*.py")
    tests = [collection_path] if is_module else collection_path.rglob("test_*.py")
    is_unwanted = (config.getoption("--quick", False) and not any(map(is_quick, tests))) or (
        config.getoption("--rest", False) and is_module and is_quick(collection_path)
    )
    # None: others are asked.
    return True if is_unwanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to a night the variants of tests whose kind is tried by day."""
    if not config.getoption("--nightly"):
        config.hook.pytest_deselected(items=[each for each in items if each.get_closest_marker("nightly")])
        items[:] = [each for each in items if not each.get_closest_marker("nightly")]


def pytest_collection_finish(session: pytest.Session) -> None:
    others = [each.nodeid for each in session.items if each.get_closest_marker("real_time") is None]
    if session.config.getoption("--again") and others:
        raise pytest.UsageError(f"no second chance for {', '.join(others)}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for outcome in ("passed", "failed", "error") if config.getoption("--again") else ():
        for report in terminalreporter.stats.get(outcome, []):
            terminalreporter.write_line(f"second chance: {report.nodeid} {outcome}")


def _refuse_skip(report: Any) -> None:
    """Make a failure of a skip where everything that tests need is said to be there."""
    is_skip = report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple)
    if is_skip and os.environ.get("KVTIDE_NO_SKIPS") and not report.longrepr[2].endswith(HARDWARE_REASONS):
        report.outcome, report.longrepr = "failed", f"{report.longrepr[2]}; KVTIDE_NO_SKIPS allows no skips"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logfinish(nodeid: str) -> Generator[None]:
    """After a failure, collect what its traceback kept alive: its open sockets are not the next tests' warnings."""
    result = yield
    if nodeid in _FAILED:
        _FAILED.clear()
        for name in ("last_exc", "last_value", "last_traceback"):
            setattr(sys, name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _FAILED.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.fixture(scope="session")
def fault_factor(request: pytest.FixtureRequest) -> int:
    """How many times as many faults as in a usual run."""
    return NIGHTLY_FACTOR if request.config.getoption("--nightly", False) else 1


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)


@pytest.fixture(params=["memory", "disk"])
def local_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of this machine, of both kinds."""
    return "memory://" if request.param == "memory" else f"disk://{tmp_path / 'store'}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def open_cache(tmp_path: Path, stack: ExitStack) -> Callable[..., Cache]:
    """Open caches that are closed when the test ends."""

    def open_one(store: Path | str = tmp_path, codec: str = "lossless", **limits: Any) -> Cache:
        # Small segments: some file systems let a search for records read all the space that one reserves.
        bounds = Limits(**{"disk_bytes_max": 1 << 30, **limits})
        cache = cache_for(str(store), CodecRegistry().make(codec), limits=bounds)
        return stack.enter_context(cache)

    return open_one


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is left when the test ends, the last first."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def small_disk(tmp_path: Path, stack: ExitStack) -> Callable[[str], Path]:
    """Mount a tmpfs with these options (`size=8m`) for the time of the test."""

    def mount(options: str) -> Path:
        folder = tmp_path / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "kvtide-test", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small tmpfs needs root")
        stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        return folder

    return mount


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Install a distribution: its name, a group of entry points, and one of these as `name = value`.

    Its modules are what lies in the test's folder.
    """

    def install(distribution: str, group: str, point: str) -> None:
        info = tmp_path / f"{distribution}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for localhost and a client's, by openssl."""
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.fixture
def world(tmp_path: Path, stack: ExitStack) -> Any:
    from tests.server.worlds import World

    return World(tmp_path, stack)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    from tests.families import tiny_llama

    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Gemma 3 270M, a real model with windows of 512 tokens, where its parts are installed."""
    from kvtide_lab.subjects import GEMMA, subject

    try:
        return subject(GEMMA)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def any_block_fits() -> Iterator[None]:
    """Let profiles of a few made-up blocks take any other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide.codec.tide.codec.check_promise", lambda fit, tokens: 0)
        yield


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads take longer than computing, which takes such small layers a hundredth of a second."""
    monkeypatch.setattr("kvtide.plan.Judge.deadline_s", lambda judge, tokens: 30.0)
    monkeypatch.setattr("kvtide.store.cache.Cache.is_worth", lambda cache, tokens, is_near, namespace: True)
