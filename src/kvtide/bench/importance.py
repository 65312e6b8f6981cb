"""`kvtide bench importance`: quality against bytes read when only what matters of a prefix is loaded exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from kvtide.bench.importance_set import Asked, Task, make_task, noisy, shuffled
from kvtide.bench.texts import Text
from kvtide.block import KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.codec import CodecRegistry, Profile
from kvtide.engines.importance_curve import CurvePoint, all_tokens, over_line, selective
from kvtide.engines.importance_judge import ImportanceJudge, Judged, JudgedPrefix, Question
from kvtide.engines.selective import Importance, Rest
from kvtide.importance import AllHeads, CapturedMass, FirstHeads, GroupHeads, Guard, HeadsAgree, Known, Random, Recency
from kvtide.importance.probe import Selector

__all__ = ["FULL", "QUICK", "ImportanceBench", "ImportanceSize", "plot", "render", "run"]

BYTES_S = 200e6
HEADLINE_RATIO = 0.25
Progress = Callable[[str, int, int], None]


class ImportanceSize(NamedTuple):
    """How much is judged."""

    contexts: int
    context_tokens: int
    ratios: tuple[float, ...]
    questions: int


FULL = ImportanceSize(3, 4096, (0.1, 0.2, 0.25, 0.3, 0.5), 3)
QUICK = ImportanceSize(1, 512, (0.25,), 2)


class Row(msgspec.Struct, frozen=True):
    """A selector at a ratio, in the mean over all questions; ttft_s is the median.

    rest: what became of the other tokens. order: how tokens lie, `original` or `packed` by past uses.
    bytes_read_share: of the raw bytes, probe and amplification included. answer_match: the whole answer as with
    everything loaded; right: the answer that the text has, where it is known.
    """

    selector: str
    rest: str
    order: str
    ratio: float
    bytes_read_share: float
    kl: float
    top1: float
    answer_match: float
    ttft_s: float


class GuardRow(msgspec.Struct, frozen=True):
    """A guard on a kind of prompt, what is not selected being dropped: the share that fell back."""

    prompt: str
    guard: str
    fallback_share: float
    kl: float
    bytes_read_share: float


class CurveRow(msgspec.Struct, frozen=True):
    """Quality against bytes, for the plot. kl_over_line: over that of tide with all tokens alike at the same bytes."""

    series: str
    label: str
    bytes_read_share: float
    kl: float
    kl_over_line: float | None


class AblationRow(msgspec.Struct, frozen=True):
    """The paper's three parts, one after the other, each with those before it."""

    step: str
    bytes_read_share: float
    kl: float
    ttft_s: float


class ImportanceBench(msgspec.Struct, frozen=True):
    """All tables and what they were measured on."""

    model: str
    kv_dtype: str
    disk_bytes_s: float
    contexts: int
    context_tokens: int
    questions: list[str]
    rows: list[Row]
    guards: list[GuardRow]
    ablation: list[AblationRow]
    curve: list[CurveRow]
    ttft_speedup: float
    kl_drop_over_base: float
    top1_below_all_heads: float
    selective_kl_over_line: float


class _Case(NamedTuple):
    """What a row is of. `selector` makes one for a prefix."""

    selector: Callable[[JudgedPrefix], Selector]
    rest: Rest
    is_packed: bool
    has_base: bool
    probes: bool
    by_chunks: bool


def _cases() -> list[_Case]:
    paper = (Rest.DROP, False, False, True, False)
    blind = (Rest.DROP, False, False, False, False)
    return [
        _Case(lambda _: AllHeads(), *paper),
        _Case(lambda _: FirstHeads(), *paper),
        _Case(lambda _: GroupHeads(), *paper),
        _Case(lambda _: FirstHeads(), Rest.DROP, True, False, True, False),
        _Case(lambda _: Recency(), *blind),
        _Case(lambda _: Random(np.random.default_rng(0)), *blind),
        _Case(lambda prefix: Known(prefix.scores), Rest.DROP, True, False, False, True),
        _Case(lambda _: AllHeads("base-keys"), Rest.DROP, False, True, False, False),
        _Case(lambda _: AllHeads("base-keys"), Rest.DROP, True, True, False, True),
        _Case(lambda _: AllHeads("base-keys"), Rest.BASE, True, True, False, True),
        _Case(lambda prefix: Known(prefix.scores), Rest.BASE, True, True, False, True),
        _Case(lambda _: Recency(), Rest.BASE, False, True, False, False),
    ]


def run(
    model: Any,
    model_name: str,
    tokenize: Callable[[str], list[int]],
    texts: Sequence[Text],
    profiles: Sequence[Profile],
    size: ImportanceSize,
    bytes_s: float,
    progress: Progress,
    dtype: KVDtype = KVDtype.FLOAT16,
    clock: Clock | None = None,
) -> ImportanceBench:
    """Judge every case on texts that are long enough, KV kept as `dtype`. ValueError if there are none."""
    judge = ImportanceJudge(model, CodecRegistry(profiles), clock or SystemClock(), bytes_s, dtype)
    tasks = _tasks(texts, tokenize, size)
    prefixes = []
    for number, task in enumerate(tasks):
        progress("prefill", number, len(tasks))
        prefixes.append(judge.add(task.ids, *_tokenized(task, tokenize, size.questions)))
    rows = _rows(judge, prefixes, size, progress)
    curve = _curve(judge, prefixes, profiles, rows)
    guards = _guards(judge, prefixes[0], tasks[0], tokenize, model.config.vocab_size)
    return ImportanceBench(
        model_name,
        judge.layout.dtype.value,
        bytes_s,
        len(prefixes),
        size.context_tokens,
        [question.kind for question in prefixes[0].questions],
        rows,
        guards,
        _ablation(rows),
        curve,
        *_headlines(rows),
        max(row.kl_over_line or 0.0 for row in curve if row.series == "tide, important tokens finer"),
    )


def _tasks(texts: Sequence[Text], tokenize: Callable[[str], list[int]], size: ImportanceSize) -> list[Task]:
    rng, tasks = random.Random(0), list[Task]()
    for number, text in enumerate(texts):
        others = [other.content for other in texts if other is not text][number % 3 :][:2]
        try:
            tasks.append(make_task(text.content, others, size.context_tokens, tokenize, rng))
        except ValueError:
            continue
        if len(tasks) == size.contexts:
            return tasks
    if not tasks:
        raise ValueError(f"no text has {size.context_tokens} tokens and short lines")
    return tasks


def _tokenized(task: Task, tokenize: Callable[[str], list[int]], count: int) -> tuple[list[Question], list[Question]]:
    def of(asked: Sequence[Asked]) -> list[Question]:
        return [Question(each.kind, tokenize(each.words)) for each in asked]

    return of(task.uses), of(task.questions[:count])


def _rows(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], size: ImportanceSize, progress: Progress
) -> list[Row]:
    asked = [(prefix, number) for prefix in prefixes for number in range(len(prefix.questions))]
    rows = [
        _row(("whole", "whole", "original", 1.0), [judge.whole(*each) for each in asked]),
        _row(("none", "base", "packed", 0.0), [judge.rough(*each) for each in asked]),
    ]
    cases = [(case, ratio) for case in _cases() for ratio in size.ratios]
    for done, (case, ratio) in enumerate(cases):
        progress("selections", done, len(cases))
        judged, name = [], ""
        for prefix, number in asked:
            selector = case.selector(prefix)
            name = selector.name
            settings = Importance(ratio, selector, None, case.rest, case.by_chunks)
            judged.append(judge.selected(prefix, number, settings, case.is_packed, case.has_base, case.probes))
        rows.append(_row((name, case.rest.value, "packed" if case.is_packed else "original", ratio), judged))
    return rows


def _row(case: tuple[str, str, str, float], judged: Sequence[Judged]) -> Row:
    return Row(
        *case,
        bytes_read_share=fmean(each.read_bytes / each.whole_bytes for each in judged),
        kl=fmean(each.kl for each in judged),
        top1=fmean(each.top1 for each in judged),
        answer_match=fmean(each.answer_match for each in judged),
        ttft_s=median(each.ttft_s for each in judged),
    )


def _guards(
    judge: ImportanceJudge, plain: JudgedPrefix, task: Task, tokenize: Callable[[str], list[int]], vocabulary: int
) -> list[GuardRow]:
    """Return what both guards make of an ordinary prompt and of adversarial ones."""
    rng = random.Random(1)
    needle = tokenize(" The pass code of Bergen is 48213. ")
    question = Question("retrieval", tokenize("\n\nWhat is the pass code of Bergen?\nThe pass code of Bergen is"))
    uses = [Question("open", tokenize(each.words)) for each in task.uses[:2]]
    prompts = {
        "text": plain,
        "shuffled text": judge.add(shuffled(task.ids, rng), uses, plain.questions[:2]),
        "needle in noise": judge.add(noisy(task.ids, vocabulary, needle, rng), uses, [question, plain.questions[0]]),
    }
    guards: list[tuple[Guard, Selector, bool]] = [
        (HeadsAgree(), FirstHeads(), True),
        (CapturedMass(), AllHeads("base-keys"), False),
    ]
    rows = []
    for name, prefix in prompts.items():
        for guard, selector, probes in guards:
            settings = Importance(HEADLINE_RATIO, selector, guard, Rest.DROP, by_chunks=False)
            numbers = range(len(prefix.questions))
            judged = [judge.selected(prefix, number, settings, False, not probes, probes) for number in numbers]
            share = fmean(each.selected is not None and each.selected.is_fallback for each in judged)
            kl, read = fmean(each.kl for each in judged), fmean(each.read_bytes / each.whole_bytes for each in judged)
            rows.append(GuardRow(name, guard.name, share, kl, read))
    return rows


def _ablation(rows: Sequence[Row]) -> list[AblationRow]:
    steps = [
        ("whole load", ("whole", "whole", "original", 1.0)),
        ("all heads (H2O)", ("all-heads", "drop", "original", HEADLINE_RATIO)),
        ("identification: first three heads", ("first-3", "drop", "original", HEADLINE_RATIO)),
        ("+ reordering by uses", ("first-3", "drop", "packed", HEADLINE_RATIO)),
        ("identification: rough keys", ("base-keys", "drop", "original", HEADLINE_RATIO)),
        ("+ reordering by uses, whole chunks", ("base-keys", "drop", "packed", HEADLINE_RATIO)),
        ("+ rough rest", ("base-keys", "base", "packed", HEADLINE_RATIO)),
        ("scores alone, no probe", ("past-uses", "base", "packed", HEADLINE_RATIO)),
    ]
    found = {(row.selector, row.rest, row.order, row.ratio): row for row in rows}
    return [
        AblationRow(step, row.bytes_read_share, row.kl, row.ttft_s)
        for step, key in steps
        if (row := found.get(key)) is not None
    ]


def _curve(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], profiles: Sequence[Profile], rows: Sequence[Row]
) -> list[CurveRow]:
    profile = next(each for each in profiles if each.kind == "tide-layer" and each.fits(judge.layout))
    line = all_tokens(judge, prefixes, profile)
    finer = selective(judge, prefixes, profile)
    chosen = {"base-keys", "past-uses", "first-3", "all-heads"}
    exact = [
        (f"{row.selector}, rest {row.rest}, {row.order}", CurvePoint(f"{row.ratio:g}", row.bytes_read_share, row.kl))
        for row in rows
        if row.selector in chosen
    ]
    series = [("tide, all tokens", each) for each in line] + [("tide, important tokens finer", each) for each in finer]
    return [CurveRow(name, *point, over_line(point, line)) for name, point in [*series, *exact]]


def _headlines(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Return TTFT of whole over ours, KL of dropping over ours at the same bytes, top-1 of all heads above ours."""
    found = {(row.selector, row.rest, row.order): row for row in rows if row.ratio in {HEADLINE_RATIO, 1.0}}
    whole, ours = found["whole", "whole", "original"], found["base-keys", "base", "packed"]
    drop, heads = found["base-keys", "drop", "packed"], found["all-heads", "drop", "original"]
    return whole.ttft_s / ours.ttft_s, drop.kl / max(ours.kl, 1e-12), heads.top1 - ours.top1


def render(result: ImportanceBench) -> Table:
    """Return the table that people read: rows, then guards and the ablation below them."""
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    columns = ("selector", "rest", "order", "ratio", "bytes read", "KL", "top-1", "answer", "TTFT s")
    table = Table(*columns, title=f"{title}, disk of {result.disk_bytes_s / 1e6:.0f} MB/s")
    for row in result.rows:
        head = (row.selector, row.rest, row.order, f"{row.ratio:g}", f"{row.bytes_read_share:.3f}")
        table.add_row(*head, f"{row.kl:.4f}", f"{row.top1:.3f}", f"{row.answer_match:.2f}", f"{row.ttft_s:.3f}")
    table.add_section()
    for guard in result.guards:
        cells = (f"{guard.guard} falls back", guard.prompt, "", f"{guard.fallback_share:.2f}")
        table.add_row(*cells, f"{guard.bytes_read_share:.3f}", f"{guard.kl:.4f}", "", "", "")
    table.add_section()
    for step in result.ablation:
        table.add_row(
            step.step, "", "", "", f"{step.bytes_read_share:.3f}", f"{step.kl:.4f}", "", "", f"{step.ttft_s:.3f}"
        )
    return table


def plot(result: ImportanceBench, path: Path) -> str | None:
    """Draw KL against bytes read; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for series in sorted({row.series for row in result.curve}):
        points = sorted((row.bytes_read_share, row.kl) for row in result.curve if row.series == series)
        axes.plot(*zip(*points, strict=True), "o-", label=series, markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("bytes read, of the raw cache")
    axes.set_ylabel("KL of the answer, nats")
    axes.set_title(f"{result.model}: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)
