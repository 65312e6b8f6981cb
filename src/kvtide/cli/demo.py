"""`kvtide demo`: prefill once, restore in another process, on a real model; says what that was worth.

Its runs are `demo_run`, in processes of their own: a job goes there and its result comes back, a line of JSON each.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Group

from kvtide.cli.report import JsonOption, cpu_name, emit, format_bytes, narrow_table, progress_bars, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption
from kvtide.codec import CodecRegistry
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
    """Measurements of one run. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out."""

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


class DemoAnswer(msgspec.Struct, frozen=True):
    """The result of a job, or the user's mistake; neither after a fault, which stderr shows."""

    result: DemoRun | None = None
    mistake: str = ""


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


def demo(
    url: StoreOption = DEFAULT_STORE,
    codec: Annotated[
        str | None, typer.Option("--codec", help=f"Codec of new blocks [lossless; with --link {LINK_CODEC}].")
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=256, max=7000, help="Shared context before the question.")
    ] = 2048,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=2, max=512)] = 48,
    link: Annotated[str | None, typer.Option("--link", help="Stream over a link of this rate, as 20mbit.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question over a long text twice: a cold process prefills and stores, a new one restores."""
    path = disk_path(url)
    if path is None:
        raise ValueError(f"the demo needs a store that a second process can open, as disk:///path, got {url!r}")
    chosen = codec or (LINK_CODEC if link else "lossless")
    job = DemoJob(str(path.absolute()), chosen, prefix_tokens, answer_tokens, is_cold=True)
    if link is not None:
        emit(_over_link(link, job), _link_table, as_json)
        return
    _side_by_side(job, as_json)


def _side_by_side(cold: DemoJob, as_json: bool) -> None:
    codec = cold.codec
    CodecRegistry().make(codec)
    warm = msgspec.structs.replace(cold, is_cold=False)
    # Blocks of lossy codecs have a namespace of their own: the first run stores them, and restores them the next time.
    jobs = {f"{codec}: prefill and store": cold}
    jobs |= {f"{codec}: new process {number} of {_WARM_RUNS}": warm for number in range(1, _WARM_RUNS + 1)}
    jobs[f"{_LOSSY}: prefill and store"] = msgspec.structs.replace(warm, codec=_LOSSY, answer_tokens=2)
    jobs[f"{_LOSSY}: new process"] = msgspec.structs.replace(warm, codec=_LOSSY, exact="lossless")
    with _runs() as run:
        first, *others, _, lossy = [run(name, job) for name, job in jobs.items()]
    if first.was_warm:
        note = "The store has this text from an earlier run: the full prefill is measured without it."
        print(note, file=sys.stderr)
    exact, tide = _restored(codec, first, others), _restored(_LOSSY, first, [lossy])
    result = msgspec.to_builtins(exact) | {
        "prompt_tokens": first.prompt_tokens,
        "cold_ttft_s": first.ttft_s,
        "warm_ttft_s_runs": [run.ttft_s for run in others],
        "speedup": first.ttft_s / exact.warm_ttft_s,
        "was_warm": first.was_warm,
        "store": cold.store,
        "tide": tide,
    }
    say(result, as_json, *_shown(first, exact, tide), f"Answer: {exact.answer.strip()}", f"store: {cold.store}")


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


def _shown(cold: DemoRun, exact: RestoredRun, tide: RestoredRun) -> list[str]:
    cores = os.cpu_count() or 1
    machine = f"{cores} {'core' if cores == 1 else 'cores'} ({cpu_name()})"
    restored = f"s in a new process, {exact.hit_tokens:,} tokens restored"
    stored = f"{format_bytes(exact.raw_bytes)} in {format_bytes(exact.stored_bytes)}"
    lossy = f"in {format_bytes(tide.stored_bytes)}, KL {tide.kl:.4f}"
    return [
        f"SmolLM2-135M, {cold.prompt_tokens:,} tokens, on {machine}:",
        f"{cold.ttft_s:8.2f} s to the first token by a full prefill",
        f"{exact.warm_ttft_s:8.2f} {restored}: [bold]{cold.ttft_s / exact.warm_ttft_s:.1f} times faster[/]",
        f"           {exact.codec}: {_same(exact)}; {stored}",
        f"{tide.warm_ttft_s:8.2f} {restored}",
        f"           {tide.codec}, which is lossy: {_same(tide)}; {lossy}",
    ]


def _same(found: RestoredRun) -> str:
    return "the same answer token for token" if found.identical_tokens else "another answer"


def rate_bits_s(text: str) -> float:
    """Bits a second of `20mbit` or `1gbit`. ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m|g)bit", text.lower())
    rate = float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]] if found else 0.0
    if not RATE_BITS_S_MIN <= rate <= RATE_BITS_S_MAX:
        raise ValueError(f"a link's rate is 1mbit to 100gbit, as 20mbit or 1gbit, got {text!r}")
    return rate


def _over_link(link: str, job: DemoJob) -> LinkResult:
    """Store a prompt on a server of its own, then stream it to one new process after the other."""
    rate = rate_bits_s(link)
    CodecRegistry(installed_profiles()).make(job.codec)
    rows = []
    with TemporaryDirectory(prefix="kvtide-demo-") as made, limited_server(Path(made), rate) as url:
        job = msgspec.structs.replace(job, store=url, said_path=str(Path(made) / "said.npy"))
        with _runs() as run:
            cold = run(f"{job.codec}: plain prefill, and store", job)
            ids = cold.answer_ids
            job = msgspec.structs.replace(job, is_cold=False, answer_tokens=len(ids), answer_ids=ids)
            for share in _SHARES:
                within_s = None if share is None else share * cold.ttft_s
                within = "without a deadline" if share is None else f"start within {share:.0%} of that"
                found = run(f"over {link}: {within}", msgspec.structs.replace(job, start_within_s=within_s))
                computed = 1 - found.loaded_tokens / found.prompt_tokens
                rows.append(LinkRow(within_s, found.ttft_s, found.stored_bytes, computed, found.kl_law, found.kl))
    return LinkResult(rate, job.codec, cold.prompt_tokens, cold.ttft_s, cold.raw_bytes, rows)


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
    first, *_, last = sorted(result.rows, key=lambda row: row.ttft_s)
    times = f"{first.ttft_s:.2f} s at KL {first.kl:.1g}, {last.ttft_s:.2f} s at {last.kl:.1g}"
    finding = f"{result.link_bits_s / 1e6:g} Mbit/s: first token in {times}; plain {result.plain_ttft_s:.2f} s"
    return Group(title, table, finding)


@contextmanager
def _runs() -> Iterator[Callable[[str, DemoJob], DemoRun]]:
    """Do jobs by name, one after the other, each in a process of its own and with a bar."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvtide.cli.demo_run"]
    with progress_bars() as show, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runs:
        jobs, answers = runs.stdin, runs.stdout
        assert jobs is not None and answers is not None

        def run(name: str, job: DemoJob) -> DemoRun:
            show(name, 0, 1)
            jobs.write(msgspec.json.encode(job) + b"\n")
            jobs.flush()
            answer = msgspec.json.decode(answers.readline() or b"{}", type=DemoAnswer)
            show(name, 1, 1)
            if answer.result is None:
                raise ValueError(answer.mistake or f"a run of the demo failed ({name}); its error is above")
            return answer.result

        yield run
