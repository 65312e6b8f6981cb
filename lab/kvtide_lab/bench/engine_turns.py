"""Engines that take turns: all are asked the same, one right after the other, so that a machine's moods hit all alike.

Invariant: nobody's background work runs in another's turn: a turn ends when what it stores is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_peers import Contender, drop_page_cache, settle, side_server
from kvtide_lab.bench.engine_process import EngineProcess

Show = Callable[[str, int, int], None]
Prompts = list[list[int]]
MISS_TOKENS = 500
# Room between texts that must not begin alike.
APART = 600
CHAT_TOKENS = 8000


class EngineBenchSize(msgspec.Struct, frozen=True):
    """The amount of questions. Tokens are those of the model.

    `rounds`: how often every engine is restarted; `memory` and `misses` are asked so often in each of them.
    """

    rounds: int = 5
    context_tokens: int = 2068
    answer_tokens: int = 16
    memory: int = 3
    misses: int = 6
    chat_users: int = 3
    chat_rounds: int = 3
    documents: int = 3
    questions: int = 3
    document_tokens: int = 640
    # Fewer pages than chats and documents need together: the engine's own prefix cache can't hold them all.
    pages: int = 28

    def text_tokens(self) -> int:
        """Return how long the text has to be."""
        talk = 2 * self.context_tokens + self.documents * self.document_tokens + CHAT_TOKENS
        return talk + APART * (self.rounds * self.misses + 2)


class Turn(msgspec.Struct, frozen=True):
    """A contender's answer to prompts that arrived together. `cpu_s` is of the engine's own thread."""

    answers: list[dict[str, Any]]
    seconds: float
    cpu_s: float
    prompt_tokens: int


class Seat:
    """A contender, its engine while it runs, and its turns by workload."""

    def __init__(
        self,
        contender: Contender,
        model: Path,
        size: EngineBenchSize,
        log: Path,
        dtype: str,
        nursery: EngineNursery | None = None,
    ) -> None:
        self.contender = contender
        self.turns: dict[str, list[Turn]] = {}
        self._log = log
        options = {"max_num_batched_tokens": 4096, "max_model_len": 3072, "num_gpu_blocks_override": size.pages}
        self._engine_of = partial(
            EngineProcess, contender.python, model, log, contender.transfer, options, dtype, contender.prefix, nursery
        )
        self._answer_tokens = size.answer_tokens
        self._running = ExitStack()
        self._engine: EngineProcess | None = None

    def open(self, warm_up: Sequence[int]) -> None:
        """Start the engine and what runs beside it; answer something to be warm."""
        self._running.enter_context(side_server(self.contender, self._log))
        self._engine = self._running.enter_context(self._engine_of())
        self._engine.ask(warm_up, 2)
        self._engine.do("reset")

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._engine = None
        self._running.close()

    @property
    def engine(self) -> EngineProcess:
        """Return the engine, which runs."""
        assert self._engine is not None
        return self._engine

    def take(self, workload: str, prompts: Prompts) -> None:
        """Answer prompts that arrive together, note how, and wait until all is stored."""
        result = self.engine.generate([{"ids": ids, "answer_tokens": self._answer_tokens} for ids in prompts])
        turn = Turn(result["answers"], result["seconds"], result["cpu_s"], sum(map(len, prompts)))
        self.turns.setdefault(workload, []).append(turn)
        if self.contender.is_kvtide:
            self.engine.do("settle")
        else:
            settle(self.contender.folder)


class Contest:
    """All seats and the rounds that they play. Use it with `with`: at its end no engine runs."""

    def __init__(self, seats: Sequence[Seat], tokens: Sequence[int], size: EngineBenchSize, show: Show) -> None:
        self.seats = list(seats)
        self.failures: dict[str, str] = {}
        self._tokens = tokens
        self._size = size
        self._show = show
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for seat in self.seats:
            seat.close()

    def play(self) -> None:
        """Fill the stores, then measure. RuntimeError if plain vLLM or kvtide fails; a peer that does is left out."""
        size, context = self._size, [list(self._tokens[: self._size.context_tokens])]
        self._show("round", 0, size.rounds)
        self._each(self._open)
        self._each(lambda seat: seat.take("cold", context))
        for step in range(size.chat_rounds):
            self._each_long("chat", lambda seat, step: chat(self._tokens, size, seat.turns.get("chat", [])), step)
        for step in range(size.questions * size.documents):
            self._each_long("documents", lambda seat, step: question(self._tokens, size, step), step)
        for number in range(size.rounds):
            self._show("round", number + 1, size.rounds)
            self._each(self._restart)
            self._each(lambda seat: seat.take("restart", context))
            for _ in range(size.memory):
                self._each(lambda seat: self._from_memory(seat, context))
            for step in range(number * size.misses, (number + 1) * size.misses):
                self._each_long("misses", lambda seat, step: miss(self._tokens, step), step)

    def _each(self, act: Callable[[Seat], None]) -> None:
        """Let each do something, another one first each time."""
        first = self._turn % len(self.seats)
        self._turn += 1
        for seat in self.seats[first:] + self.seats[:first]:
            try:
                act(seat)
            except RuntimeError as error:
                # A peer that does not run says nothing of the others.
                if not seat.contender.is_peer:
                    raise
                self.failures[seat.contender.name] = str(error)
                self.seats.remove(seat)
                seat.close()

    def _each_long(self, workload: str, prompts: Callable[[Seat, int], Prompts], step: int) -> None:
        """Let each answer that does more than restart."""
        self._each(lambda seat: None if seat.contender.is_brief else seat.take(workload, prompts(seat, step)))

    def _open(self, seat: Seat) -> None:
        seat.open(self._tokens[-300:])

    def _restart(self, seat: Seat) -> None:
        # Without a store a restart is no more than an empty cache.
        if seat.contender.transfer is None:
            seat.engine.do("reset")
        else:
            seat.close()
            if seat.contender.folder is not None:
                # kvtide reads past the page cache; others' files would come from memory.
                drop_page_cache(seat.contender.folder)
            self._open(seat)

    def _from_memory(self, seat: Seat, context: Prompts) -> None:
        if seat.contender.transfer is not None and not seat.contender.is_brief:
            # The first load brings it from the disk into memory.
            seat.engine.do("reset")
            seat.engine.ask(context[0], 1)
            seat.engine.do("reset")
            seat.take("memory", context)


def chat(tokens: Sequence[int], size: EngineBenchSize, said: Sequence[Turn]) -> Prompts:
    """Return what all users say next: their history, the answers they got and something new."""
    start = size.context_tokens
    system = list(tokens[start : start + 256])
    histories = [[*system, *tokens[start + 300 * i : start + 300 * i + 200]] for i in range(size.chat_users)]
    for round_, turn in enumerate(said):
        for user, answer in enumerate(turn.answers):
            fresh = start + CHAT_TOKENS // 2 + 150 * (round_ * size.chat_users + user)
            histories[user] += [*answer["ids"], *tokens[fresh : fresh + 150]]
    return histories


def question(tokens: Sequence[int], size: EngineBenchSize, step: int) -> Prompts:
    """Return the next question, about each document in turn."""
    first = 2 * size.context_tokens + step % size.documents * size.document_tokens
    return [[*tokens[first : first + size.document_tokens], *tokens[40 * step : 40 * (step + 1)]]]


def miss(tokens: Sequence[int], step: int) -> Prompts:
    """Return a prompt that shares nothing with any other."""
    first = len(tokens) - APART * (step + 2)
    return [list(tokens[first : first + MISS_TOKENS])]
