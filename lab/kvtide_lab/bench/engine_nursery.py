"""Forks engines after the imports, most of an engine's start: `python -m kvtide_lab.bench.engine_nursery ADDRESS`.

Invariant: the process that forks has one thread and has touched no engine.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Self

from kvtide_lab.config import engine_environment


class EngineNursery:
    """A process that has imported vLLM and forks an engine for each connection. Use it with `with`.

    RuntimeError with the end of its log if it does not come up.
    """

    def __init__(self, python: Path, log: Path) -> None:
        self._command = [str(python), "-m", "kvtide_lab.bench.engine_nursery"]
        self.log = log
        self._running = ExitStack()
        self._address = ""

    def __enter__(self) -> Self:
        # A socket's path must be short.
        folder = self._running.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-"))
        self._address = f"{folder}/engines"
        command = [*self._command, self._address]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, env=engine_environment({}))
        # Its end closes the process's input, which ends that, and waits.
        self._running.enter_context(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            self._running.close()
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            raise RuntimeError("no engines can be started:\n" + "\n".join(tail))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def connect(self) -> socket.socket:
        """Return a connection to a new engine's process."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection


def _leave(parent_pid: int) -> None:
    """End an engine's process at once: freeing what the nursery has imported takes a second for nothing."""
    if os.getpid() != parent_pid:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(address: str) -> None:
    """Fork a session for each connection to `address` until standard input ends."""
    # Only where vLLM is.
    from kvtide_lab.vllm.session import import_engine, serve

    # What is registered first is done last.
    atexit.register(_leave, os.getpid())
    import_engine()
    # vLLM collects at its start and at its end: not again what all engines share.
    gc.collect()
    gc.freeze()
    with os.fdopen(os.dup(1), "wb") as parent:
        # What engines print must not be taken for a reply.
        os.dup2(2, 1)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            parent.write(b"ready\n")
            parent.flush()
            while door in select.select([door, sys.stdin], [], [])[0]:
                connection, _ = door.accept()
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    door.close()
                    serve(connection.makefile("rb"), connection.makefile("wb"))
                    return
                connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
