"""`kvtide demo`: a chat of ten requests to a real model, restarted half-way; charts the waits for the first tokens.

Its runs are `demo_run`, in processes of their own: a job goes there and its results come back, a line of JSON each.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.markup import escape

from kvtide.cli.report import JsonOption, cpu_name, format_bytes, narrow_table, progress_bars, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption
from kvtide.codec import CodecRegistry
from kvtide.tier import disk_path

# A chat about the first of Python's own help texts, in the order of their names.
QUESTIONS = (
    "What is this text about?",
    "What does an assert statement do?",
    "What happens when its condition is false?",
    "When is __debug__ false?",
    "May a program assign to __debug__?",
    "What does an assignment statement do?",
    "What is a target list?",
    "Can a target be an attribute?",
    "What is a subscription?",
    "Sum it all up in one sentence.",
)
# Requests before the restart: the process ends, and a new one goes on with the chat.
_BEFORE = 5
_BAR_COLUMNS = 27


class DemoJob(msgspec.Struct, frozen=True):
    """Questions of a chat to one process, and what was said before, as tokens. store: empty for the model alone.

    model: a GGUF file, for llama.cpp; empty for SmolLM2-135M in transformers.
    """

    model: str
    store: str
    codec: str
    context_tokens: int
    answer_tokens: int
    questions: Sequence[str]
    chat: Sequence[int] = ()


class DemoRun(msgspec.Struct, frozen=True):
    """Measurements of one request. `chat`: all that was said until then, its answer included."""

    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    raw_bytes: int
    read_bytes: int
    answer: str
    chat: list[int]


# On a question: its measurements, the user's mistake, or nothing after a fault, which stderr shows.
DemoAnswer = DemoRun | str | None


class DemoRequest(msgspec.Struct, frozen=True):
    """A request with kvtide and without. `is_measured`: it was asked without; else `is_answer_same` is not known."""

    question: str
    answer: str
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    plain_ttft_s: float
    is_measured: bool
    is_answer_same: bool | None


def demo(
    url: StoreOption = DEFAULT_STORE,
    model: Annotated[Path | None, typer.Option(help="A GGUF file: the chat is with it, in llama.cpp.")] = None,
    codec: Annotated[str, typer.Option(help="Codec of new blocks.")] = "lossless",
    prefix_tokens: Annotated[int, typer.Option(min=256, max=7000, help="Text before the first question.")] = 1536,
    answer_tokens: Annotated[int, typer.Option(min=2, max=512)] = 12,
    as_json: JsonOption = False,
) -> None:
    """Chat about a text, ten requests and a restart: what one waits for with kvtide, and without."""
    path = disk_path(url)
    if path is None:
        raise ValueError(f"the demo needs a store that a second process can open, as disk:///path, got {url!r}")
    CodecRegistry().make(codec)
    if model is not None and not model.is_file():
        raise ValueError(f"no file {model}: --model takes a model in GGUF, as kvtide llama does")
    engine = "transformers" if model is None else "llama_cpp"
    if importlib.util.find_spec(engine) is None:
        raise ModuleNotFoundError(f"no module {engine}", name=engine)
    store = url if "://" in url else str(path.absolute())
    job = DemoJob(str(model or ""), store, codec, prefix_tokens, answer_tokens, QUESTIONS[:_BEFORE])
    with _processes() as ask:

        def without(index: int, chat: Sequence[int]) -> DemoRun:
            alone = msgspec.structs.replace(job, store="", questions=[QUESTIONS[index]], chat=chat)
            return ask(f"without kvtide: {index + 1}", alone)[0]

        # Three requests are asked without it too, between the others: neighbours on the machine slow down both.
        plain = {0: without(0, ())}
        runs = ask("with kvtide", job)
        plain[_BEFORE - 1] = without(_BEFORE - 1, runs[-2].chat)
        second = msgspec.structs.replace(job, questions=QUESTIONS[_BEFORE:], chat=runs[-1].chat)
        runs += ask("with kvtide, after a restart", second)
        plain[len(runs) - 1] = without(len(runs) - 1, runs[-2].chat)
    requests = _requests(runs, plain)
    with_s, plain_s = sum(each.ttft_s for each in requests), sum(each.plain_ttft_s for each in requests)
    name = model.stem if model is not None else "SmolLM2-135M"
    result = {
        "model": name,
        "codec": codec,
        "store": store,
        "requests": requests,
        "restart_before": _BEFORE + 1,
        "was_warm": runs[0].hit_tokens > 0,
        "wait_s": with_s,
        "plain_wait_s": plain_s,
        "speedup": plain_s / with_s,
        "restart_speedup": requests[_BEFORE].plain_ttft_s / requests[_BEFORE].ttft_s,
        "raw_bytes": runs[_BEFORE].raw_bytes,
        "read_bytes": runs[_BEFORE].read_bytes,
    }
    lines = [*shown(requests, name, prefix_tokens), *_summed(requests, runs, codec)]
    say(result, as_json, *lines, f"store: {escape(store)}; {cpu_name()}, cores: {os.cpu_count() or 1}")


def _requests(runs: Sequence[DemoRun], plain: dict[int, DemoRun]) -> list[DemoRequest]:
    tokens, waits = zip(*((each.prompt_tokens, each.ttft_s) for each in plain.values()), strict=True)
    found = []
    for index, run in enumerate(runs):
        measured = (run.answer, run.prompt_tokens, run.hit_tokens, run.ttft_s)
        plain_s = float(np.interp(run.prompt_tokens, tokens, waits))
        is_same = plain[index].chat == run.chat if index in plain else None
        found.append(DemoRequest(QUESTIONS[index], *measured, plain_s, index in plain, is_same))
    return found


def shown(requests: Sequence[DemoRequest], model: str, context_tokens: int) -> Iterator[object]:
    """Yield the chart of a chat about a text of so many tokens: its title, what its signs mean, a line a request."""
    yield f"A chat with {model} about a text of {context_tokens:,} tokens."
    yield "Seconds to the first token: █ with kvtide, ░ so many more without it."
    yield "~ was not asked without it: read off the line between those that were."
    longest_s = max(max(each.ttft_s, each.plain_ttft_s) for each in requests)
    rows = []
    for number, each in enumerate(requests):
        if number == _BEFORE:
            rows.append(["", "", "", "", "", "restart: a new process"])
        filled, whole = (round(_BAR_COLUMNS * wait / longest_s) for wait in (each.ttft_s, each.plain_ttft_s))
        waits = f"{each.ttft_s:.2f} s", f"{'' if each.is_measured else '~'}{each.plain_ttft_s:.2f} s"
        bar = "█" * max(1, filled) + "░" * (whole - max(1, filled))
        rows.append([str(number + 1), f"{each.prompt_tokens:,}", f"{each.hit_tokens:,}", *waits, bar])
    yield narrow_table(["request", ">tokens", ">restored", ">with", ">without", ""], rows)


def _summed(requests: Sequence[DemoRequest], runs: Sequence[DemoRun], codec: str) -> Iterator[str]:
    for name, some in (("In all", requests), ("After the restart", requests[_BEFORE:])):
        with_s, plain_s = sum(each.ttft_s for each in some), sum(each.plain_ttft_s for each in some)
        yield f"{name} {with_s:.1f} s instead of {plain_s:.1f} s: [bold]{plain_s / with_s:.1f} times less[/]"
    asked = [each.is_answer_same for each in requests if each.is_measured]
    restored = runs[_BEFORE]
    yield f"{sum(map(bool, asked))} of {len(asked)} answers that were compared are the same, token for token"
    if restored.read_bytes:
        came = format_bytes(restored.read_bytes)
        yield f"{codec}: {came} read for {format_bytes(restored.raw_bytes)} of keys and values"
    if runs[0].hit_tokens:
        yield "The store has this chat from an earlier demo: its first request was restored too."


@contextmanager
def _processes() -> Iterator[Callable[[str, DemoJob], list[DemoRun]]]:
    """Give a function that does a job in a process of its own, shows how far it is, and returns its results."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvtide.cli.demo_run"]
    with progress_bars() as show, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runs:
        assert runs.stdin is not None and runs.stdout is not None
        stdin, stdout = runs.stdin, runs.stdout

        def ask(name: str, job: DemoJob) -> list[DemoRun]:
            results = list[DemoRun]()
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            for done in range(len(job.questions)):
                show(name, done, len(job.questions))
                answer: DemoAnswer = msgspec.json.decode(stdout.readline() or b"null", type=DemoAnswer)
                if not isinstance(answer, DemoRun):
                    raise ValueError(answer or f"a run of the demo failed ({name}); its error is above")
                results.append(answer)
            show(name, len(results), len(results))
            return results

        yield ask
