"""`kvtide-lab bench importance`: quality against bytes read when only what matters of a prefix is loaded exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.codec import CodecRegistry, Profile
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.selective import Rest, SparseSettings
from kvtide.importance import AllHeads
from kvtide.importance.probe import FirstHeads, Selector
from kvtide_lab.bench.importance_cache import AblationRow, replayed, sequence
from kvtide_lab.bench.importance_engine import EngineRow
from kvtide_lab.bench.importance_engine import rows as engine_rows
from kvtide_lab.bench.importance_guards import GuardRow, GuardSize, guard_rows
from kvtide_lab.bench.importance_needles import NeedleRow, needle_rows
from kvtide_lab.bench.importance_set import make_tasks, tokenized
from kvtide_lab.judge.importance_curve import SharePoint, all_tokens, over_line, selective
from kvtide_lab.judge.importance_judge import ImportanceJudge, Judged, JudgedPrefix
from kvtide_lab.judge.selectors import GroupHeads, KnownScores, Random, Recency

BYTES_S = 200e6
HEADLINE_RATIO = 0.25
# Parts that can be asked for alone: selectors (with TTFTs, caches and the curve), the engine, guards, needles.
TABLES = ("selectors", "engine", "guards", "needles")
Progress = Callable[[str, int, int], None]


class ImportanceSize(NamedTuple):
    """The amount of judging. tries: of each pair of TTFTs. stride: every so-manyth point of quality against bytes.

    has_others: those selectors too that no step of the ablation needs.
    guards: on how many prompts guards are tried, and at which lengths besides the context's. needles: texts of a kind.
    """

    contexts: int
    context_tokens: int
    ratios: tuple[float, ...]
    questions: int
    tries: int
    stride: int
    has_others: bool
    guards: GuardSize
    needles: int


FULL = ImportanceSize(2, 4096, (0.1, 0.2, 0.25, 0.3, 0.5), 3, 5, 1, True, GuardSize(3, 2, 2, (1024,)), 4)
QUICK = ImportanceSize(1, 512, (0.25,), 2, 1, 3, False, GuardSize(1, 1, 1, ()), 1)


class Row(msgspec.Struct, frozen=True):
    """A selector at a ratio, in the mean over all questions; ttft_s is the median.

    rest: the outcome of the other tokens. order: how tokens lie, `original` or `packed` by past uses.
    bytes_read_share: of the raw bytes, probe and amplification included. answer_match: the whole answer as with
    everything loaded; right: the answer that the text has, of the questions where it is known.
    """

    selector: str
    rest: str
    order: str
    ratio: float
    bytes_read_share: float
    kl: float
    top1: float
    answer_match: float
    right: float
    ttft_s: float


class TtftRow(msgspec.Struct, frozen=True):
    """From the first request for bytes to the suffix's logits, both ways in turns: medians, and of the ratio too.

    disk_s: what the disk alone takes for the whole, and for the part.
    """

    question: str
    whole_s: float
    selective_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    whole_disk_s: float
    selective_disk_s: float


class CurveRow(msgspec.Struct, frozen=True):
    """Quality against bytes, for the plot. kl_over_line: over that of tide with all tokens alike at the same bytes."""

    series: str
    label: str
    bytes_read_share: float
    kl: float
    kl_over_line: float | None


class ImportanceBench(msgspec.Struct, frozen=True):
    """The tables that were asked for, and what they were measured on. The last four are of `selectors`."""

    model: str
    kv_dtype: str
    disk_bytes_s: float
    contexts: int
    context_tokens: int
    questions: list[str]
    rows: list[Row]
    guards: list[GuardRow]
    needles: list[NeedleRow]
    ttft: list[TtftRow]
    engine: list[EngineRow]
    ablation: list[AblationRow]
    curve: list[CurveRow]
    ttft_speedup: float | None
    kl_drop_over_base: float | None
    top1_below_all_heads: float | None
    selective_kl_over_line: float | None


class _Case(NamedTuple):
    """The subject of a row. `selector` makes one for a prefix."""

    selector: Callable[[JudgedPrefix], Selector]
    rest: Rest
    is_packed: bool
    has_base: bool
    probes: bool
    by_chunks: bool
    # Shown at all ratios, not at the headline's alone.
    is_swept: bool = False
    # A step of the ablation.
    is_step: bool = True


def _cases() -> list[_Case]:
    paper = (Rest.DROP, False, False, True, False)
    blind = (Rest.DROP, False, False, False, False)
    return [
        _Case(lambda _: AllHeads(), *paper, is_swept=True),
        _Case(lambda _: FirstHeads(), *paper, is_swept=True),
        _Case(lambda _: GroupHeads(), *paper, is_step=False),
        _Case(lambda _: FirstHeads(), Rest.DROP, True, False, True, False),
        _Case(lambda _: Recency(), *blind, is_step=False),
        _Case(lambda _: Random(np.random.default_rng(0)), *blind, is_step=False),
        _Case(lambda prefix: KnownScores(prefix.scores), Rest.DROP, True, False, False, True, is_step=False),
        _Case(lambda _: AllHeads("base-keys"), Rest.DROP, False, True, False, False),
        _Case(lambda _: AllHeads("base-keys"), Rest.DROP, True, True, False, True, is_swept=True),
        _Case(lambda _: AllHeads("base-keys"), Rest.BASE, True, True, False, True, is_swept=True),
        _Case(lambda prefix: KnownScores(prefix.scores), Rest.BASE, True, True, False, True, is_swept=True),
        _Case(lambda _: Recency(), Rest.BASE, False, True, False, False, is_step=False),
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
    dtype: KVDtype = KVDtype.FLOAT32,
    clock: Clock | None = None,
    tables: Collection[str] = TABLES,
) -> ImportanceBench:
    """Judge on texts that are long enough, KV kept as `dtype`. ValueError if none is, or for an unknown table."""
    if unknown := sorted(set(tables) - set(TABLES)):
        raise ValueError(f"no table {', '.join(unknown)}, expected some of {', '.join(TABLES)}")
    judge = ImportanceJudge(model, CodecRegistry(profiles), clock or SystemClock(), bytes_s, dtype)
    tasks = make_tasks(texts, size.contexts, size.context_tokens, tokenize)
    prefixes = []
    # The engine and needles make prefixes of their own.
    for number, task in enumerate(tasks if {"selectors", "guards"} & set(tables) else ()):
        progress("prefill", number, len(tasks))
        prefixes.append(judge.add(task.ids, *tokenized(task, tokenize, size.questions)))
    selectors = _Selectors([], [], [], [])
    engine: list[EngineRow] = []
    guards: list[GuardRow] = []
    needles: list[NeedleRow] = []
    if "selectors" in tables:
        selectors = _selectors(judge, prefixes, profiles, size, progress)
    if "engine" in tables:
        progress("the engine itself", 0, 1)
        (uses, questions), ratio, tries = tokenized(tasks[0], tokenize, 1), HEADLINE_RATIO, size.tries
        asked = ([use.ids for use in uses], questions[0].ids)
        engine = engine_rows(model, profiles, tasks[0].ids, *asked, ratio, tries, clock or SystemClock())
    if "guards" in tables:
        trying = (HEADLINE_RATIO, size.guards, tokenize, model.config.vocab_size)
        guards = guard_rows(judge, texts, prefixes, size.context_tokens, *trying, progress)
    if "needles" in tables:
        needles = needle_rows(judge, texts, size.context_tokens, size.needles, HEADLINE_RATIO, tokenize, progress)
    headlines: tuple[float | None, float | None] = _headlines(selectors.rows) if selectors.rows else (None, None)
    finer = [row.kl_over_line or 0.0 for row in selectors.curve if row.series == "tide, important tokens finer"]
    return ImportanceBench(
        model_name,
        judge.layout.dtype.value,
        bytes_s,
        len(tasks),
        size.context_tokens,
        [question.kind for question in tokenized(tasks[0], tokenize, size.questions)[1]],
        selectors.rows,
        guards,
        needles,
        selectors.ttft,
        engine,
        selectors.ablation,
        selectors.curve,
        median(row.speedup for row in selectors.ttft) if selectors.ttft else None,
        *headlines,
        max(finer, default=None),
    )


class _Selectors(NamedTuple):
    rows: list[Row]
    ttft: list[TtftRow]
    ablation: list[AblationRow]
    curve: list[CurveRow]


def _selectors(
    judge: ImportanceJudge,
    prefixes: Sequence[JudgedPrefix],
    profiles: Sequence[Profile],
    size: ImportanceSize,
    progress: Progress,
) -> _Selectors:
    rows, judged = _rows(judge, prefixes, size, progress)
    ttft = _ttft(judge, prefixes, size, progress)
    progress("quality against bytes", 0, 2)
    curve = _curve(judge, prefixes, profiles, rows, size.stride)
    return _Selectors(rows, ttft, _ablation(judge, prefixes, judged, judge.bytes_s), curve)


# Selector, rest, order.
_Key = tuple[str, str, str]


def _rows(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], size: ImportanceSize, progress: Progress
) -> tuple[list[Row], dict[_Key, list[Judged]]]:
    """Return all rows, and each answer of those at the headline's ratio, by prefix and then question."""
    asked = [(prefix, number) for prefix in prefixes for number in range(len(prefix.questions))]
    kept: dict[_Key, list[Judged]] = {("whole", "whole", "original"): [judge.whole(*each) for each in asked]}
    rows = [
        _row(("whole", "whole", "original"), 1.0, kept["whole", "whole", "original"]),
        _row(("none", "base", "packed"), 0.0, [judge.rough(*each) for each in asked]),
    ]
    chosen = [case for case in _cases() if case.is_step or size.has_others]
    cases = [(case, ratio) for case in chosen for ratio in size.ratios if case.is_swept or ratio == HEADLINE_RATIO]
    for done, (case, ratio) in enumerate(cases):
        progress("selections", done, len(cases))
        judged, name = [], ""
        for prefix, number in asked:
            selector = case.selector(prefix)
            name = selector.name
            settings = SparseSettings(ratio, selector, None, case.rest, case.by_chunks)
            judged.append(judge.selected(prefix, number, settings, case.is_packed, case.has_base, case.probes))
        key = (name, case.rest.value, "packed" if case.is_packed else "original")
        rows.append(_row(key, ratio, judged))
        if ratio == HEADLINE_RATIO:
            kept[key] = judged
    return rows, kept


def _row(case: _Key, ratio: float, judged: Sequence[Judged]) -> Row:
    known = [each.is_right for each in judged if each.is_right is not None]
    return Row(
        *case,
        ratio,
        bytes_read_share=fmean(each.read_bytes / each.whole_bytes for each in judged),
        kl=fmean(each.kl for each in judged),
        top1=fmean(each.top1 for each in judged),
        answer_match=fmean(each.answer_match for each in judged),
        right=fmean(known) if known else 0.0,
        ttft_s=median(each.ttft_s for each in judged),
    )


def _ttft(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], size: ImportanceSize, progress: Progress
) -> list[TtftRow]:
    """Return whole and selective loads in turns, a row for each question of the first prefix."""
    prefix, rows = prefixes[0], []
    settings = SparseSettings(HEADLINE_RATIO, guard=None)
    for number, question in enumerate(prefix.questions):
        progress("TTFT", number, len(prefix.questions))
        pairs = [(judge.whole(prefix, number), judge.selected(prefix, number, settings)) for _ in range(size.tries)]
        ratios = sorted(whole.ttft_s / part.ttft_s for whole, part in pairs)
        rows.append(
            TtftRow(
                f"{question.kind}, {len(question.ids)} tokens",
                median(whole.ttft_s for whole, _ in pairs),
                median(part.ttft_s for _, part in pairs),
                median(ratios),
                ratios[0],
                ratios[-1],
                pairs[0][0].read_bytes / judge.bytes_s,
                pairs[0][1].read_bytes / judge.bytes_s,
            )
        )
    return rows


def _ablation(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], judged: Mapping[_Key, Sequence[Judged]], bytes_s: float
) -> list[AblationRow]:
    """Return the paper's parts one after the other, each with every cache."""
    steps: list[tuple[str, _Key]] = [
        ("whole load", ("whole", "whole", "original")),
        ("all heads (AS + H2O)", ("all-heads", "drop", "original")),
        ("identification: first three heads", ("first-3", "drop", "original")),
        ("+ reordering by uses", ("first-3", "drop", "packed")),
        ("identification: rough keys", ("base-keys", "drop", "original")),
        ("+ reordering by uses, whole chunks", ("base-keys", "drop", "packed")),
        ("+ rough rest", ("base-keys", "base", "packed")),
        ("scores alone, no probe", ("past-uses", "base", "packed")),
    ]
    important = {
        meta.id: float(max(1.0, (part > 1).sum(axis=1).mean()))
        for prefix in prefixes
        for meta, part in zip(prefix.metas, np.split(prefix.scores, len(prefix.metas), axis=1), strict=True)
    }
    count = len(prefixes[0].questions)
    turns = sequence(len(prefixes), count, random.Random(2))
    rows = []
    for step, of in steps:
        found = judged[of]
        kl = fmean(each.kl for each in found)
        asked = [found[prefix * count + number].reads for prefix, number in turns]
        rows += replayed(step, kl, asked, judge.layout.raw_bytes, important, bytes_s, SystemClock())
    return rows


def _curve(
    judge: ImportanceJudge,
    prefixes: Sequence[JudgedPrefix],
    profiles: Sequence[Profile],
    rows: Sequence[Row],
    stride: int,
) -> list[CurveRow]:
    profile = next(each for each in profiles if each.kind == "tide-layer" and each.fits(judge.layout))
    line = all_tokens(judge, prefixes, profile, stride)
    finer = selective(judge, prefixes, profile, stride)
    chosen = {"base-keys", "past-uses", "first-3", "all-heads"}
    exact = [
        (f"{row.selector}, rest {row.rest}, {row.order}", SharePoint(f"{row.ratio:g}", row.bytes_read_share, row.kl))
        for row in rows
        if row.selector in chosen
    ]
    series = [("tide, all tokens", each) for each in line] + [("tide, important tokens finer", each) for each in finer]
    return [CurveRow(name, *point, over_line(point, line)) for name, point in [*series, *exact]]


def _headlines(rows: Sequence[Row]) -> tuple[float, float]:
    """Return KL of dropping over ours at the same bytes, and top-1 of all heads above ours."""
    found = {(row.selector, row.rest, row.order): row for row in rows if row.ratio in {HEADLINE_RATIO, 1.0}}
    ours = found["base-keys", "base", "packed"]
    drop, heads = found["base-keys", "drop", "packed"], found["all-heads", "drop", "original"]
    return drop.kl / max(ours.kl, 1e-12), heads.top1 - ours.top1
