"""Real vLLM with and without kvtide, and beside what a user would pick instead: same prompts, same machine, one run.

Every contender has processes of its own and answers alone, in turn with the others. Seconds are its own; what is
compared are ratios of answers to the same request, one right after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from kvtide_lab.bench.engine_peers import (
    LOSSLESS,
    Contender,
    contenders,
    drop_page_cache,
    link_contenders,
    link_name,
    settle,
    side_server,
)
from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess
from kvtide_lab.measuring import Show, in_turns, spread_of

Prompts = list[list[int]]
MISS_TOKENS = 500
# Room between texts that must not begin alike.
APART = 600


class EngineBenchSize(msgspec.Struct, frozen=True):
    """The amount of questions. Tokens are those of the model.

    `rounds`: how often every engine is restarted; `memory` and `misses` are asked so often in each of them.
    """

    rounds: int = 5
    context_tokens: int = 2068
    answer_tokens: int = 16
    memory: int = 3
    misses: int = 6
    # The engine's own prefix cache can't hold all prompts.
    pages: int = 28

    def text_tokens(self) -> int:
        """Return how long the text has to be."""
        return self.context_tokens + APART * (self.rounds * self.misses + 2)


class Turn(msgspec.Struct, frozen=True):
    """A contender's answer to prompts that arrived together. `cpu_s` is of the engine's own thread."""

    answers: list[dict[str, Any]]
    seconds: float
    cpu_s: float
    prompt_tokens: int


class Seat:
    """A contender, its engine while it runs, and its turns by workload."""

    def __init__(
        self, contender: Contender, model: Path, size: EngineBenchSize, work: Path, nursery: EngineNursery
    ) -> None:
        """Its engine is forked where its environment is ours."""
        self.contender = contender
        self.turns: dict[str, list[Turn]] = {}
        self._log = work / f"{contender.name}.log"
        is_elsewhere = contender.prefix or contender.name == "lmcache"
        options = {"max_num_batched_tokens": 4096, "max_model_len": 3072, "num_gpu_blocks_override": size.pages}
        self._engine_of = partial(
            EngineProcess,
            contender.python,
            model,
            self._log,
            contender.transfer,
            options,
            prefix=contender.prefix,
            nursery=None if is_elsewhere else nursery,
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

    def __exit__(self, *error: object) -> None:
        for seat in self.seats:
            seat.close()

    def play(self) -> None:
        """Fill the stores, then measure. RuntimeError if plain vLLM or kvtide fails; a peer that does is left out."""
        size, context = self._size, [list(self._tokens[: self._size.context_tokens])]
        self._show("round", 0, size.rounds)
        self._each(self._open)
        self._each(lambda seat: seat.take("cold", context))
        for number in range(size.rounds):
            self._show("round", number + 1, size.rounds)
            self._each(self._restart)
            self._each(lambda seat: seat.take("restart", context))
            for _ in range(size.memory):
                self._each(lambda seat: self._from_memory(seat, context))
            for step in range(number * size.misses, (number + 1) * size.misses):
                self._each(lambda seat, step=step: self._miss(seat, step))  # type: ignore[misc]

    def _each(self, act: Callable[[Seat], None]) -> None:
        """Let each do something, another one first each time."""
        seats = in_turns(self.seats, self._turn)
        self._turn += 1
        for seat in seats:
            try:
                act(seat)
            except RuntimeError as error:
                # A peer that does not run says nothing of the others.
                if not seat.contender.is_peer:
                    raise
                self.failures[seat.contender.name] = str(error)
                self.seats.remove(seat)
                seat.close()

    def _miss(self, seat: Seat, step: int) -> None:
        if not seat.contender.is_brief:
            seat.take("misses", miss(self._tokens, step))

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


def miss(tokens: Sequence[int], step: int) -> Prompts:
    """Return a prompt that shares nothing with any other."""
    first = len(tokens) - APART * (step + 2)
    return [list(tokens[first : first + MISS_TOKENS])]


_WORKLOADS = ("restart", "memory", "misses")
FULL = EngineBenchSize()
QUICK = EngineBenchSize(rounds=1, misses=3)


class EngineBenchRow(msgspec.Struct, frozen=True):
    """One contender on one workload. `tokens_restored` counts those that were not computed, however that came.

    `is_identical`: all answers are token for token those of plain vLLM.
    """

    engine: str
    workload: str
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    prompt_tokens: int
    tokens_restored: int
    is_identical: bool


class Ratio(msgspec.Struct, frozen=True):
    """The speed of `fast` over `slow` (`_RATIOS`) on the same requests: median and quartiles over pairs of answers."""

    of: str
    pairs: int
    median: float
    quarter: float
    three_quarters: float


class EngineBenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """All rows and what they say of kvtide: ratios of TTFT (restart, memory, link) and of throughput (misses).

    kvtide has its default codec, `raw` on a disk of this machine; `lossless` is restarted beside it. Above 1 means that
    kvtide, or `tide`, is faster; None where the other did not run, and `failures` says why if it could not. `ratios`
    has the spreads. `miss_engine_cpu_vs_plain` compares processor time of the engines' own threads: what is left of the
    overhead where storing has a core to itself.
    """

    ttft_speedup_vs_plain: float
    tokens_restored: int
    is_identical: bool
    lossless_ttft_speedup_vs_plain: float
    lossless_is_identical: bool
    miss_throughput_vs_plain: float
    miss_engine_cpu_vs_plain: float
    restart_vs_native: float | None
    lossless_restart_vs_native: float | None
    memory_vs_native: float | None
    restart_vs_lmcache: float | None
    link_tide_vs_raw: float | None
    link_mbit_s: float
    failed_requests: int
    failures: dict[str, str]
    model: str
    ratios: list[Ratio]
    rows: list[EngineBenchRow]


def run(
    model: Path,
    tokens: Sequence[int],
    python: Path,
    lmcache_python: Path | None,
    peers: tuple[str, ...],
    link_mbit_s: float,
    size: EngineBenchSize,
    work: Path,
    show: Show,
) -> EngineBenchResult:
    """Measure every contender. `tokens` is a long text; `python` has vLLM and kvtide.

    ValueError if the text is too short, and for what `contenders` and `link_contenders` refuse.
    """
    if len(tokens) < size.text_tokens():
        raise ValueError(f"the text must have {size.text_tokens()} tokens, got {len(tokens)}")
    here = contenders(python, lmcache_python, peers, work)
    turns: dict[str, dict[str, list[Turn]]] = {}
    failures: dict[str, str] = {}
    with link_contenders(python, link_mbit_s, work) as linked, EngineNursery(python, work / "engines.log") as nursery:
        # Engines take 2 GB each, so that those behind the link come when the others have gone.
        for chosen in filter(None, (here, linked)):
            seats = [Seat(each, model, size, work, nursery) for each in chosen]
            with Contest(seats, tokens, size, show) as contest:
                contest.play()
            turns.update({seat.contender.name: seat.turns for seat in contest.seats})
            failures.update(contest.failures)
    return result_of(turns, failures, link_mbit_s, model.name)


def result_of(
    turns: dict[str, dict[str, list[Turn]]], failures: dict[str, str], link_mbit_s: float, model: str
) -> EngineBenchResult:
    """Return what turns say, by engine and workload."""
    rows = [_row(name, workload, turns) for name in turns for workload in _WORKLOADS if workload in turns[name]]
    ratios = [
        _ratio(of, turns[slow][workload], turns[fast][workload], measure)
        for of, (slow, fast, workload, measure) in _RATIOS.items()
        if slow in turns and fast in turns
    ]
    medians = {ratio.of: ratio.median for ratio in ratios}
    restart = next(row for row in rows if (row.engine, row.workload) == ("kvtide", "restart"))
    answers = [answer for asked in turns["kvtide"].values() for turn in asked for answer in turn.answers]
    return EngineBenchResult(
        **{name: medians.get(name) for name in _RATIOS},  # type: ignore[arg-type]  # plain and kvtide always run
        tokens_restored=restart.tokens_restored // restart.requests,
        is_identical=all(row.is_identical for row in rows if row.engine == "kvtide"),
        lossless_is_identical=all(row.is_identical for row in rows if row.engine == LOSSLESS),
        link_mbit_s=link_mbit_s,
        failed_requests=sum(answer["finish"] != "length" for answer in answers),
        failures=failures,
        model=model,
        ratios=ratios,
        rows=rows,
    )


def _row(name: str, workload: str, turns: dict[str, dict[str, list[Turn]]]) -> EngineBenchRow:
    asked, plain = turns[name][workload], turns["plain"]
    # Plain vLLM has nothing in memory; its answer to the same prompt stands for it.
    expected = [plain["cold"][0]] * len(asked) if workload == "memory" else plain[workload]
    answers = [answer for turn in asked for answer in turn.answers]
    ttfts = [answer["ttft_s"] for answer in answers]
    return EngineBenchRow(
        engine=name,
        workload=workload,
        requests=len(answers),
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        requests_per_s=len(answers) / sum(turn.seconds for turn in asked),
        prompt_tokens=sum(turn.prompt_tokens for turn in asked),
        tokens_restored=sum(answer["cached_tokens"] for answer in answers),
        is_identical=[_ids(turn) for turn in asked] == [_ids(turn) for turn in expected],
    )


def _ids(turn: Turn) -> list[list[int]]:
    return [answer["ids"] for answer in turn.answers]


def _ttft_s(turn: Turn) -> float:
    return float(turn.answers[0]["ttft_s"])


# Of each: the slower, the faster, on which workload, measured by what.
_RATIOS: dict[str, tuple[str, str, str, Callable[[Turn], float]]] = {
    "ttft_speedup_vs_plain": ("plain", "kvtide", "restart", _ttft_s),
    "lossless_ttft_speedup_vs_plain": ("plain", LOSSLESS, "restart", _ttft_s),
    "miss_throughput_vs_plain": ("plain", "kvtide", "misses", attrgetter("seconds")),
    "miss_engine_cpu_vs_plain": ("plain", "kvtide", "misses", attrgetter("cpu_s")),
    "restart_vs_native": ("native", "kvtide", "restart", _ttft_s),
    "lossless_restart_vs_native": ("native", LOSSLESS, "restart", _ttft_s),
    "memory_vs_native": ("native", "kvtide", "memory", _ttft_s),
    "restart_vs_lmcache": ("lmcache", "kvtide", "restart", _ttft_s),
    "link_tide_vs_raw": (link_name("raw"), link_name("tide"), "restart", _ttft_s),
}


def _ratio(of: str, slow: Sequence[Turn], fast: Sequence[Turn], measure: Callable[[Turn], float]) -> Ratio:
    ratios = [measure(theirs) / measure(ours) for theirs, ours in zip(slow, fast, strict=True)]
    spread = spread_of(ratios)
    return Ratio(of, len(ratios), spread.median, spread.quarter, spread.three_quarters)
