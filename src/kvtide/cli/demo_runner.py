"""The demo's hold on its processes: hands out jobs, shows how far each is, returns what it measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvtide.config import cache_home


class DemoJob(msgspec.Struct, frozen=True):
    """The work of one run. `is_cold`: prefill, and store.

    `exact`: the codec that another run has stored the same prompt with, to say how far the model is from that.
    `link`: the run's part in the demo of a link.
    """

    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_cold: bool
    exact: str | None = None
    link: DemoLink | None = None


class DemoLink(msgspec.Struct, frozen=True):
    """A run over a link. `said_path`: log probabilities of the exact answer's tokens, written by the cold run.

    A streamed run says `answer_ids`, the exact answer, after the prefix that came within `start_within_s`.
    """

    said_path: str
    start_within_s: float | None = None
    answer_ids: list[int] = []


class DemoRun(msgspec.Struct, frozen=True):
    """Measurements of one run. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out.

    `loaded_tokens`, `kl_law`: of a streamed prefix, what was not computed and what the codec's law says that costs.
    """

    prompt_tokens: int
    prefix_blocks: int
    hit_tokens: int
    was_warm: bool
    ttft_s: float
    raw_bytes: int
    stored_bytes: int
    answer_ids: list[int]
    answer: str
    kl: float | None
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


# A run's steps, in order: its bar has a part for each. The model is loaded once, and converted in the first demo.
_STEPS = {"load model": "load the model", "prefill": "prefill", "answer": "answer", "store": "store blocks"}
_CONVERTING = "convert the model, once"


@contextmanager
def demo_runs(names: Iterable[str], console: Console) -> Iterator[Callable[[str, DemoJob], DemoRun]]:
    """Do jobs by name, one after the other, each in a process of its own; all have their bars from the start."""
    columns = (TextColumn("{task.description:48}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvtide.cli.demo_run"]
    with (
        Progress(*columns, console=console) as progress,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runs,
    ):
        bars = {name: progress.add_task(name, total=len(_STEPS), start=False) for name in names}
        # What draws is imported while the runs import what computes: nothing is measured yet.
        figure_type()
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
    return _CONVERTING if is_first else _STEPS[step]


def figure_type() -> Any:
    """Return what charts are drawn on; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure
