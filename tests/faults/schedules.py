"""Random schedules of faults: processes that are frozen, killed, wiped and started again, while somebody asks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.server.worlds import path_of
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.tier import Tier
from kvtide_lab.bench.services import wait_until

# Between servers and clients on this machine; whoever is silent for longer counts as hanging.
ANSWER_S_MAX = 30.0
HERE = "127.0.0.1"


class Node:
    """A server process, here or on a host of its own, that can be frozen, killed and wiped; it keeps its address."""

    def __init__(self, port: int, folder: Path, *words: str, host: Host | None = None) -> None:
        self.port = port
        self.folder = folder
        self._words = words
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self.is_frozen = False

    @property
    def address(self) -> str:
        return f"{self._host.address if self._host else HERE}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self.is_frozen

    def start(self) -> None:
        if self._process is None:
            self.folder.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", self.address, *self._words]
            command = self._host.command(*command) if self._host else command
            tied = ["setpriv", "--pdeathsig", "KILL", *command]
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(tied, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        def is_up() -> bool:
            assert self._process is None or self._process.poll() is None, (self.folder / "log").read_text()
            return asked(self.address, "GET", "/healthz").status == 200

        wait_until(is_up, f"{self.address} to answer", 60)

    def freeze(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            self.is_frozen = True

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self.is_frozen = None, False

    def wipe(self) -> None:
        """Lose all that it keeps, records too."""
        self.kill()
        for path in self.folder.iterdir():
            if path.name != "log" and path.is_file():
                path.unlink()
        self.start()

    def mend(self) -> None:
        """Let it run, whatever was done to it."""
        self.thaw()
        self.start()


@contextmanager
def nodes(found: Sequence[Node]) -> Iterator[Sequence[Node]]:
    with ExitStack() as stack:
        for node in found:
            stack.callback(node.kill)
            node.start()
        for node in found:
            node.wait()
        yield found


class Answered(NamedTuple):
    """What came of a request: a status, 0 for a connection that failed, the body, and how long it took."""

    status: int
    body: bytes
    took_s: float


def asked(where: int | str, method: str, what: int | str, body: bytes | None = None, **headers: str) -> Answered:
    """Ask a port here or an address for an object by number, or a path. AssertionError for an answer that hangs."""
    path = path_of(what) if isinstance(what, int) else what
    started_s = time.monotonic()
    address = f"{HERE}:{where}" if isinstance(where, int) else where
    connection = HTTPConnection(address, timeout=ANSWER_S_MAX)
    try:
        sent = {f"Kvtide-{key.replace('_', '-')}": value for key, value in headers.items()}
        connection.request(method, path, body, sent)
        with connection.getresponse() as answer:
            return Answered(answer.status, answer.read(), time.monotonic() - started_s)
    except TimeoutError as error:
        raise AssertionError(f"{method} {path} hangs") from error
    except (OSError, HTTPException):
        return Answered(0, b"", time.monotonic() - started_s)
    finally:
        connection.close()


class Load:
    """Threads that read all objects over and over, and store what is missing, for the time of the `with`."""

    def __init__(self, tier: Tier, objects: int, size: int, threads: int = 1) -> None:
        self._tier = tier
        self._objects = objects
        self._size = size
        self._closing = threading.Event()
        self._lock = threading.Lock()
        firsts = range(0, objects, objects // threads)
        self._threads = [threading.Thread(target=self._run, args=(first,)) for first in firsts]
        self.wrong = self.hits = self.misses = 0
        self.longest_s = 0.0
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._closing.is_set():
            number = (number + 1) % self._objects
            expected, started_s = object_bytes(number, self._size), time.monotonic()
            try:
                data = read_all(self._tier, number, self._size + 1)
                read_s = time.monotonic() - started_s
                if data is None:
                    self._tier.put_from(object_id(number), expected)
            except Exception as error:  # noqa: BLE001 - what reaches the engine is what we count
                with self._lock:
                    self.errors.append(repr(error))
                continue
            with self._lock:
                self.longest_s = max(self.longest_s, read_s, time.monotonic() - started_s - read_s)
                self.hits += data is not None
                self.misses += data is None
                self.wrong += data not in (None, expected)

    def hit_rate(self, reads: int) -> float:
        with self._lock:
            hits, misses = self.hits, self.misses
        wait_until(lambda: self.hits + self.misses >= hits + misses + reads, "reads", 60)
        with self._lock:
            hits, misses = self.hits - hits, self.misses - misses
        return hits / (hits + misses)


def seeds(first: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """Yield seeds, each printed, with a generator of its own."""
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)
        yield seed, random.Random(seed)


# Hosts for servers: network namespaces, each joined to us by a cable that can be cut one way or both.


class Host:
    """One namespace. Its address is reached from this process alone."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        self.name = f"kvt{os.getpid()}-{number}"
        self.address = f"10.231.{number}.2"
        self.number = number
        self.link = link = f"kv{os.getpid() % 100_000}x{number}"
        _run("ip", "netns", "add", self.name)
        stack.callback(subprocess.run, ["ip", "netns", "delete", self.name], check=False, capture_output=True)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        stack.callback(subprocess.run, ["ip", "link", "delete", link], check=False, capture_output=True)
        _run("ip", "address", "add", f"10.231.{number}.1/30", "dev", link)
        _run("ip", "link", "set", link, "up")
        for words in (["address", "add", f"{self.address}/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _run(*self.command("ip", *words))

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    @property
    def gateway(self) -> str:
        """Our end of the cable: where this host reaches a server of ours that listens on every address."""
        return f"10.231.{self.number}.1"

    def shape(self, mbit_s: int) -> None:
        """Give the cable a rate, both ways."""
        words = ("root", "tbf", "rate", f"{mbit_s}mbit", "burst", "128kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self.link, *words)
        _run(*self.command("tc", "qdisc", "replace", "dev", "eth0", *words))

    def cut(self, *hooks: str, to_port: int | None = None) -> None:
        """Drop what comes in (`input`), goes out (`output`), or both: all of it, or what is for one port."""
        what = ["tcp", "dport", str(to_port)] if to_port else []
        _run(*self.command("nft", "add", "table", "inet", "cut"))
        for hook in hooks:
            chain = f"{{ type filter hook {hook} priority 0; }}"
            _run(*self.command("nft", "add", "chain", "inet", "cut", hook, chain))
            _run(*self.command("nft", "add", "rule", "inet", "cut", hook, *what, "drop"))

    def heal(self) -> None:
        subprocess.run(self.command("nft", "delete", "table", "inet", "cut"), check=False, capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _remove_left_behind() -> None:
    """Remove namespaces of processes that were killed: their cables have the addresses that ours shall have."""
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, pid in re.findall(r"^(kvt(\d+)-\d+)", said, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def network_hosts(count: int) -> Iterator[Sequence[Host]]:
    """Make hosts, and remove them. Skips the test, with the reason, where that is not allowed."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nft")):
        pytest.skip("network namespaces need root, ip and nft: apt install iproute2 nftables")
    _remove_left_behind()
    with ExitStack() as stack:
        try:
            hosts = [Host(number, stack) for number in range(count)]
            hosts[0].cut("input")
            hosts[0].heal()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode(errors='replace').strip()}")
        yield hosts
