"""The prefix report's random prompts on real vLLM: hit rate and items per second against p, its two figures.

With probability p a request is one of a few frequent ones, else it is new. The report's lengths are kept in pages: its
prompts of 15 have 15 pages here. Engines answer each request one right after the other; what kvtide still stores then
is waited for, and not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.measuring import Show

# The smallest page of vLLM's attention on processors.
PAGE_TOKENS = 32
PROMPT_TOKENS = 15 * PAGE_TOKENS
# Ids that the small model has, without those that mean something to a tokenizer.
_VOCABULARY = range(1000, 40_000)
# What each way passes to the engine, and whether it has its own prefix cache.
_WAYS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "none": (None, False),
    "own": (None, True),
    "kvtide": (kvtide_transfer("memory://"), False),
}


class PromptsSize(msgspec.Struct, frozen=True):
    """The amount of work. The report has 1,000 requests for each p; here a frequent one comes as often as there."""

    requests: int = 30
    frequent: int = 2
    answer_tokens: int = 4
    probabilities: tuple[float, ...] = tuple(step / 10 for step in range(1, 11))
    seed: int = 0


FULL = PromptsSize()
QUICK = PromptsSize(requests=8, frequent=2, probabilities=(0.1, 0.5, 1.0))


class PromptsRow(msgspec.Struct, frozen=True):
    """One p. Hit rates by tokens of prompts; `none`: without a cache, `own`: the engine's."""

    p: float
    hit_rate_own: float
    hit_rate_kvtide: float
    items_per_s_none: float
    items_per_s_own: float
    items_per_s_kvtide: float
    answers_changed: int


class PromptsBench(msgspec.Struct, frozen=True):
    """All rows, and from which p on kvtide has answered more than an engine without a cache; None: from none."""

    model: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    pays_from_p: float | None
    rows: list[PromptsRow]


def run(engine: Callable[..., EngineProcess], model: str, size: PromptsSize, show: Show) -> PromptsBench:
    """Measure every p; `engine` starts one (transfer=, options=). ValueError for a p outside [0, 1]."""
    if not all(0 <= p <= 1 for p in size.probabilities):
        raise ValueError(f"probabilities must be from 0 to 1, got {list(size.probabilities)}")
    rows: list[PromptsRow] = []
    with ExitStack() as stack:
        engines = {}
        for name, (transfer, has_cache) in _WAYS.items():
            show(f"start of {name}", len(rows), len(size.probabilities))
            options = {"enable_prefix_caching": has_cache, "block_size": PAGE_TOKENS}
            engines[name] = stack.enter_context(engine(transfer=transfer, options=options))
            engines[name].ask(_VOCABULARY[:PROMPT_TOKENS], 2)
        for p in size.probabilities:
            show(f"p = {p:g}", len(rows), len(size.probabilities))
            rows.append(_row(engines, p, size))
    pays = [row.p for row in rows if row.items_per_s_kvtide > row.items_per_s_none]
    return PromptsBench(model, size.requests, PROMPT_TOKENS, size.answer_tokens, min(pays) if pays else None, rows)


def _row(engines: dict[str, EngineProcess], p: float, size: PromptsSize) -> PromptsRow:
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    prompts = prompts_of(p, size)
    for prompt in prompts:
        for name, engine in engines.items():
            answers[name].append(engine.ask(prompt, size.answer_tokens))
            if name == "kvtide":
                engine.do("settle")
    hits = {name: sum(each["cached_tokens"] for each in said) for name, said in answers.items()}
    rates = {name: len(said) / sum(each["seconds"] for each in said) for name, said in answers.items()}
    changed = sum(a["ids"] != b["ids"] for a, b in zip(answers["none"], answers["kvtide"], strict=True))
    tokens = len(prompts) * PROMPT_TOKENS
    own, ours = hits["own"] / tokens, hits["kvtide"] / tokens
    return PromptsRow(p, own, ours, rates["none"], rates["own"], rates["kvtide"], changed)


def prompts_of(p: float, size: PromptsSize) -> list[Sequence[int]]:
    """Return the requests for one p, the same at every call."""
    rng = random.Random(f"{size.seed} {p}")
    frequent = [rng.choices(_VOCABULARY, k=PROMPT_TOKENS) for _ in range(size.frequent)]
    return [
        rng.choice(frequent) if rng.random() < p else rng.choices(_VOCABULARY, k=PROMPT_TOKENS)
        for _ in range(size.requests)
    ]
