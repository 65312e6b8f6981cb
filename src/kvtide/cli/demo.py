"""`kvtide demo`: prefill once, restore in another process, on a real model; says what that was worth."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtide.cli.demo_job import DemoJob, DemoRun
from kvtide.cli.looking import DEFAULT_STORE, StoreOption
from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes
from kvtide.tier import disk_path

# New processes that restore, one after the other: half a second on a shared machine is too short to be judged once.
_WARM_RUNS = 3
# What is shown beside the codec that was asked for.
_LOSSY = "tide"
_LABELS = {
    "load model": "load the model",
    "prefill": "prefill",
    "answer": "answer",
    "store": "store blocks",
}


class DemoLossy(msgspec.Struct, frozen=True):
    """The same prompt through a lossy codec. `kl`: of the answer's next-token distributions from the exact ones."""

    codec: str
    hit_tokens: int
    warm_ttft_s: float
    identical_tokens: bool
    raw_bytes: int
    stored_bytes: int
    kl: float
    answer: str


class DemoResult(msgspec.Struct, frozen=True):
    """The figures of a demo. Bytes are those of the blocks that a new process restored.

    `warm_ttft_s` is the median of `warm_ttft_s_runs`, one for each new process; all must answer the same.
    """

    prompt_tokens: int
    hit_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    warm_ttft_s_runs: list[float]
    speedup: float
    identical_tokens: bool
    raw_bytes: int
    stored_bytes: int
    codec: str
    was_warm: bool
    store: str
    plot: str | None
    answer: str
    tide: DemoLossy


def demo(
    url: StoreOption = DEFAULT_STORE,
    codec: Annotated[str, typer.Option("--codec", help="Codec of new blocks.")] = "lossless",
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=256, max=7000, help="Shared context before the question.")
    ] = 2048,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=2, max=512)] = 48,
    as_json: JsonOption = False,
) -> None:
    """Answer a question over a long text twice: a cold process prefills and stores, a new one restores."""
    store = _disk_store(url)
    console = Console(stderr=True) if as_json else CONSOLE
    with console.status("preparing the model (converted once, under a minute)"):
        from kvtide.codec import CodecRegistry
        from kvtide.engines.transformers import converted_folder

        CodecRegistry().make(codec)
        folder = converted_folder()
    job = DemoJob(str(folder), str(store), codec, prefix_tokens, answer_tokens, is_judged=False)
    cold = _phase("cold", job, console)
    if cold.was_warm:
        console.print(f"The store at {store} is warm: it has this text from an earlier run. The cold figure is a")
        console.print("full prefill without the cache, measured now.")
    warm = [_phase("warm", job, console) for _ in range(_WARM_RUNS)]
    lossy_job = msgspec.structs.replace(job, codec=_LOSSY)
    # Blocks of lossy codecs have a namespace of their own: the first run stores them.
    _phase("cold", lossy_job, console)
    lossy = _phase("warm", msgspec.structs.replace(lossy_job, is_judged=True), console)
    result = _result(store, codec, cold, warm, lossy)
    plot = _plot(result, store.with_name(f"{store.name}.png"))
    result = msgspec.structs.replace(result, plot=plot)
    if as_json:
        emit_json(result)
    else:
        _print(result)


def _disk_store(url: str) -> Path:
    path = disk_path(url)
    if path is None:
        raise ValueError(f"the demo needs a store that a second process can open, as disk:///path, got {url!r}")
    return path.absolute()


def _phase(phase: str, job: DemoJob, console: Console) -> DemoRun:
    """Run one process of the demo and show its progress."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(job))
        file.flush()
        return _run_phase(phase, job.codec, file.name, Progress(*columns, console=console))


def _run_phase(phase: str, codec: str, job: str, progress: Progress) -> DemoRun:
    command = [sys.executable, "-m", "kvtide.cli.demo_run", phase, job]
    with (
        progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        result = _follow(f"{codec}, {phase}", process.stdout, progress)
    if process.returncode != 0 or result is None:
        raise ValueError(f"the {phase} run of the demo failed with status {process.returncode}; its error is above")
    return result


def _follow(phase: str, lines: Iterable[str], progress: Progress) -> DemoRun | None:
    tasks: dict[str, TaskID] = {}
    result: DemoRun | None = None
    for line in lines:
        message = json.loads(line)
        if "result" in message:
            result = msgspec.convert(message["result"], DemoRun)
            continue
        step = message["step"]
        if step not in tasks:
            tasks[step] = progress.add_task(f"{phase}: {_LABELS[step]}", total=message["total"])
        progress.update(tasks[step], completed=message["done"])
    return result


def _result(store: Path, codec: str, cold: DemoRun, warm: Sequence[DemoRun], lossy: DemoRun) -> DemoResult:
    warm_ttft_s = statistics.median(run.ttft_s for run in warm)
    return DemoResult(
        prompt_tokens=warm[0].prompt_tokens,
        hit_tokens=min(run.hit_tokens for run in warm),
        cold_ttft_s=cold.ttft_s,
        warm_ttft_s=warm_ttft_s,
        warm_ttft_s_runs=[run.ttft_s for run in warm],
        speedup=cold.ttft_s / warm_ttft_s,
        identical_tokens=all(run.answer_ids == cold.answer_ids for run in warm),
        raw_bytes=warm[0].raw_bytes,
        stored_bytes=warm[0].stored_bytes,
        codec=codec,
        was_warm=cold.was_warm,
        store=str(store),
        plot=None,
        answer=warm[0].answer,
        tide=DemoLossy(
            codec=_LOSSY,
            hit_tokens=lossy.hit_tokens,
            warm_ttft_s=lossy.ttft_s,
            identical_tokens=lossy.answer_ids == cold.answer_ids,
            raw_bytes=lossy.raw_bytes,
            stored_bytes=lossy.stored_bytes,
            kl=lossy.kl or 0.0,
            answer=lossy.answer,
        ),
    )


def _print(result: DemoResult) -> None:
    tide = result.tide
    restored = f"{result.codec}, new process (median of {_WARM_RUNS})"
    table = Table(
        "", "cold process", restored, f"{tide.codec}, new process", title="SmolLM2-135M, float32, on this machine"
    )
    times = [f"{seconds:.2f} s" for seconds in (result.cold_ttft_s, result.warm_ttft_s, tide.warm_ttft_s)]
    table.add_row("time to first token", *times)
    table.add_row("prompt tokens", *[str(result.prompt_tokens)] * 3)
    table.add_row("tokens restored", "0", str(result.hit_tokens), str(tide.hit_tokens))
    table.add_row("KV cache raw", "", format_bytes(result.raw_bytes), format_bytes(tide.raw_bytes))
    table.add_row("stored", "", format_bytes(result.stored_bytes), format_bytes(tide.stored_bytes))
    identical = ["yes" if is_same else "no" for is_same in (result.identical_tokens, tide.identical_tokens)]
    table.add_row("answers identical", "", *identical)
    table.add_row("KL from exact", "", "", f"{tide.kl:.5f}")
    CONSOLE.print(table)
    CONSOLE.print(f"[bold]{result.speedup:.1f} times faster to the first token.[/] Answer: {result.answer.strip()}")
    CONSOLE.print(f"store: {result.store}" + (f", chart: {result.plot}" if result.plot else ""))


def _plot(result: DemoResult, path: Path) -> str | None:
    """Draw the bar chart beside the store; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(
        ["restored", "full prefill"], [result.warm_ttft_s, result.cold_ttft_s], color=["#2a9d8f", "#adb5bd"]
    )
    axes.bar_label(bars, fmt="%.2f s", padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel("time to first token, seconds")
    axes.set_title(f"{result.hit_tokens} of {result.prompt_tokens} tokens restored: {result.speedup:.1f} times faster")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return str(path)
