"""Streaming for real: a server behind a link of any shape, a model that computes meanwhile, blocks that are decoded.

Every row stands beside what the simulator says of the same request from the same moment of the same link, as far as
this machine's own proxy and reader can carry it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from kvtide.bench.services import started
from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import CachegenCodec, Codec, CodecRegistry, LosslessCodec, Profile
from kvtide.engines.judge import capture_blocks
from kvtide.engines.streaming import StreamedPrefill
from kvtide.fetch import (
    ContextLoader,
    FetchLimits,
    Job,
    LinkState,
    Wish,
    bring,
    layered_job,
    level_job,
    read_heads,
)
from kvtide.keys import block_keys
from kvtide.server.shaped import ShapedProxy
from kvtide.sim.links import Link
from kvtide.sim.stream import play
from kvtide.stream.bandwidth import HarmonicRate, LastRate
from kvtide.stream.plan import CachegenRule, FixedLevel, Layered, Policy, PrefillSpeed, TwoEnded, cut
from kvtide.tier.http import http_tier
from kvtide.tier.ranges import RangeSource, range_sources
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import StoredObject, pack_object

__all__ = ["StreamBench", "StreamBenchRow", "StreamSize", "render", "run"]

BLOCK_TOKENS = 64
SUFFIX_TOKENS = 16
# docs/benchmarks.md: cachegen's levels 4 to 1, and level 2 with the deltas of 0 to 9 positions; 3, 5 and 7 between.
LEVEL_KL = (0.07399, 0.01315, 0.00335, 0.00087)
LAYERED_LEVEL = 2
LAYERED_KL = (0.525, 0.462, 0.403, 0.307, 0.234, 0.158, 0.107, 0.0659, 0.0405, 0.00337)
MBIT = 1e6 / 8


class StreamSize(NamedTuple):
    """How much is measured. slo_share: the SLO, as a share of recomputing all."""

    context_tokens: int
    repeats: int
    slo_share: float = 0.5


FULL = StreamSize(context_tokens=1024, repeats=5)
QUICK = StreamSize(context_tokens=256, repeats=1)


class StreamBenchRow(msgspec.Struct, frozen=True):
    """One policy on one link, and what the simulator says of it."""

    link: str
    policy: str
    slo_s: float
    miss_rate: float
    kl_mean: float
    ttft_p50_s: float
    text_share: float
    predicted_miss_rate: float
    predicted_kl_mean: float
    predicted_ttft_p50_s: float


class StreamBench(msgspec.Struct, frozen=True):
    """All rows; then TTFT as soon as it can be on the constant link, exact blocks, and on one that is far too slow."""

    context_tokens: int
    prefill_tokens_per_s: float
    rows: list[StreamBenchRow]
    ttft_two_ended_s: float
    ttft_load_s: float
    ttft_recompute_s: float
    slow_link_ttft_vs_recompute: float


class _Case(NamedTuple):
    name: str
    policy: Policy
    job: Job


class _Bench:
    """The model, its stored context in several codecs, and the link to the server that has it."""

    def __init__(self, model: Any, ids: Sequence[int], layout: BlockLayout, profile: Profile, server_port: int) -> None:
        self.clock: Clock = SystemClock()
        self.model = model
        self.ids = list(ids)
        self.layout = layout
        self.registry = CodecRegistry([profile])
        self.blocks = capture_blocks(model, self.ids[:-SUFFIX_TOKENS], layout)
        self._tier = http_tier(f"http://127.0.0.1:{server_port}", self.clock)

    @property
    def tokens(self) -> int:
        """Return the length of the stored context."""
        return len(self.blocks) * self.layout.tokens

    def store(self, name: str, codec: Codec) -> list[BlockMeta]:
        """Put the context on the server, encoded, under a namespace of its own."""
        namespace = Namespace(name.encode().ljust(32, b"\0"))
        keys = [BlockKey(namespace), *block_keys(namespace, np.array(self.ids, dtype=np.uint32), self.layout.tokens)]
        metas = [
            BlockMeta(ObjectId(namespace, keys[i + 1]), keys[i], i * self.layout.tokens, self.layout)
            for i in range(len(self.blocks))
        ]
        self._tier.open()
        for meta, bits in zip(metas, self.blocks, strict=True):
            packed = pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)
            self._tier.put_from(meta.id, packed)
        self._tier.close()
        return metas

    def engine(self) -> StreamedPrefill:
        """Return an engine that has nothing yet."""
        return StreamedPrefill(self.model, self.ids[: self.tokens], self.layout)

    def first_token_s(self, engine: StreamedPrefill) -> float:
        """Run what is behind the context of `engine` up to the first token; return how long that took."""
        started_s = self.clock.monotonic_s()
        engine.first_token(self.ids)
        return self.clock.monotonic_s() - started_s

    def prefill(self) -> PrefillSpeed:
        """Measure the engine's speed, block by block as a plan has it compute."""
        engine = self.engine()
        started_s = self.clock.monotonic_s()
        for start, stop in cut(self.tokens, self.layout.tokens):
            engine.compute(start, stop, lambda: True)
        return PrefillSpeed(self.tokens / (self.clock.monotonic_s() - started_s))


def run(
    model: Any,
    ids: Sequence[int],
    layout: BlockLayout,
    profile: Profile,
    links: Sequence[Link],
    size: StreamSize,
    progress: Callable[[str, int, int], None],
) -> StreamBench:
    """Play every policy over every link. `links` end with the constant one; ValueError for too few ids."""
    if len(ids) < size.context_tokens + SUFFIX_TOKENS:
        raise ValueError(
            f"a context and its question need {size.context_tokens + SUFFIX_TOKENS} tokens, got {len(ids)}"
        )
    with _server() as port, ShapedProxy(("127.0.0.1", port), lambda seconds: 1e9 * seconds) as proxy:
        bench = _Bench(model, ids[: size.context_tokens + SUFFIX_TOKENS], layout, profile, port)
        (source,) = range_sources(f"http://127.0.0.1:{proxy.port}", bench.clock)
        speed = bench.prefill()
        slo_s = size.slo_share * bench.tokens / speed.tokens_per_s
        cases = _cases(bench, source, profile, Wish(speed, slo_s))
        ours_bytes_per_s = _machine_rate(bench, source, cases[0].job)
        rows = []
        for number, link in enumerate(links):
            for position, case in enumerate(cases):
                progress("links", number * len(cases) + position, len(links) * len(cases))
                rows.append(_row(bench, source, proxy, link, link.capped(ours_bytes_per_s), case, slo_s, size.repeats))
        progress("links", len(links) * len(cases), len(links) * len(cases))
        exact = bench.store("exact", LosslessCodec())
        ttft = [_exact_ttfts(bench, source, proxy, links[-1], exact, speed) for _ in range(size.repeats)]
        slow = [_slow_ttft_ratio(bench, source, proxy, exact, speed) for _ in range(size.repeats)]
        source.close()
    two_ended_s, load_s, recompute_s = (statistics.median(each) for each in zip(*ttft, strict=True))
    return StreamBench(
        size.context_tokens, speed.tokens_per_s, rows, two_ended_s, load_s, recompute_s, statistics.median(slow)
    )


@contextmanager
def _server() -> Iterator[int]:
    words = [sys.executable, "-m", "kvtide.cli", "serve", "--tier", "memory://", "--listen"]
    with started(lambda port, folder: [*words, f"127.0.0.1:{port}"]) as service:
        yield service.port


def _cases(bench: _Bench, source: RangeSource, profile: Profile, wish: Wish) -> list[_Case]:
    codecs = [CachegenCodec(level, 0, profile) for level in (4, 3, 2, 1)]
    levels = [
        _heads(bench, source, bench.store(f"level {codec.codec_id} {n}", codec)) for n, codec in enumerate(codecs)
    ]
    layers = _heads(bench, source, bench.store("layers", CachegenCodec(LAYERED_LEVEL, 0, profile)))
    spans = cut(bench.tokens, bench.layout.tokens)
    coarse = cut(bench.tokens, 4 * bench.layout.tokens)
    by_level = level_job(levels, coarse, LEVEL_KL, wish)
    by_layer = layered_job(layers, spans, LAYERED_KL, wish)
    return [
        _Case("fixed", FixedLevel(1), by_level),
        _Case("cachegen", CachegenRule(), by_level),
        _Case("layered", Layered(), by_layer),
        _Case("two-ended", TwoEnded(), by_layer),
    ]


def _heads(bench: _Bench, source: RangeSource, metas: Sequence[BlockMeta]) -> list[StoredObject]:
    found = read_heads([source], [meta.id for meta in metas], bench.clock, 10.0, 4)
    assert len(found) == len(metas)
    return found


class _Played(NamedTuple):
    ttft_s: float
    kl: float
    text_share: float


def _machine_rate(bench: _Bench, source: RangeSource, job: Job) -> float:
    """Return the bytes a second that come through when the link is no bound: proxy, reader and receiver."""
    state = LinkState(HarmonicRate(1000))
    largest = job.request.steps - 1
    engine, limits = bench.engine(), FetchLimits()
    bring(
        job.until(0.0),
        FixedLevel(largest),
        [source],
        state,
        bench.clock,
        limits,
        bench.registry,
        engine,
        engine.append,
    )
    rate = state.estimator.bytes_per_s()
    assert rate is not None
    return rate


def _row(
    bench: _Bench,
    source: RangeSource,
    proxy: ShapedProxy,
    link: Link,
    real_link: Link,
    case: _Case,
    slo_s: float,
    repeats: int,
) -> StreamBenchRow:
    found, predicted = [], []
    # What follows the last byte: decoding, the question. It comes off the deadline, as measured the time before.
    tail_s = 0.0
    for repeat in range(repeats + 1):
        job = case.job.until(max(0.0, slo_s - tail_s))
        proxy.restart(link.carried)
        state = LinkState(LastRate() if not job.request.is_layered else HarmonicRate())
        engine = bench.engine()
        started_s = bench.clock.monotonic_s()
        limits = FetchLimits()
        brought = bring(job, case.policy, [source], state, bench.clock, limits, bench.registry, engine, engine.append)
        bench.first_token_s(engine)
        ttft_s = bench.clock.monotonic_s() - started_s
        own_s = ttft_s - brought.report.ready_s
        if repeat:
            text = sum(job.request.chunks[chunk].tokens for chunk in brought.report.progress.computed)
            found.append(_Played(ttft_s, brought.report.kl, text / bench.tokens))
            latency_s = min(0.01, state.latency_s)
            simulated = play(case.policy, job.request, real_link, 0.0, HarmonicRate(), latency_s)
            predicted.append(_Played(simulated.ready_s + own_s, simulated.kl, 0.0))
        tail_s = own_s
    # A tenth of a second is the noise of a machine with other work.
    late_s = 1.1 * slo_s
    return StreamBenchRow(
        link.name,
        case.name,
        slo_s,
        statistics.fmean(each.ttft_s > late_s for each in found),
        statistics.fmean(each.kl for each in found),
        statistics.median(each.ttft_s for each in found),
        statistics.fmean(each.text_share for each in found),
        statistics.fmean(each.ttft_s > late_s for each in predicted),
        statistics.fmean(each.kl for each in predicted),
        statistics.median(each.ttft_s for each in predicted),
    )


def _exact_ttfts(
    bench: _Bench, source: RangeSource, proxy: ShapedProxy, link: Link, metas: Sequence[BlockMeta], speed: PrefillSpeed
) -> tuple[float, float, float]:
    """Return the TTFT of both ends, of loading alone and of recomputing alone, exact blocks, as soon as can be."""
    stored = _heads(bench, source, metas)
    job = layered_job(stored, cut(bench.tokens, bench.layout.tokens), (0.0,), Wish(speed, 0.0))
    ttfts = []
    for policy in (TwoEnded(), Layered()):
        proxy.restart(link.carried)
        engine = bench.engine()
        started_s = bench.clock.monotonic_s()
        bring(
            job,
            policy,
            [source],
            LinkState(HarmonicRate()),
            bench.clock,
            FetchLimits(),
            bench.registry,
            engine,
            engine.append,
        )
        bench.first_token_s(engine)
        ttfts.append(bench.clock.monotonic_s() - started_s)
    return ttfts[0], ttfts[1], bench.first_token_s(bench.engine())


def _slow_ttft_ratio(
    bench: _Bench, source: RangeSource, proxy: ShapedProxy, metas: Sequence[BlockMeta], speed: PrefillSpeed
) -> float:
    """Return TTFT by a loader that knows its link of 1 Mbit/s, over that of recomputing alone."""
    proxy.restart(lambda seconds: MBIT * seconds)
    link = LinkState(HarmonicRate())
    link.estimator.add(int(MBIT), 0.0, 1.0)
    engine = bench.engine()
    started_s = bench.clock.monotonic_s()
    loader = ContextLoader([source], bench.registry, link, bench.clock, FetchLimits())
    loader.load(metas, (0.0,), Wish(speed, 0.0), engine, engine.append)
    bench.first_token_s(engine)
    ttft_s = bench.clock.monotonic_s() - started_s
    return ttft_s / bench.first_token_s(bench.engine())


def render(result: StreamBench) -> Table:
    """Return the rows as a table."""
    caption = (
        f"TTFT of exact blocks on the last link: both ends {result.ttft_two_ended_s:.2f} s, loading "
        f"{result.ttft_load_s:.2f} s, recomputing {result.ttft_recompute_s:.2f} s; on a link that is far too slow "
        f"{result.slow_link_ttft_vs_recompute:.2f} of recomputing"
    )
    title = f"{result.context_tokens} tokens, prefill {result.prefill_tokens_per_s:.0f} tokens/s; measured / simulated"
    table = Table(title=title, caption=caption)
    for column in ("link", "policy", "SLO", "misses", "KL", "TTFT p50", "recomputed"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("link", "policy") else "right")
    for row in result.rows:
        table.add_row(
            row.link,
            row.policy,
            f"{row.slo_s:.2f} s",
            f"{100 * row.miss_rate:.0f} / {100 * row.predicted_miss_rate:.0f} %",
            f"{row.kl_mean:.2g} / {row.predicted_kl_mean:.2g}",
            f"{row.ttft_p50_s:.2f} / {row.predicted_ttft_p50_s:.2f} s",
            f"{100 * row.text_share:.0f} %",
        )
    return table
