"""Random schedules of faults: processes that are frozen, killed, wiped and started again, while somebody asks."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from kvtide.testing.tier_suite import object_id
from kvtide_lab.bench.services import wait_until

__all__ = ["Answered", "Node", "asked", "nodes", "seeds"]

# Between servers and clients on this machine; whoever is silent for longer counts as hanging.
ANSWER_S_MAX = 30.0


class Node:
    """A server process on this machine that can be frozen, killed and wiped; it keeps its port."""

    def __init__(self, port: int, folder: Path, *words: str) -> None:
        self.port = port
        self.folder = folder
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self.is_frozen = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self.is_frozen

    def start(self) -> None:
        if self._process is None:
            self.folder.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", self.address, *self._words]
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command], stdout=log, stderr=subprocess.STDOUT
                )

    def wait(self) -> None:
        wait_until(lambda: asked(self.port, "GET", "/healthz").status == 200, f"{self.address} to answer", 60)

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
    """Run servers for the time of the `with`."""
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


def asked(port: int, method: str, what: int | str, body: bytes | None = None, **headers: str) -> Answered:
    """Ask for an object by number, or for a path. AssertionError for an answer that does not come."""
    name = object_id(what) if isinstance(what, int) else None
    path = f"/v1/{name.namespace.hex()}/{name.key.hex()}" if name else str(what)
    started_s = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
    try:
        connection.request(
            method, path, body, {f"Kvtide-{key.replace('_', '-')}": value for key, value in headers.items()}
        )
        answer = connection.getresponse()
        return Answered(answer.status, answer.read(), time.monotonic() - started_s)
    except TimeoutError as error:
        raise AssertionError(f"{method} {path} hangs") from error
    except (OSError, HTTPException):
        return Answered(0, b"", time.monotonic() - started_s)
    finally:
        connection.close()


def seeds(first: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """Yield seeds, each printed, with a generator of its own."""
    for seed in range(first, first + count):
        print(f"seed {seed}", flush=True)
        yield seed, random.Random(seed)
