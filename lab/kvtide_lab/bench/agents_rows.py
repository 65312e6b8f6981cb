"""Rows and verdicts of the agents bench, from what contenders answered."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

NO_REUSE = "no reuse"
BEFORE, AFTER = "before", "after"
# Of two that are this close one is not better: a row of a few answers says no more.
TIE = 0.97
NATIVE_RATIO_MIN = 1.3
# The seconds of a shorter answer over its tokens are its wait over next to nothing: among few answers they are the p90.
ANSWER_TOKENS_MIN = 8
EXACT = ("kvtide", "kvtide lossless")


class AgentAnswer(msgspec.Struct, frozen=True):
    """One answer. `seconds` from the request to its last token."""

    ids: list[int]
    ttft_s: float
    seconds: float
    cached_tokens: int
    finish: str


class AgentPhase(msgspec.Struct, frozen=True):
    """A contender's answers before or after the restart. CPU seconds are of the engine's process and its server's.

    plain_s: where nothing is shared, seconds of a plain engine that was asked the same right before.
    """

    answers: list[AgentAnswer]
    prompt_tokens: int
    cpu_s: float
    plain_s: list[float] = []


class AgentsRow(msgspec.Struct, frozen=True):
    """One contender, so many sessions at once, before or after the restart; `no reuse`: nothing shared, one at a time.

    p90_interactivity: 1 / p90 of (seconds of an answer / its tokens), as InferenceX has it, in tokens a second, over
    answers of ANSWER_TOKENS_MIN tokens and more; all other figures are over all answers.
    answers_changed: answers that differ from plain vLLM's to the same prompt in a token.
    """

    engine: str
    row: str
    phase: str
    requests: int
    p90_interactivity: float
    ttft_p50_s: float
    ttft_p90_s: float
    prompt_tokens: int
    hit_tokens: int
    cpu_s_per_1k_tokens: float
    answers_changed: int
    failed: int


class AgentsRatio(msgspec.Struct, frozen=True):
    """p90_interactivity of kvtide over another's in one row and phase."""

    row: str
    phase: str
    other: str
    ratio: float


class AgentsBench(msgspec.Struct, frozen=True):
    """All rows and what they say of the goals. `failures`: contenders that did not run, and why."""

    model: str
    sessions: int
    working_set_tokens: int
    room_tokens: int
    is_first_or_tied: bool
    least_ratio: AgentsRatio | None
    after_restart_vs_native: float | None
    no_reuse_vs_plain: float
    answers_changed_exact: int
    failed_requests: int
    failures: dict[str, str]
    ratios: list[AgentsRatio]
    rows: list[AgentsRow]


def result_of(
    found: dict[tuple[str, str], list[list[AgentPhase]]],
    failures: dict[str, str],
    model: str,
    sessions: int,
    tokens: tuple[int, int],
) -> AgentsBench:
    """Return what the phases of all rounds say, by row and contender. `tokens`: working set and room."""
    rows = [
        _row(row, name, phase, number, [phases[number] for phases in rounds], found)
        for (row, name), rounds in found.items()
        for number, phase in enumerate((BEFORE, AFTER)[: len(rounds[0])])
    ]
    speed = {(row.row, row.phase, row.engine): row.p90_interactivity for row in rows}
    ratios = [
        AgentsRatio(row, phase, other, speed[row, phase, "kvtide"] / theirs)
        for (row, phase, other), theirs in speed.items()
        if not other.startswith("kvtide")
    ]
    native = [each.ratio for each in ratios if (each.phase, each.other) == (AFTER, "native")]
    least = min(ratios, key=lambda each: each.ratio, default=None)
    pairs = [
        theirs_s / mine.seconds
        for (phase,) in found[NO_REUSE, "kvtide"]
        for theirs_s, mine in zip(phase.plain_s, phase.answers, strict=True)
    ]
    return AgentsBench(
        model=model,
        sessions=sessions,
        working_set_tokens=tokens[0],
        room_tokens=tokens[1],
        is_first_or_tied=least is not None and least.ratio >= TIE,
        least_ratio=least,
        after_restart_vs_native=min(native) if native else None,
        no_reuse_vs_plain=median(pairs),
        answers_changed_exact=sum(row.answers_changed for row in rows if row.engine in EXACT),
        failed_requests=sum(row.failed for row in rows if row.engine.startswith("kvtide")),
        failures=failures,
        ratios=ratios,
        rows=rows,
    )


def _row(
    row: str,
    name: str,
    phase: str,
    number: int,
    phases: Sequence[AgentPhase],
    found: dict[tuple[str, str], list[list[AgentPhase]]],
) -> AgentsRow:
    answers = [answer for each in phases for answer in each.answers]
    expected = [answer for each in found[row, "plain"] for answer in each[number].answers]
    tokens = sum(each.prompt_tokens for each in phases) + sum(len(answer.ids) for answer in answers)
    spoken = [answer for answer in answers if len(answer.ids) >= ANSWER_TOKENS_MIN] or answers
    slowest = float(np.percentile([answer.seconds / max(1, len(answer.ids)) for answer in spoken], 90))
    ttfts = [answer.ttft_s for answer in answers]
    return AgentsRow(
        engine=name,
        row=row,
        phase=phase,
        requests=len(answers),
        p90_interactivity=1 / slowest,
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p90_s=float(np.percentile(ttfts, 90)),
        prompt_tokens=sum(each.prompt_tokens for each in phases),
        hit_tokens=sum(answer.cached_tokens for answer in answers),
        cpu_s_per_1k_tokens=1000 * sum(each.cpu_s for each in phases) / tokens,
        answers_changed=sum(mine.ids != theirs.ids for mine, theirs in zip(answers, expected, strict=True)),
        failed=sum(answer.finish != "length" for answer in answers),
    )
