"""`kvtide demo`: prefill once, restore in another process, on a real model; says what that was worth.

Its runs are `demo_run`, in processes of their own: a job goes there and its result comes back, a line of JSON each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from kvtide.cli.report import JsonOption, cpu_name, format_bytes, progress_bars, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption
from kvtide.codec import CodecRegistry
from kvtide.tier import disk_path

# New processes that restore, one after the other: half a second on a shared machine is too short to be judged once.
_WARM_RUNS = 3
# Shown beside the codec that was asked for.
_LOSSY = "tide"


class DemoJob(msgspec.Struct, frozen=True):
    """The work of one run. `is_cold`: prefill, and store. `exact`: a codec that stored the prompt, to compare with."""

    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_cold: bool
    exact: str = ""


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
    path = disk_path(url)
    if path is None:
        raise ValueError(f"the demo needs a store that a second process can open, as disk:///path, got {url!r}")
    CodecRegistry().make(codec)
    cold = DemoJob(str(path.absolute()), codec, prefix_tokens, answer_tokens, is_cold=True)
    warm = msgspec.structs.replace(cold, is_cold=False)
    # Blocks of lossy codecs have a namespace of their own: the first run stores them, and restores them the next time.
    jobs = {f"{codec}: prefill and store": cold}
    jobs |= {f"{codec}: new process {number} of {_WARM_RUNS}": warm for number in range(1, _WARM_RUNS + 1)}
    jobs[f"{_LOSSY}: prefill and store"] = msgspec.structs.replace(warm, codec=_LOSSY, answer_tokens=2)
    jobs[f"{_LOSSY}: new process"] = msgspec.structs.replace(warm, codec=_LOSSY, exact="lossless")
    first, *others, _, lossy = _done(jobs)
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


def _done(jobs: Mapping[str, DemoJob]) -> list[DemoRun]:
    """Do jobs by name, one after the other, each in a process of its own and with a bar."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvtide.cli.demo_run"]
    done = list[DemoRun]()
    with progress_bars() as show, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runs:
        assert runs.stdin is not None and runs.stdout is not None
        for name, job in jobs.items():
            show(name, 0, 1)
            runs.stdin.write(msgspec.json.encode(job) + b"\n")
            runs.stdin.flush()
            answer = msgspec.json.decode(runs.stdout.readline() or b"{}", type=DemoAnswer)
            if answer.result is None:
                raise ValueError(answer.mistake or f"a run of the demo failed ({name}); its error is above")
            done.append(answer.result)
            show(name, 1, 1)
    return done
