"""Real vLLM with and without kvtide, and beside what a user would pick instead: same prompts, same machine, one run.

Every contender runs alone in processes of its own. Seconds are its own; what is compared are ratios within the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from kvtide.bench.engine_peers import Contender, contenders, settle, side_server
from kvtide.bench.engine_process import EngineProcess

__all__ = ["EngineBenchResult", "EngineBenchRow", "EngineBenchSize", "plot", "run", "table"]

Progress = Callable[[str, int, int], None]
_WORKLOADS = ("restart", "memory", "chat", "documents", "misses")


class EngineBenchSize(msgspec.Struct, frozen=True):
    """How much is asked. Tokens are those of the model."""

    context_tokens: int = 2068
    answer_tokens: int = 16
    repeats: int = 3
    users: int = 3
    rounds: int = 3
    documents: int = 3
    questions: int = 3
    document_tokens: int = 640
    misses: int = 8
    # Fewer pages than chats and documents need together: the engine's own prefix cache can't hold them all.
    pages: int = 28


QUICK = EngineBenchSize(repeats=1, users=2, rounds=2, documents=2, questions=2, misses=3)


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


class EngineBenchResult(msgspec.Struct, frozen=True):
    """All rows and what they say of kvtide: ratios of TTFT (restart, memory) and of throughput (misses).

    Above 1 means that kvtide is faster; None where the peer did not run, and `peer_failures` says why if it could not.
    """

    ttft_speedup_vs_plain: float
    tokens_restored: int
    is_identical: bool
    miss_throughput_vs_plain: float
    restart_vs_native: float | None
    memory_vs_native: float | None
    restart_vs_lmcache: float | None
    failed_requests: int
    peer_failures: dict[str, str]
    model: str
    dtype: str
    rows: list[EngineBenchRow]


class _Asked(msgspec.Struct):
    """Answers of one contender, by workload."""

    answers: dict[str, list[dict[str, Any]]]
    seconds: dict[str, float]
    prompt_tokens: dict[str, int]


def run(
    model: Path,
    tokens: Sequence[int],
    python: Path,
    lmcache_python: Path | None,
    peers: tuple[str, ...],
    stores: tuple[str, ...],
    size: EngineBenchSize,
    work: Path,
    show: Progress,
    dtype: str = "float32",
) -> EngineBenchResult:
    """Measure every contender. `tokens` is a long text; `python` has vLLM and kvtide; `stores` as in
    `contenders`. ValueError if the text is too short."""
    needed = 2 * size.context_tokens + size.documents * size.document_tokens + 600 * (size.misses + size.users)
    if len(tokens) < needed:
        raise ValueError(f"the text must have {needed} tokens, got {len(tokens)}")
    all_contenders = contenders(python, lmcache_python, peers, stores, work)
    asked: dict[str, _Asked] = {}
    failures: dict[str, str] = {}
    for number, contender in enumerate(all_contenders):
        show(contender.name, number, len(all_contenders))
        try:
            asked[contender.name] = _measure(contender, model, tokens, size, work, dtype)
        except RuntimeError as error:
            # A peer that does not run says nothing of the others.
            if contender.name not in peers:
                raise
            failures[contender.name] = str(error)
    show("engines", len(all_contenders), len(all_contenders))
    rows = [
        _row(name, workload, found, asked["plain"])
        for name, found in asked.items()
        for workload in _WORKLOADS
        if workload in found.answers
    ]
    return _result(rows, asked, failures, model.name, dtype)


def _measure(
    contender: Contender, model: Path, tokens: Sequence[int], size: EngineBenchSize, work: Path, dtype: str
) -> _Asked:
    found = _Asked({}, {}, {})
    log = work / f"{contender.name}.log"
    options = {"max_num_batched_tokens": 4096, "max_model_len": 3072, "num_gpu_blocks_override": size.pages}
    context = list(tokens[: size.context_tokens])
    with (
        side_server(contender, log),
        EngineProcess(contender.python, model, log, contender.transfer, options, dtype) as engine,
    ):
        _warm_up(engine, tokens)
        cold = engine.ask(context, size.answer_tokens)
        if contender.transfer is None:
            _note(found, "restart", [cold], cold["ttft_s"], [context])
        for workload, prompts in (("chat", _chat), ("documents", _documents), ("misses", _misses)):
            for batch in prompts(tokens, size, found):
                result = engine.generate([{"ids": ids, "answer_tokens": size.answer_tokens} for ids in batch])
                _note(found, workload, result["answers"], result["seconds"], batch)
        if contender.name.startswith("kvtide"):
            engine.do("settle")
        settle(contender.folder)
        for _ in range(size.repeats if contender.transfer else 0):
            engine.ask(context, 1)
            engine.do("reset")
            answer = engine.ask(context, size.answer_tokens)
            _note(found, "memory", [answer], answer["ttft_s"], [context])
            engine.do("reset")
    if contender.transfer is not None:
        for _ in range(size.repeats):
            with (
                side_server(contender, log),
                EngineProcess(contender.python, model, log, contender.transfer, options, dtype) as engine,
            ):
                _warm_up(engine, tokens)
                answer = engine.ask(context, size.answer_tokens)
                _note(found, "restart", [answer], answer["ttft_s"], [context])
    return found


def _warm_up(engine: EngineProcess, tokens: Sequence[int]) -> None:
    engine.ask(tokens[-300:], 2)
    engine.do("reset")


def _note(found: _Asked, workload: str, answers: list[Any], seconds: float, prompts: Sequence[Sequence[int]]) -> None:
    found.answers.setdefault(workload, []).extend(answers)
    found.seconds[workload] = found.seconds.get(workload, 0.0) + seconds
    found.prompt_tokens[workload] = found.prompt_tokens.get(workload, 0) + sum(map(len, prompts))


def _chat(tokens: Sequence[int], size: EngineBenchSize, found: _Asked) -> Iterator[list[list[int]]]:
    """Yield what all users say in each round: their history, the answers they got and something new."""
    start = size.context_tokens
    system = list(tokens[start : start + 256])
    histories = [system + list(tokens[start + 300 * user : start + 300 * user + 200]) for user in range(size.users)]
    for turn in range(size.rounds):
        yield [list(history) for history in histories]
        answers = found.answers["chat"][-size.users :]
        for user, answer in enumerate(answers):
            fresh = start + 4000 + 150 * (turn * size.users + user)
            histories[user] += [*answer["ids"], *tokens[fresh : fresh + 150]]


def _documents(tokens: Sequence[int], size: EngineBenchSize, found: _Asked) -> Iterator[list[list[int]]]:
    """Yield one question at a time, about each document in turn."""
    start = 2 * size.context_tokens
    for question in range(size.questions):
        for document in range(size.documents):
            first = start + document * size.document_tokens
            asked = 40 * (question * size.documents + document)
            yield [[*tokens[first : first + size.document_tokens], *tokens[asked : asked + 40]]]


def _misses(tokens: Sequence[int], size: EngineBenchSize, found: _Asked) -> Iterator[list[list[int]]]:
    """Yield prompts that share nothing with any other."""
    for number in range(size.misses):
        first = len(tokens) - 600 * (number + 2)
        yield [list(tokens[first : first + 500])]


def _row(name: str, workload: str, found: _Asked, plain: _Asked) -> EngineBenchRow:
    answers = found.answers[workload]
    ttfts = [answer["ttft_s"] for answer in answers]
    # Plain vLLM answers the long context once; others restore it several times.
    expected = plain.answers["restart" if workload == "memory" else workload]
    ids = [answer["ids"] for answer in answers]
    return EngineBenchRow(
        engine=name,
        workload=workload,
        requests=len(answers),
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        requests_per_s=len(answers) / found.seconds[workload],
        prompt_tokens=found.prompt_tokens[workload],
        tokens_restored=sum(answer["cached_tokens"] for answer in answers),
        is_identical=all(each == expected[i % len(expected)]["ids"] for i, each in enumerate(ids)),
    )


def _result(
    rows: list[EngineBenchRow], asked: dict[str, _Asked], failures: dict[str, str], model: str, dtype: str
) -> EngineBenchResult:
    by_name = {(row.engine, row.workload): row for row in rows}
    restart = by_name["kvtide", "restart"]

    def speedup(engine: str, workload: str) -> float | None:
        other = by_name.get((engine, workload))
        return other.ttft_p50_s / by_name["kvtide", workload].ttft_p50_s if other else None

    finishes = [answer["finish"] for answers in asked["kvtide"].answers.values() for answer in answers]
    return EngineBenchResult(
        ttft_speedup_vs_plain=by_name["plain", "restart"].ttft_p50_s / restart.ttft_p50_s,
        tokens_restored=restart.tokens_restored // restart.requests,
        is_identical=all(row.is_identical for row in rows if row.engine == "kvtide"),
        miss_throughput_vs_plain=by_name["kvtide", "misses"].requests_per_s / by_name["plain", "misses"].requests_per_s,
        restart_vs_native=speedup("native", "restart"),
        memory_vs_native=speedup("native", "memory"),
        restart_vs_lmcache=speedup("lmcache", "restart"),
        failed_requests=sum(finish != "length" for finish in finishes),
        peer_failures=failures,
        model=model,
        dtype=dtype,
        rows=rows,
    )


def table(result: EngineBenchResult) -> Table:
    """Return the result as people read it."""
    shown = Table("workload", "engine", "TTFT p50", "p99", "requests/s", "restored", "identical", title=result.model)
    for workload in _WORKLOADS:
        for row in result.rows:
            if row.workload == workload:
                restored = f"{row.tokens_restored} of {row.prompt_tokens}"
                times = (f"{row.ttft_p50_s:.3f} s", f"{row.ttft_p99_s:.3f} s", f"{row.requests_per_s:.3f}")
                shown.add_row(workload, row.engine, *times, restored, "yes" if row.is_identical else "no")
    for peer, failure in result.peer_failures.items():
        shown.add_row("", peer, "did not run:", failure.splitlines()[-1])
    speedup, misses = result.ttft_speedup_vs_plain, result.miss_throughput_vs_plain
    shown.caption = f"after a restart {speedup:.1f} times faster than plain; all misses {misses:.3f} of its throughput"
    return shown


def plot(result: EngineBenchResult, path: Path) -> None:
    """Draw the median TTFT of every contender on every workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    engines = list(dict.fromkeys(row.engine for row in result.rows))
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for position, engine in enumerate(engines):
        rows = {row.workload: row.ttft_p50_s for row in result.rows if row.engine == engine}
        places = [_WORKLOADS.index(workload) + 0.8 * position / len(engines) for workload in rows]
        axes.bar(places, list(rows.values()), width=0.8 / len(engines), align="edge", label=engine)
    axes.set_xticks([number + 0.4 for number in range(len(_WORKLOADS))], _WORKLOADS)
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, s")
    axes.set_title(f"{result.model}, {result.dtype}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
