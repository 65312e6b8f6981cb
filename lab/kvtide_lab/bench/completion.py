"""Completion with a remote store, on hits and on misses, by codec: the two graphs of the CacheGen notes for Ascend.

A server of kvtide's keeps objects in memory behind a link; what goes up is not slowed. Each codec has engines of its
own; the one that asks for what is stored is a new one, so that nothing comes from its memory. Right after each answer,
once all is stored, a plain engine computes the same, so that ratios are of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.bench.services import server_behind
from kvtide_lab.measuring import Show, Spread, spread_of

LOCAL = "raw, local"
CODECS = ("raw", "lossless", "cachegen:2", "chunkwise:1", "tide")
_WARM_UP_TOKENS = 300


class CompletionSize(msgspec.Struct, frozen=True):
    """The amount of work: prompts that share nothing, asked once for misses and once for hits."""

    prompts: int = 4
    prompt_tokens: int = 2068
    answer_tokens: int = 16


FULL = CompletionSize()
QUICK = CompletionSize(prompts=2, prompt_tokens=660, answer_tokens=8)


class CompletionRow(msgspec.Struct, frozen=True):
    """One way. Seconds of a whole answer; `miss`: nothing is stored yet, and what is computed gets stored meanwhile.

    miss_slowdown, hit_speedup: a miss over computing, computing over a hit. settle_s: until all was
    stored, after all misses. loaded_bytes: read for all hits. answers_changed: of the hits, against computing.
    """

    way: str
    miss_s: Spread
    miss_slowdown: Spread
    settle_s: float
    hit_s: Spread
    hit_speedup: Spread
    hit_tokens: int
    loaded_bytes: int
    bytes_vs_raw: float
    answers_changed: int


class CompletionBench(msgspec.Struct, frozen=True):
    """All rows; `computed_s`: seconds of an answer without a cache, over the whole run."""

    model: str
    link_mbit_s: float
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    computed_s: Spread
    rows: list[CompletionRow]


class _Pair(NamedTuple):
    answer: dict[str, Any]
    computed: dict[str, Any]

    @property
    def slowdown(self) -> float:
        return float(self.answer["seconds"] / self.computed["seconds"])


class _Way(NamedTuple):
    name: str
    misses: list[_Pair]
    settle_s: float
    hits: list[_Pair]
    loaded_bytes: int


def run(
    engine: Callable[..., EngineProcess],
    model: str,
    tokens: Sequence[int],
    link_mbit_s: float,
    size: CompletionSize,
    show: Show,
) -> CompletionBench:
    """Measure every way; `engine` starts one (transfer=, options=). ValueError if the text is too short."""
    needed = size.prompts * size.prompt_tokens + _WARM_UP_TOKENS
    if len(tokens) < needed:
        raise ValueError(f"the text must have {needed} tokens, got {len(tokens)}")
    starts = [_WARM_UP_TOKENS + number * size.prompt_tokens for number in range(size.prompts)]
    prompts = [list(tokens[start : start + size.prompt_tokens]) for start in starts]
    options = {"max_num_batched_tokens": 4096, "disable_log_stats": False}
    rate, names, ways = (link_mbit_s * 1e6 / 8).__mul__, (LOCAL, *CODECS), list[_Way]()
    with (
        TemporaryDirectory(prefix="kvtide-") as folder,
        server_behind(rate) as (_, link),
        engine(transfer=None, options={**options, "enable_prefix_caching": False}) as plain,
    ):
        plain.ask(tokens[:_WARM_UP_TOKENS], 2)
        for number, name in enumerate(names):
            show(name, number, len(names))
            # What an idle link could have passed is not lost to the next: it counts from here.
            link.restart(rate)
            store = f"{folder}/local" if name == LOCAL else link.url
            codec = "raw" if name == LOCAL else name
            # Lossless and raw objects serve each other's readers: each way is a tenant.
            transfer = kvtide_transfer(store, codec=codec, tenant_salt=name)
            ways.append(_way(name, partial(engine, transfer=transfer, options=options), plain, prompts, size))
    show("done", len(names), len(names))
    computed = [pair.computed["seconds"] for way in ways for pair in (*way.misses, *way.hits)]
    raw_bytes = next(way.loaded_bytes for way in ways if way.name == "raw")
    sizes = (size.prompts, size.prompt_tokens, size.answer_tokens)
    return CompletionBench(model, link_mbit_s, *sizes, spread_of(computed), [_row(way, raw_bytes) for way in ways])


def _way(
    name: str, engine: Callable[[], EngineProcess], plain: EngineProcess, prompts: list[list[int]], size: CompletionSize
) -> _Way:
    def asked(process: EngineProcess) -> tuple[list[_Pair], float]:
        process.ask(list(reversed(prompts[0][:_WARM_UP_TOKENS])), 2)
        pairs, settle_s = list[_Pair](), 0.0
        for ids in prompts:
            answer = process.ask(ids, size.answer_tokens)
            settle_s += process.do("settle")["seconds"]
            pairs.append(_Pair(answer, plain.ask(ids, size.answer_tokens)))
        return pairs, settle_s

    with engine() as storing:
        misses, settle_s = asked(storing)
    with engine() as loading:
        hits, _ = asked(loading)
        metrics = loading.do("check")["stats"]["metrics"]
    return _Way(name, misses, settle_s, hits, int(metrics.get("vllm:kvtide_loaded_bytes", 0)))


def _row(way: _Way, raw_bytes: int) -> CompletionRow:
    return CompletionRow(
        way=way.name,
        miss_s=spread_of([pair.answer["seconds"] for pair in way.misses]),
        miss_slowdown=spread_of([pair.slowdown for pair in way.misses]),
        settle_s=way.settle_s,
        hit_s=spread_of([pair.answer["seconds"] for pair in way.hits]),
        hit_speedup=spread_of([1 / pair.slowdown for pair in way.hits]),
        hit_tokens=sum(pair.answer["cached_tokens"] for pair in way.hits),
        loaded_bytes=way.loaded_bytes,
        bytes_vs_raw=way.loaded_bytes / raw_bytes if raw_bytes else 1.0,
        answers_changed=sum(pair.answer["ids"] != pair.computed["ids"] for pair in way.hits),
    )
