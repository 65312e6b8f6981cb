"""Drives an engine in its own process and environment: what benches and tests of real engines share."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvtide.config import engine_environment

__all__ = ["EngineProcess", "kvtide_transfer"]

CLOSE_S_MAX = 60.0
_SESSION = "kvtide.engines.vllm.session"
# What suits one small model on a few shared cores.
_OPTIONS = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "seed": 0, "disable_log_stats": True}


def kvtide_transfer(store: str, **options: Any) -> dict[str, Any]:
    """Return the fields of vLLM's KVTransferConfig for kvtide's connector."""
    return {
        "kv_connector": "KVTideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, **options},
    }


class EngineProcess:
    """A running engine. Use it with `with`; RuntimeError with the end of its log if it dies.

    `python` is the interpreter of an environment with vLLM and kvtide. The log goes to `log`; `prefix` are words to put
    before the command.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._command = [*prefix, str(python), "-m", _SESSION]
        self._log = log
        self._environment = engine_environment(environment or {})
        self._start = {
            "model": str(model),
            "options": {**_OPTIONS, "dtype": dtype, **(options or {})},
            "transfer": dict(transfer) if transfer else None,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.start_s = 0.0

    def open(self) -> None:
        """Start the engine and wait until it is ready."""
        started_s = time.perf_counter()
        with self._log.open("ab") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=log, env=self._environment)
        try:
            self._call(self._start)
        except RuntimeError:
            self.close()
            raise
        self.start_s = time.perf_counter() - started_s

    def close(self) -> None:
        """End the engine as a user would, by closing its input; kill it if it does not end. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(CLOSE_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Answer prompts (`ids`, `answer_tokens`, `abort_after`) that arrive together; return the session's Result."""
        return self._call({"verb": "generate", "prompts": list(prompts)})

    def ask(self, ids: Sequence[int], answer_tokens: int) -> dict[str, Any]:
        """Answer one prompt and return its Answer."""
        answer: dict[str, Any] = self.generate([{"ids": list(ids), "answer_tokens": answer_tokens}])["answers"][0]
        return answer

    def ask_timed(self, ids: Sequence[int], answer_tokens: int) -> float:
        """Answer one prompt and return the seconds that it took."""
        seconds: float = self.generate([{"ids": list(ids), "answer_tokens": answer_tokens}])["seconds"]
        return seconds

    def do(self, verb: str, is_deep: bool = False) -> dict[str, Any]:
        """Run another job of the session's."""
        return self._call({"verb": verb, "is_deep": is_deep})

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None, "call before open"
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            raise RuntimeError("the engine has died:\n" + "\n".join(tail))
        result: dict[str, Any] = msgspec.json.decode(line)
        return result
