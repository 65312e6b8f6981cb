"""Drives an engine in its own process and environment: what benches and tests of real engines share.

`python -m kvtide_lab.bench.engine_process ADDRESS` is the nursery: it forks engines after the imports, most of their
start. Invariant: the process that forks has one thread and has touched no engine.
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
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, Self

import msgspec

from kvtide_lab.config import engine_environment

CLOSE_S_MAX = 60.0
_SESSION = "kvtide_lab.vllm.session"
# What suits one small model on a few shared cores.
_OPTIONS = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "seed": 0, "disable_log_stats": True}


def kvtide_transfer(store: str, **options: Any) -> dict[str, Any]:
    """Return the fields of vLLM's KVTransferConfig for kvtide's connector."""
    return {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, **options},
    }


class EngineNursery:
    """A process that has imported vLLM and forks an engine for each connection. Use it with `with`.

    RuntimeError with the end of its log if it does not come up.
    """

    def __init__(self, python: Path, log: Path) -> None:
        self._command = [str(python), "-m", "kvtide_lab.bench.engine_process"]
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
            raise RuntimeError(f"no engines can be started:\n{_tail(self.log)}")
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def connect(self) -> socket.socket:
        """Return a connection to a new engine's process."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection


class EngineProcess:
    """A running engine. Use it with `with`; RuntimeError with the end of its log if it dies.

    `python` is the interpreter of an environment with vLLM and kvtide. The log goes to `log`; `prefix` are words to put
    before the command. A `nursery` of the same interpreter makes the start shorter and has the log.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        prefix: Sequence[str] = (),
        nursery: EngineNursery | None = None,
    ) -> None:
        self._command = [*prefix, str(python), "-m", _SESSION]
        self._log = nursery.log if nursery else log
        self._nursery = nursery
        self._start = {
            "model": str(model),
            "options": {**_OPTIONS, "dtype": dtype, **(options or {})},
            "transfer": dict(transfer) if transfer else None,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._jobs: IO[bytes] | None = None
        self._replies: IO[bytes] | None = None
        self._pid = 0
        self.start_s = 0.0

    def open(self) -> None:
        """Start the engine and wait until it is ready."""
        started_s = time.perf_counter()
        if self._nursery is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=PIPE, stdout=PIPE, stderr=log, env=engine_environment({})
                )
            self._jobs, self._replies = self._process.stdin, self._process.stdout
        else:
            self._socket = self._nursery.connect()
            self._jobs, self._replies = self._socket.makefile("wb"), self._socket.makefile("rb")
        try:
            self._pid = self._call(self._start)["stats"]["pid"]
        except RuntimeError:
            self.close()
            raise
        self.start_s = time.perf_counter() - started_s

    def close(self) -> None:
        """End the engine as a user would, by ending its input; kill it if it does not end. Idempotent."""
        if self._jobs is None or self._replies is None:
            return
        with suppress(BrokenPipeError):
            self._jobs.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._socket is not None:
            self._end_forked(self._socket)
        self._replies.close()
        self._process = self._socket = self._jobs = self._replies = None

    def _end_forked(self, connection: socket.socket) -> None:
        connection.settimeout(CLOSE_S_MAX)
        try:
            connection.shutdown(socket.SHUT_WR)
            # It ends the connection when it ends.
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
        except OSError:
            pass
        connection.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(self, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Answer prompts (`ids`, `answer_tokens`, `abort_after`) that arrive together; return the session's Result."""
        return self._call({"verb": "generate", "prompts": list(prompts)})

    def loop(self, chains: Sequence[Sequence[Mapping[str, Any]]], at_once: int) -> dict[str, Any]:
        """Talk chains of prompts, so many at a time, each prompt once the one before is answered; as `generate`."""
        return self._call({"verb": "loop", "chains": [list(chain) for chain in chains], "at_once": at_once})

    def ask(self, ids: Sequence[int], answer_tokens: int, logprobs: int = 0) -> dict[str, Any]:
        """Answer one prompt and return its Answer. logprobs: of so many most likely tokens at each place."""
        prompt = {"ids": list(ids), "answer_tokens": answer_tokens, "logprobs": logprobs}
        answer: dict[str, Any] = self.generate([prompt])["answers"][0]
        return answer

    def ask_timed(self, ids: Sequence[int], answer_tokens: int) -> float:
        """Answer one prompt and return the seconds that it took."""
        seconds: float = self.generate([{"ids": list(ids), "answer_tokens": answer_tokens}])["seconds"]
        return seconds

    def do(self, verb: str, is_deep: bool = False) -> dict[str, Any]:
        """Run another job of the session's."""
        return self._call({"verb": verb, "is_deep": is_deep})

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._jobs is not None and self._replies is not None, "call before open"
        line = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._jobs.write(msgspec.json.encode(message) + b"\n")
            self._jobs.flush()
            line = self._replies.readline()
        if not line:
            raise RuntimeError(f"the engine has died:\n{_tail(self._log)}")
        result: dict[str, Any] = msgspec.json.decode(line)
        return result


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])


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
    # vLLM collects at its start and at its end, there after a thaw: not again what all engines share.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
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
