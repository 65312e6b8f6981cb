"""Real vLLM with and without kvtide, and beside what a user would pick instead: same prompts, same machine, one run.

Every contender has processes of its own and answers alone, in turn with the others. Seconds are its own; what is
compared are ratios of answers to the same request, one right after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_peers import LOSSLESS, Contender, contenders, link_contenders, link_name
from kvtide_lab.bench.engine_turns import Contest, EngineBenchSize, Seat, Turn

Progress = Callable[[str, int, int], None]
_WORKLOADS = ("restart", "memory", "chat", "documents", "misses")
FULL = EngineBenchSize()
QUICK = EngineBenchSize(rounds=1, misses=3, chat_users=2, chat_rounds=2, documents=1, questions=2)


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
    """The speed of kvtide over another's on the same requests: median and quartiles over pairs of answers."""

    of: str
    pairs: int
    median: float
    quarter: float
    three_quarters: float


class EngineBenchResult(msgspec.Struct, frozen=True):
    """All rows and what they say of kvtide: ratios of TTFT (restart, memory, link) and of throughput (misses).

    `miss_engine_cpu_vs_plain` compares the processor time of the engines' own threads on misses: what is left of the
    overhead where storing has a core to itself, whatever else the machine does.

    kvtide has its default codec, which is `raw` on a disk of this machine; `lossless` is restarted beside it.

    Above 1 means that kvtide, or `tide`, is faster; None where the other did not run, and `failures` says why if it
    could not. `ratios` has the spreads.
    """

    ttft_speedup_vs_plain: float
    tokens_restored: int
    is_identical: bool
    lossless_ttft_speedup_vs_plain: float
    lossless_is_identical: bool
    miss_throughput_vs_plain: float
    miss_engine_cpu_vs_plain: float
    restart_vs_native: float | None
    memory_vs_native: float | None
    restart_vs_lmcache: float | None
    link_tide_vs_raw: float | None
    link_mbit_s: float
    failed_requests: int
    failures: dict[str, str]
    model: str
    dtype: str
    ratios: list[Ratio]
    rows: list[EngineBenchRow]


def run(
    model: Path,
    tokens: Sequence[int],
    python: Path,
    lmcache_python: Path | None,
    peers: tuple[str, ...],
    stores: tuple[str, ...],
    link_mbit_s: float,
    size: EngineBenchSize,
    work: Path,
    show: Progress,
    dtype: str = "float32",
) -> EngineBenchResult:
    """Measure every contender. `tokens` is a long text; `python` has vLLM and kvtide; `stores` as in `contenders`.

    ValueError if the text is too short, and for what `contenders` and `link_contenders` refuse.
    """
    if len(tokens) < size.text_tokens():
        raise ValueError(f"the text must have {size.text_tokens()} tokens, got {len(tokens)}")
    here = contenders(python, lmcache_python, peers, stores, work)
    turns: dict[str, dict[str, list[Turn]]] = {}
    failures: dict[str, str] = {}
    with link_contenders(python, link_mbit_s, work) as linked, EngineNursery(python, work / "engines.log") as nursery:
        # Engines take 2 GB each, so that those behind the link come when the others have gone.
        for chosen in filter(None, (here, linked)):
            seats = [_seat(each, model, size, work, dtype, nursery) for each in chosen]
            with Contest(seats, tokens, size, show) as contest:
                contest.play()
            turns.update({seat.contender.name: seat.turns for seat in contest.seats})
            failures.update(contest.failures)
    return result_of(turns, failures, link_mbit_s, model.name, dtype)


def _seat(
    contender: Contender, model: Path, size: EngineBenchSize, work: Path, dtype: str, nursery: EngineNursery
) -> Seat:
    """Return a seat whose engine is forked where its environment is ours."""
    is_elsewhere = contender.prefix or contender.name == "lmcache"
    log = work / f"{contender.name.partition('/')[0]}.log"
    return Seat(contender, model, size, log, dtype, None if is_elsewhere else nursery)


def result_of(
    turns: dict[str, dict[str, list[Turn]]], failures: dict[str, str], link_mbit_s: float, model: str, dtype: str
) -> EngineBenchResult:
    """Return what turns say, by engine and workload."""
    rows = [_row(name, workload, turns) for name in turns for workload in _WORKLOADS if workload in turns[name]]
    plain, kvtide, native, lmcache = (turns.get(name) for name in ("plain", "kvtide", "native", "lmcache"))
    found = [
        _ratio("ttft_speedup_vs_plain", plain, kvtide, "restart", _ttft_s),
        _ratio("lossless_ttft_speedup_vs_plain", plain, turns[LOSSLESS], "restart", _ttft_s),
        _ratio("lossless_restart_vs_native", native, turns[LOSSLESS], "restart", _ttft_s),
        _ratio("miss_throughput_vs_plain", plain, kvtide, "misses", _seconds),
        _ratio("miss_engine_cpu_vs_plain", plain, kvtide, "misses", _cpu_s),
        _ratio("restart_vs_native", native, kvtide, "restart", _ttft_s),
        _ratio("memory_vs_native", native, kvtide, "memory", _ttft_s),
        _ratio("restart_vs_lmcache", lmcache, kvtide, "restart", _ttft_s),
        _ratio("link_tide_vs_raw", turns.get(link_name("raw")), turns.get(link_name("tide")), "restart", _ttft_s),
    ]
    ratios = [ratio for ratio in found if ratio is not None]
    medians = {ratio.of: ratio.median for ratio in ratios}
    restart = next(row for row in rows if (row.engine, row.workload) == ("kvtide", "restart"))
    answers = [answer for asked in turns["kvtide"].values() for turn in asked for answer in turn.answers]
    return EngineBenchResult(
        ttft_speedup_vs_plain=medians["ttft_speedup_vs_plain"],
        tokens_restored=restart.tokens_restored // restart.requests,
        is_identical=all(row.is_identical for row in rows if row.engine == "kvtide"),
        lossless_ttft_speedup_vs_plain=medians["lossless_ttft_speedup_vs_plain"],
        lossless_is_identical=all(row.is_identical for row in rows if row.engine == LOSSLESS),
        miss_throughput_vs_plain=medians["miss_throughput_vs_plain"],
        miss_engine_cpu_vs_plain=medians["miss_engine_cpu_vs_plain"],
        restart_vs_native=medians.get("restart_vs_native"),
        memory_vs_native=medians.get("memory_vs_native"),
        restart_vs_lmcache=medians.get("restart_vs_lmcache"),
        link_tide_vs_raw=medians.get("link_tide_vs_raw"),
        link_mbit_s=link_mbit_s,
        failed_requests=sum(answer["finish"] != "length" for answer in answers),
        failures=failures,
        model=model,
        dtype=dtype,
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


def _ratio(
    of: str,
    slow: dict[str, list[Turn]] | None,
    fast: dict[str, list[Turn]] | None,
    workload: str,
    measure: Callable[[Turn], float],
) -> Ratio | None:
    if slow is None or fast is None:
        return None
    pairs = zip(slow[workload], fast[workload], strict=True)
    ratios = [measure(theirs) / measure(ours) for theirs, ours in pairs]
    quarter, three_quarters = (float(np.percentile(ratios, share)) for share in (25, 75))
    return Ratio(of, len(ratios), statistics.median(ratios), quarter, three_quarters)


def _ttft_s(turn: Turn) -> float:
    return float(turn.answers[0]["ttft_s"])


def _seconds(turn: Turn) -> float:
    return turn.seconds


def _cpu_s(turn: Turn) -> float:
    return turn.cpu_s


def table(result: EngineBenchResult) -> Table:
    """Return the result as people read it."""
    shown = Table("workload", "engine", "TTFT p50", "p99", "requests/s", "restored", "identical", title=result.model)
    for workload in _WORKLOADS:
        for row in result.rows:
            if row.workload == workload:
                restored = f"{row.tokens_restored} of {row.prompt_tokens}"
                times = (f"{row.ttft_p50_s:.3f} s", f"{row.ttft_p99_s:.3f} s", f"{row.requests_per_s:.3f}")
                shown.add_row(workload, row.engine, *times, restored, "yes" if row.is_identical else "no")
    for engine, failure in result.failures.items():
        shown.add_row("", engine, "did not run:", failure.splitlines()[-1])
    shown.caption = "\n".join(
        f"{each.of} {each.median:.3f} ({each.quarter:.3f} to {each.three_quarters:.3f}, {each.pairs} pairs)"
        for each in result.ratios
    )
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
    others = (("vLLM's own tiering", result.restart_vs_native), ("LMCache", result.restart_vs_lmcache))
    beside = "".join(f", {ratio:.2g} times {name}" for name, ratio in others if ratio is not None)
    finding = f"after a restart {result.ttft_speedup_vs_plain:.0f} times as fast as computing{beside}"
    axes.set_title(f"{result.model}, {result.dtype}: {finding}", fontsize="medium")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
