"""`kvtide demo`: prefill once, restore in another process, on a real model; says what that was worth.

Its runs are `demo_run`, in processes of their own: jobs go there and measurements come back, a line of JSON each.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvtide.cli.report import CONSOLE, JsonOption, cpu_name, emit, format_bytes, narrow_table, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption
from kvtide.codec import CodecRegistry
from kvtide.config import cache_home
from kvtide.engines import installed_profiles
from kvtide.tier import disk_path

# New processes that restore, one after the other: half a second on a shared machine is too short to be judged once.
_WARM_RUNS = 3
# Shown beside the codec that was asked for.
_LOSSY = "tide"
# Of a demo over a link: a base and three refinements.
LINK_CODEC = "tide:1e-3:3"
RATE_BITS_S_MIN, RATE_BITS_S_MAX = 1e6, 1e11
# Times to start within, in shares of a plain prefill; None waits for the stored quality.
_SHARES = (0.1, 0.25, 0.5, None)
# Small enough that a slow link, too, carries many of them within a run.
_SLICE_BYTES = 64 << 10
_SERVER_STOP_S_MAX = 10.0
# Below this, rounding of float32 is what a KL divergence measures.
_KL_SHOWN_MIN = 1e-6
# A run's steps, in order: its bar has a part for each. The model is loaded once, and converted in the first demo.
_STEPS = {"load model": "load the model", "prefill": "prefill", "answer": "answer", "store": "store blocks"}


class DemoJob(msgspec.Struct, frozen=True):
    """The work of one run. `is_cold`: prefill, and store. `exact`: a codec that stored the prompt, to compare with.

    `said_path`: of a demo over a link, log probabilities of the exact answer's tokens, written by the cold run. A
    streamed run says `answer_ids`, the exact answer, after the prefix that came within `start_within_s`.
    """

    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_cold: bool
    exact: str = ""
    said_path: str = ""
    start_within_s: float | None = None
    answer_ids: list[int] = []


class DemoRun(msgspec.Struct, frozen=True):
    """Measurements of one run. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out.

    `loaded_tokens`, `kl_law`: of a streamed prefix, what was not computed and what the codec's law says that costs.
    """

    prompt_tokens: int
    hit_tokens: int
    was_warm: bool
    ttft_s: float
    raw_bytes: int
    stored_bytes: int
    answer_ids: list[int]
    answer: str
    kl: float = 0.0
    loaded_tokens: int = 0
    kl_law: float = 0.0


class DemoWord(msgspec.Struct, frozen=True):
    """A line that a run says: how far a step is, or one of the others, at its end."""

    step: str = ""
    done: int = 0
    total: int = 1
    result: DemoRun | None = None
    mistake: str = ""
    status: int | None = None


class RestoredRun(msgspec.Struct, frozen=True):
    """The same prompt and answer by a codec, in new processes; bytes are those of the blocks that one restored.

    `warm_ttft_s`: the median of the processes. `kl`: of the answer's next-token distributions from the exact ones.
    """

    codec: str
    hit_tokens: int
    warm_ttft_s: float
    identical_tokens: bool
    raw_bytes: int
    stored_bytes: int
    kl: float
    answer: str


class LinkRow(msgspec.Struct, frozen=True):
    """One load. `computed`: share of the prompt that the model computed.

    `kl_law`: what the codec's law says the load cost; `kl`: the model's own, mean over the exact answer's tokens, nats.
    """

    start_within_s: float | None
    ttft_s: float
    received_bytes: int
    computed: float
    kl_law: float
    kl: float


class LinkResult(msgspec.Struct, frozen=True):
    """The figures of a demo over a link. `plain_ttft_s`: of a full prefill. `raw_bytes`: of the stored blocks."""

    link_bits_s: float
    codec: str
    prompt_tokens: int
    plain_ttft_s: float
    raw_bytes: int
    rows: list[LinkRow]
    plot: str | None


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
    path = disk_path(url)
    if path is None:
        raise ValueError(f"the demo needs a store that a second process can open, as disk:///path, got {url!r}")
    store = path.absolute()
    console = Console(stderr=True) if as_json else CONSOLE
    job = DemoJob(str(store), codec or (LINK_CODEC if link else "lossless"), prefix_tokens, answer_tokens, is_cold=True)
    if link is not None:
        emit(_over_link(link, job, store.with_name(f"{store.name}-link.png"), console), _link_table, as_json)
        return
    _side_by_side(job, store, console, as_json)


def _side_by_side(cold: DemoJob, store: Path, console: Console, as_json: bool) -> None:
    codec = cold.codec
    CodecRegistry().make(codec)
    warm = msgspec.structs.replace(cold, is_cold=False)
    # Blocks of lossy codecs have a namespace of their own: the first run stores them, and restores them the next time.
    jobs = {f"{codec}: prefill and store": cold}
    jobs |= {f"{codec}: new process {number} of {_WARM_RUNS}": warm for number in range(1, _WARM_RUNS + 1)}
    jobs[f"{_LOSSY}: prefill and store"] = msgspec.structs.replace(warm, codec=_LOSSY, answer_tokens=2)
    jobs[f"{_LOSSY}: new process"] = msgspec.structs.replace(warm, codec=_LOSSY, exact="lossless")
    with _runs(jobs, console) as run:
        first, *others, _, lossy = [run(name, job) for name, job in jobs.items()]
    if first.was_warm:
        console.print("The store has this text from an earlier run: the full prefill is measured without it.")
    exact, tide = _restored(codec, first, others), _restored(_LOSSY, first, [lossy])
    plot = _plot(first, exact, tide, store.with_name(f"{store.name}.png"))
    if as_json:
        result = msgspec.to_builtins(exact) | {
            "prompt_tokens": first.prompt_tokens,
            "cold_ttft_s": first.ttft_s,
            "warm_ttft_s_runs": [run.ttft_s for run in others],
            "speedup": first.ttft_s / exact.warm_ttft_s,
            "was_warm": first.was_warm,
            "store": str(store),
            "plot": plot,
            "tide": tide,
        }
        say(result, as_json)
        return
    _print(first, exact, tide)
    CONSOLE.print(f"Answer: {exact.answer.strip()}")
    CONSOLE.print(f"store: {store}" + (f", chart: {plot}" if plot else ""))


def _restored(codec: str, cold: DemoRun, runs: Sequence[DemoRun]) -> RestoredRun:
    return RestoredRun(
        codec=codec,
        hit_tokens=min(run.hit_tokens for run in runs),
        warm_ttft_s=statistics.median(run.ttft_s for run in runs),
        identical_tokens=all(run.answer_ids == cold.answer_ids for run in runs),
        raw_bytes=runs[0].raw_bytes,
        stored_bytes=runs[0].stored_bytes,
        kl=runs[0].kl,
        answer=runs[0].answer,
    )


def _print(cold: DemoRun, exact: RestoredRun, tide: RestoredRun) -> None:
    cores = os.cpu_count() or 1
    machine = f"{cores} {'core' if cores == 1 else 'cores'} ({cpu_name()})"
    restored = f"s in a new process, {exact.hit_tokens:,} tokens restored"
    lines = [
        f"SmolLM2-135M, {cold.prompt_tokens:,} tokens, on {machine}:",
        f"{cold.ttft_s:8.2f} s to the first token by a full prefill",
        f"{exact.warm_ttft_s:8.2f} {restored}: [bold]{cold.ttft_s / exact.warm_ttft_s:.1f} times faster[/]",
        f"           {exact.codec}: {_same(exact)}; {format_bytes(exact.raw_bytes)} in {_stored(exact)}",
        f"{tide.warm_ttft_s:8.2f} {restored}",
        f"           {tide.codec}, which is lossy: {_same(tide)}; in {_stored(tide)}, KL {tide.kl:.4f}",
    ]
    CONSOLE.print("\n".join(lines), highlight=False, soft_wrap=True)


def _same(found: RestoredRun) -> str:
    return "the same answer token for token" if found.identical_tokens else "another answer"


def _stored(found: RestoredRun) -> str:
    return format_bytes(found.stored_bytes)


def _plot(cold: DemoRun, exact: RestoredRun, tide: RestoredRun, path: Path) -> str | None:
    """Draw every way's time; None where matplotlib is not installed."""
    if (make := _figure_type()) is None:
        return None
    figure = make(figsize=(6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    ways = [f"restored, {tide.codec}", f"restored, {exact.codec}", "full prefill"]
    times = [tide.warm_ttft_s, exact.warm_ttft_s, cold.ttft_s]
    bars = axes.barh(ways, times, color=["#264653", "#2a9d8f", "#adb5bd"])
    axes.bar_label(bars, fmt="%.2f s", padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel(f"time to first token, seconds, on {os.cpu_count()} cores")
    speedup = f"{cold.ttft_s / exact.warm_ttft_s:.1f} times faster"
    axes.set_title(f"{exact.hit_tokens} of {cold.prompt_tokens} tokens restored: {speedup}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return str(path)


def rate_bits_s(text: str) -> float:
    """Bits a second of `20mbit` or `1gbit`. ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m|g)bit", text.lower())
    rate = float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]] if found else 0.0
    if not RATE_BITS_S_MIN <= rate <= RATE_BITS_S_MAX:
        raise ValueError(f"a link's rate is 1mbit to 100gbit, as 20mbit or 1gbit, got {text!r}")
    return rate


def _over_link(link: str, job: DemoJob, chart: Path, console: Console) -> LinkResult:
    """Store a prompt on a server of its own, then stream it to one new process after the other."""
    rate = rate_bits_s(link)
    CodecRegistry(installed_profiles()).make(job.codec)
    chart.parent.mkdir(parents=True, exist_ok=True)
    plain = f"{job.codec}: plain prefill, and store"
    shares = {
        f"over {link}: " + ("without a deadline" if share is None else f"start within {share:.0%} of that"): share
        for share in _SHARES
    }
    rows = []
    with TemporaryDirectory(prefix="kvtide-demo-") as made, limited_server(Path(made), rate) as url:
        job = msgspec.structs.replace(job, store=url, said_path=str(Path(made) / "said.npy"))
        with _runs([plain, *shares], console) as run:
            cold = run(plain, job)
            ids = cold.answer_ids
            job = msgspec.structs.replace(job, is_cold=False, answer_tokens=len(ids), answer_ids=ids)
            for name, share in shares.items():
                within_s = None if share is None else share * cold.ttft_s
                found = run(name, msgspec.structs.replace(job, start_within_s=within_s))
                computed = 1 - found.loaded_tokens / found.prompt_tokens
                rows.append(LinkRow(within_s, found.ttft_s, found.stored_bytes, computed, found.kl_law, found.kl))
    result = LinkResult(rate, job.codec, cold.prompt_tokens, cold.ttft_s, cold.raw_bytes, rows, plot=None)
    return msgspec.structs.replace(result, plot=_plot_link(result, chart))


@contextmanager
def limited_server(folder: Path, rate: float) -> Iterator[str]:
    """Run `kvtide serve` on a free port of this machine, sending at most so many bits a second; give its URL."""
    config = folder / "kvtide.toml"
    config.write_text(f"[sending]\nlink_bits_s = {rate!r}\nslice_bytes = {_SLICE_BYTES}\n", encoding="utf-8")
    command = [sys.executable, "-m", "kvtide.cli", "serve", "--config", str(config)]
    command += ["--listen", "127.0.0.1:0", "--tier", "memory://"]
    # A demo that is told to end would otherwise leave the server behind.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                if " on " not in line:
                    raise ValueError("the demo's server did not start; its error is above")
                yield f"http://{line.rsplit(' on ', 1)[1].strip()}"
            finally:
                server.terminate()
                try:
                    server.wait(_SERVER_STOP_S_MAX)
                except subprocess.TimeoutExpired:
                    server.kill()
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _link_table(result: LinkResult) -> Group:
    """Show a row a load, the plain prefill first."""
    rows = [("plain", f"{result.plain_ttft_s:.2f} s", "0", "100%", "0", "0")]
    for row in result.rows:
        within = "no deadline" if row.start_within_s is None else f"{row.start_within_s:.2f} s"
        received, computed = f"{row.received_bytes / 1e6:.2f}", f"{row.computed:.0%}"
        rows.append((within, f"{row.ttft_s:.2f} s", received, computed, f"{row.kl_law:.1e}", f"{row.kl:.1e}"))
    columns = (">start within", ">first token", ">MB received", ">computed", ">KL by law", ">KL, model's")
    table = narrow_table(columns, rows)
    title = f"SmolLM2-135M, {result.prompt_tokens:,} tokens, {result.raw_bytes / 1e6:.1f} MB raw, as {result.codec}:"
    return Group(title, table, _finding(result), *([f"chart: {result.plot}"] if result.plot else []))


def _finding(result: LinkResult) -> str:
    first, *_, last = sorted(result.rows, key=lambda row: row.ttft_s)
    times = f"{first.ttft_s:.2f} s at KL {first.kl:.1g}, {last.ttft_s:.2f} s at {last.kl:.1g}"
    return f"{result.link_bits_s / 1e6:g} Mbit/s: first token in {times}; plain {result.plain_ttft_s:.2f} s"


def _plot_link(result: LinkResult, path: Path) -> str | None:
    """Draw bytes and KL over the time to the first token; None where matplotlib is not installed."""
    if (make := _figure_type()) is None:
        return None
    figure = make(figsize=(6.4, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    rows = sorted(result.rows, key=lambda row: row.ttft_s)
    times = [row.ttft_s for row in rows]
    upper.plot(times, [row.received_bytes / 1e6 for row in rows], "o-", color="#264653")
    upper.set_ylabel("MB received")
    upper.set_ylim(bottom=0)
    lower.plot(times, [max(_KL_SHOWN_MIN, row.kl) for row in rows], "o-", color="#2a9d8f", label="the model's own")
    lower.plot(times, [max(_KL_SHOWN_MIN, row.kl_law) for row in rows], "x--", color="#e76f51", label="by the law")
    lower.set_yscale("log")
    lower.set_ylabel("KL, nats")
    lower.set_xlabel("time to first token, seconds")
    for axes in (upper, lower):
        axes.axvline(result.plain_ttft_s, color="#adb5bd", linestyle=":", label="full prefill")
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlim(left=0)
    lower.legend(frameon=False)
    figure.suptitle(_finding(result), fontsize=10)
    figure.savefig(path, dpi=150)
    return str(path)


def _figure_type() -> Any:
    """Matplotlib's figure; None where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure


@contextmanager
def _runs(names: Iterable[str], console: Console) -> Iterator[Callable[[str, DemoJob], DemoRun]]:
    """Do jobs by name, one after the other, each in a process of its own; all have their bars from the start."""
    columns = (TextColumn("{task.description:48}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvtide.cli.demo_run"]
    with (
        Progress(*columns, console=console) as progress,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runs,
    ):
        bars = {name: progress.add_task(name, total=len(_STEPS), start=False) for name in names}
        # What draws is imported while the runs import what computes: nothing is measured yet.
        _figure_type()
        yield lambda name, job: _run(job, name, bars[name], runs, progress)


def _run(job: DemoJob, name: str, bar: TaskID, runs: subprocess.Popen[bytes], progress: Progress) -> DemoRun:
    assert runs.stdin is not None and runs.stdout is not None
    runs.stdin.write(msgspec.json.encode(job) + b"\n")
    runs.stdin.flush()
    progress.start_task(bar)
    result: DemoRun | None = None
    for line in runs.stdout:
        word = msgspec.json.decode(line, type=DemoWord)
        result = word.result or result
        if word.mistake:
            raise ValueError(word.mistake)
        if word.step:
            done = list(_STEPS).index(word.step) + word.done / word.total
            progress.update(bar, completed=done, description=f"{name}, {_shown(word.step)}")
        if word.status is not None:
            break
    progress.update(bar, completed=len(_STEPS), description=name)
    progress.stop_task(bar)
    if result is None:
        raise ValueError(f"a run of the demo failed ({name}); its error is above")
    return result


def _shown(step: str) -> str:
    is_first = step == "load model" and not any((cache_home() / "models").glob("*/config.json"))
    return "convert the model, once" if is_first else _STEPS[step]
