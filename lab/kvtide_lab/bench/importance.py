"""`kvtide-lab bench importance`: quality against bytes read when only what matters of a prefix is loaded exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from kvtide.block import KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.codec import CodecRegistry, Profile
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.generation import FirstToken
from kvtide.engines.transformers.selective import Rest, SparseSettings
from kvtide.importance import AllHeads, FirstHeads
from kvtide_lab.bench.importance_prompts import NeedleRow, make_tasks, needle_rows, tokenized
from kvtide_lab.bench.services import server_behind
from kvtide_lab.bench.shaped import ShapedProxy, as_fast_as_the_machine
from kvtide_lab.judge.importance_judge import (
    GroupHeads,
    ImportanceJudge,
    Judged,
    JudgedPrefix,
    KnownScores,
    Random,
    Recency,
)
from kvtide_lab.measuring import Show

HEADLINE_RATIO = 0.25
# Parts that can be asked for alone: selectors (with TTFTs), the engine, needles.
TABLES = ("selectors", "engine", "needles")
# A disk of 200 MB/s and a link of 1 Gbit/s.
RATES = {"disk": 200e6, "link": 125e6}
# Prompts before the engine's second row, each with a question of its own.
USES = 5
_STORE_S_MAX = 300.0


class ImportanceSize(NamedTuple):
    """The amount of judging. tries: of each pair of TTFTs.

    needles: texts of a kind.
    """

    contexts: int
    context_tokens: int
    ratios: tuple[float, ...]
    questions: int
    tries: int
    needles: int


FULL = ImportanceSize(2, 4096, (0.1, 0.2, 0.25, 0.3, 0.5), 3, 5, 4)
QUICK = ImportanceSize(1, 512, (0.25,), 2, 1, 1)


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


class EngineRow(msgspec.Struct, frozen=True):
    """One prompt by `attach` over one link, median of the tries. use: `first` hit of its text, or after some others.

    part_s, whole_s: to the first token, by either way. decided, ttft_s: what the engine chose once it knew both, and
    what that took; ratio: over whole_s. front_share: bytes waited for, of the raw cache; behind_share: those that came
    over the link beside or after the answer.
    """

    place: str
    tokens: int
    use: str
    part_s: float
    whole_s: float
    decided: str
    ttft_s: float
    ratio: float
    front_share: float
    behind_share: float


class ImportanceBench(msgspec.Struct, frozen=True):
    """The tables that were asked for, and what they were measured on. The last three are of `selectors`."""

    model: str
    kv_dtype: str
    disk_bytes_s: float
    contexts: int
    context_tokens: int
    questions: list[str]
    rows: list[Row]
    needles: list[NeedleRow]
    ttft: list[TtftRow]
    engine: list[EngineRow]
    ttft_speedup: float | None
    kl_drop_over_base: float | None
    top1_below_all_heads: float | None


class _Case(NamedTuple):
    """The subject of a row. `selector` makes one for a prefix. is_swept: at all ratios, not the headline's alone."""

    name: str
    selector: Callable[[JudgedPrefix], AllHeads]
    rest: Rest
    is_packed: bool
    has_base: bool
    probes: bool
    by_chunks: bool
    is_swept: bool = False


def _cases() -> list[_Case]:
    paper = (Rest.DROP, False, False, True, False)
    blind = (Rest.DROP, False, False, False, False)
    return [
        _Case("all-heads", lambda _: AllHeads(), *paper, is_swept=True),
        _Case("first-3", lambda _: FirstHeads(), *paper, is_swept=True),
        _Case("one-per-group", lambda _: GroupHeads(), *paper),
        _Case("first-3", lambda _: FirstHeads(), Rest.DROP, True, False, True, False),
        _Case("recency", lambda _: Recency(), *blind),
        _Case("random", lambda _: Random(np.random.default_rng(0)), *blind),
        _Case("past-uses", lambda prefix: KnownScores(prefix.scores), Rest.DROP, True, False, False, True),
        _Case("base-keys", lambda _: AllHeads(), Rest.DROP, False, True, False, False),
        _Case("base-keys", lambda _: AllHeads(), Rest.DROP, True, True, False, True, is_swept=True),
        _Case("base-keys", lambda _: AllHeads(), Rest.BASE, True, True, False, True, is_swept=True),
        _Case(
            "past-uses", lambda prefix: KnownScores(prefix.scores), Rest.BASE, True, True, False, True, is_swept=True
        ),
        _Case("recency", lambda _: Recency(), Rest.BASE, False, True, False, False),
    ]


def run(
    model: Any,
    model_name: str,
    tokenize: Callable[[str], list[int]],
    texts: Sequence[Text],
    profiles: Sequence[Profile],
    size: ImportanceSize,
    bytes_s: float,
    show: Show,
    dtype: KVDtype = KVDtype.FLOAT32,
    tables: Collection[str] = TABLES,
) -> ImportanceBench:
    """Judge on texts that are long enough, KV kept as `dtype`. ValueError if none is, or for an unknown table."""
    if unknown := sorted(set(tables) - set(TABLES)):
        raise ValueError(f"no table {', '.join(unknown)}, expected some of {', '.join(TABLES)}")
    clock = SystemClock()
    judge = ImportanceJudge(model, CodecRegistry(profiles), clock, bytes_s, dtype)
    tasks = make_tasks(texts, size.contexts, size.context_tokens, tokenize)
    rows, ttft = list[Row](), list[TtftRow]()
    engine, needles = list[EngineRow](), list[NeedleRow]()
    if "selectors" in tables:
        prefixes = []
        for number, task in enumerate(tasks):
            show("prefill", number, len(tasks))
            prefixes.append(judge.add(task.ids, *tokenized(task, tokenize, size.questions)))
        rows, ttft = list(_rows(judge, prefixes, size, show)), list(_ttft(judge, prefixes[0], size, show))
    if "engine" in tables:
        show("the engine itself", 0, 1)
        uses, questions = tokenized(tasks[0], tokenize, 1)
        asked = ([use.ids for use in uses], questions[0].ids)
        engine = engine_rows(model, profiles, tasks[0].ids, *asked, HEADLINE_RATIO, size.tries, clock)
    if "needles" in tables:
        needles = needle_rows(judge, texts, size.context_tokens, size.needles, HEADLINE_RATIO, tokenize, show)
    headlines: tuple[float | None, float | None] = _headlines(rows) if rows else (None, None)
    return ImportanceBench(
        model_name,
        judge.layout.dtype.value,
        bytes_s,
        len(tasks),
        size.context_tokens,
        [question.kind for question in tokenized(tasks[0], tokenize, size.questions)[1]],
        rows,
        needles,
        ttft,
        engine,
        median(row.speedup for row in ttft) if ttft else None,
        *headlines,
    )


def _rows(judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], size: ImportanceSize, show: Show) -> Iterator[Row]:
    asked = [(prefix, number) for prefix in prefixes for number in range(len(prefix.questions))]
    yield _row(("whole", "whole", "original"), 1.0, [judge.whole(*each) for each in asked])
    yield _row(("none", "base", "packed"), 0.0, [judge.rough(*each) for each in asked])
    cases = [(case, ratio) for case in _cases() for ratio in size.ratios if case.is_swept or ratio == HEADLINE_RATIO]
    for done, (case, ratio) in enumerate(cases):
        show("selections", done, len(cases))
        judged = []
        for prefix, number in asked:
            settings = SparseSettings(ratio, case.selector(prefix), None, case.rest, case.by_chunks)
            judged.append(judge.selected(prefix, number, settings, case.is_packed, case.has_base, case.probes))
        yield _row((case.name, case.rest.value, "packed" if case.is_packed else "original"), ratio, judged)


def _row(case: tuple[str, str, str], ratio: float, judged: Sequence[Judged]) -> Row:
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


def _ttft(judge: ImportanceJudge, prefix: JudgedPrefix, size: ImportanceSize, show: Show) -> Iterator[TtftRow]:
    """Yield whole and selective loads in turns, a row for each question."""
    settings = SparseSettings(HEADLINE_RATIO, guard=None)
    for number, question in enumerate(prefix.questions):
        show("TTFT", number, len(prefix.questions))
        pairs = [(judge.whole(prefix, number), judge.selected(prefix, number, settings)) for _ in range(size.tries)]
        ratios = sorted(whole.ttft_s / part.ttft_s for whole, part in pairs)
        yield TtftRow(
            f"{question.kind}, {len(question.ids)} tokens",
            median(whole.ttft_s for whole, _ in pairs),
            median(part.ttft_s for _, part in pairs),
            median(ratios),
            ratios[0],
            ratios[-1],
            pairs[0][0].read_bytes / judge.bytes_s,
            pairs[0][1].read_bytes / judge.bytes_s,
        )


def _headlines(rows: Sequence[Row]) -> tuple[float, float]:
    """Return KL of dropping over ours at the same bytes, and top-1 of all heads above ours."""
    found = {(row.selector, row.rest, row.order): row for row in rows if row.ratio in {HEADLINE_RATIO, 1.0}}
    ours = found["base-keys", "base", "packed"]
    drop, heads = found["base-keys", "drop", "packed"], found["all-heads", "drop", "original"]
    return drop.kl / max(ours.kl, 1e-12), heads.top1 - ours.top1


def engine_rows(
    model: Any,
    profiles: Sequence[Profile],
    ids: Sequence[int],
    uses: Sequence[Sequence[int]],
    question: Sequence[int],
    ratio: float,
    tries: int,
    clock: Clock,
) -> list[EngineRow]:
    """Return both rows of each place. uses: the first stores the text, the others come before its second row.

    In part, whole, and what is decided are calls of the same `generate`, with a real server behind a shaped link.
    """
    found = []
    # The guard's verdict is measured elsewhere: all of these are loads in part.
    settings = SparseSettings(ratio, guard=None)
    for place, bytes_s in RATES.items():
        with server_behind(as_fast_as_the_machine) as (_, link):

            def attached(url: str = link.url) -> CachedModel:
                return attach(model, url, profiles=profiles, importance=settings)

            with attached() as cached:
                _ask(cached, [*ids, *uses[0]], clock)
                if not cached.flush(_STORE_S_MAX):
                    raise ValueError("the text was not stored in time")
            link.restart(bytes_s.__mul__)
            for use, before in (("first", ()), ("after five", uses[1 : 1 + USES])):
                with attached() as cached:
                    for each in before:
                        _ask(cached, [*ids, *each], clock)
                tried = [_tried(attached(), link, [*ids, *question], clock) for _ in range(tries)]
                found.append(_engine_row(place, use, len(ids), tried))
    return found


class _Tried(NamedTuple):
    part_s: float
    whole_s: float
    decided: str
    ttft_s: float
    front_share: float
    behind_share: float


def _tried(cached: CachedModel, link: ShapedProxy, prompt: Sequence[int], clock: Clock) -> _Tried:
    """Ask three times: an engine tries the part, then the whole, and then takes the faster."""
    before = link.passed_bytes
    with cached:
        part_s = _ask(cached, prompt, clock)
        report = cached.last
        assert report is not None and report.selected is not None, f"expected a load in part, got {report}"
        # Closing waits for what is learnt, asking again does not.
        cached.learned(_STORE_S_MAX)
        passed = link.passed_bytes - before
        whole_s = _ask(cached, prompt, clock)
        assert cached.last is not None and cached.last.selected is None
        ttft_s = _ask(cached, prompt, clock)
        decided = "whole" if cached.last.selected is None else "part"
    raw, front = report.selected.whole_bytes, report.selected.read_bytes
    return _Tried(part_s, whole_s, decided, ttft_s, front / raw, max(0, passed - front) / raw)


def _ask(cached: CachedModel, prompt: Sequence[int], clock: Clock) -> float:
    """Return the seconds to the first token."""
    first, began_s = FirstToken(clock), clock.monotonic_s()
    cached.generate(torch.tensor([list(prompt)]), max_new_tokens=1, do_sample=False, stopping_criteria=[first])
    return first.seen_s - began_s


def _engine_row(place: str, use: str, tokens: int, tried: Sequence[_Tried]) -> EngineRow:
    whole_s, ttft_s = median(each.whole_s for each in tried), median(each.ttft_s for each in tried)
    return EngineRow(
        place,
        tokens,
        use,
        median(each.part_s for each in tried),
        whole_s,
        max(("part", "whole"), key=[each.decided for each in tried].count),
        ttft_s,
        ttft_s / whole_s,
        median(each.front_share for each in tried),
        median(each.behind_share for each in tried),
    )
