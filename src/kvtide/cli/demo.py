"""`kvtide demo`: prefill once, restore in another process, on a real model; says what that was worth."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from kvtide.cli.demo_job import DemoJob, DemoRun
from kvtide.cli.demo_link import LINK_CODEC, link_table, stream_over
from kvtide.cli.demo_runner import demo_runs, figure_type
from kvtide.cli.report import CONSOLE, JsonOption, cpu_name, emit, emit_json, format_bytes
from kvtide.cli.store import DEFAULT_STORE, StoreOption
from kvtide.codec import CodecRegistry
from kvtide.tier import disk_path

# New processes that restore, one after the other: half a second on a shared machine is too short to be judged once.
_WARM_RUNS = 3
# What is shown beside the codec that was asked for.
_LOSSY = "tide"


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
    codec: Annotated[
        str | None, typer.Option("--codec", help=f"Codec of new blocks [lossless; with --link {LINK_CODEC}].")
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=256, max=7000, help="Shared context before the question.")
    ] = 2048,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=2, max=512)] = 48,
    link: Annotated[
        str | None,
        typer.Option("--link", help="Stream over a link of this rate, as 20mbit; the chart lies beside --store."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question over a long text twice: a cold process prefills and stores, a new one restores."""
    store = _disk_store(url)
    console = Console(stderr=True) if as_json else CONSOLE
    if link is not None:
        chart = store.with_name(f"{store.name}-link.png")
        emit(stream_over(link, codec or LINK_CODEC, prefix_tokens, answer_tokens, chart, console), link_table, as_json)
        return
    codec = codec or "lossless"
    CodecRegistry().make(codec)
    cold = DemoJob(str(store), codec, prefix_tokens, answer_tokens, is_cold=True)
    warm = msgspec.structs.replace(cold, is_cold=False)
    # Blocks of lossy codecs have a namespace of their own: the first run stores them, and restores them the next time.
    jobs = {f"{codec}: prefill and store": cold}
    jobs |= {f"{codec}: new process {number} of {_WARM_RUNS}": warm for number in range(1, _WARM_RUNS + 1)}
    jobs[f"{_LOSSY}: prefill and store"] = msgspec.structs.replace(warm, codec=_LOSSY, answer_tokens=2)
    jobs[f"{_LOSSY}: new process"] = msgspec.structs.replace(warm, codec=_LOSSY, exact="lossless")
    with demo_runs(jobs, console) as run:
        first, *others, _, lossy = [run(name, job) for name, job in jobs.items()]
    if first.was_warm:
        console.print("The store has this text from an earlier run: the full prefill is measured without it.")
    result = _result(store, codec, first, others, lossy)
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
    tide, cores = result.tide, os.cpu_count() or 1
    machine = f"{cores} {'core' if cores == 1 else 'cores'} ({cpu_name()})"
    restored = f"s in a new process, {result.hit_tokens:,} tokens restored"
    lines = [
        f"SmolLM2-135M, {result.prompt_tokens:,} tokens, on {machine}:",
        f"{result.cold_ttft_s:8.2f} s to the first token by a full prefill",
        f"{result.warm_ttft_s:8.2f} {restored}: [bold]{result.speedup:.1f} times faster[/]",
        f"           {result.codec}: {_same(result.identical_tokens)}; {format_bytes(result.raw_bytes)} in"
        f" {format_bytes(result.stored_bytes)}",
        f"{tide.warm_ttft_s:8.2f} {restored}",
        f"           {tide.codec}, which is lossy: {_same(tide.identical_tokens)};"
        f" in {format_bytes(tide.stored_bytes)}, KL {tide.kl:.4f}",
    ]
    CONSOLE.print("\n".join(lines), highlight=False, soft_wrap=True)
    CONSOLE.print(f"Answer: {result.answer.strip()}")
    CONSOLE.print(f"store: {result.store}" + (f", chart: {result.plot}" if result.plot else ""))


def _same(is_same: bool) -> str:
    return "the same answer token for token" if is_same else "another answer"


def _plot(result: DemoResult, path: Path) -> str | None:
    """Draw every way's time beside the store; None where matplotlib is not installed."""
    make = figure_type()
    if make is None:
        return None
    figure = make(figsize=(6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    ways = [f"restored, {result.tide.codec}", f"restored, {result.codec}", "full prefill"]
    times = [result.tide.warm_ttft_s, result.warm_ttft_s, result.cold_ttft_s]
    bars = axes.barh(ways, times, color=["#264653", "#2a9d8f", "#adb5bd"])
    axes.bar_label(bars, fmt="%.2f s", padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel(f"time to first token, seconds, on {os.cpu_count()} cores")
    axes.set_title(f"{result.hit_tokens} of {result.prompt_tokens} tokens restored: {result.speedup:.1f} times faster")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return str(path)
