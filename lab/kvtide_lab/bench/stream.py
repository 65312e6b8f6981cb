"""Streaming for real: a server behind a link of any shape, a model that computes meanwhile, blocks that are decoded.

Every row stands beside what the simulator says of the same requests from the same moments of the same link, on a
machine as fast as this one was just before and after each of them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.published import CachegenCodec
from kvtide.codec.published.cachegen import LEVEL_QUALITY
from kvtide.codec.tide import TideCodec
from kvtide.plan import PASS_TOKENS, LinkEstimate, StreamPolicy, TwoEnded, cut
from kvtide.plan.bandwidth import Estimator, HarmonicRate, LastRate
from kvtide.plan.layered import Layered
from kvtide.plan.levels import CachegenRule, FixedLevel
from kvtide.store.load.job import FetchJob, LoadRequest, layered_job, level_job
from kvtide_lab.bench.services import started
from kvtide_lab.bench.shaped import LATE_S, ShapedProxy
from kvtide_lab.bench.stream_exact import ExactTimes, exact_times
from kvtide_lab.bench.stream_rig import SUFFIX_TOKENS, Rig, Speeds
from kvtide_lab.sim.links import Link
from kvtide_lab.sim.stream import play

BLOCK_TOKENS = 64
# Levels 4 to 1.
LEVEL_KL = tuple(LEVEL_QUALITY[level] for level in (4, 3, 2, 1))
# A base of about half a bit, and three refinements to where the curve flattens.
TIDE_QUALITY, TIDE_REFINEMENTS = 0.00038, 3
# A prediction of misses or quality holds if it is so near.
_NEAR = 0.15
# What follows the last byte may take so much longer than measured.
_TAIL_RESERVE = 1.25
# By so much of the SLO a first token may be late: the noise of a machine with other work.
_LATE = 0.1


class StreamSize(NamedTuple):
    """The amount of measuring. repeats: in the mean. slo_share: the SLO, as a share of recomputing all."""

    context_tokens: int
    repeats: int
    slo_share: float = 0.5


FULL = StreamSize(context_tokens=1024, repeats=8)
QUICK = StreamSize(context_tokens=256, repeats=1)


class StreamBenchRow(msgspec.Struct, frozen=True):
    """One policy on one link, and what the simulator says of it.

    slo_s: the mean; each play has one of its own, by the machine's speed then. The differences are those of measured
    and predicted: of misses in shares of the plays, else relative to the prediction. is_predicted: misses and KL are
    near.
    """

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
    predicted_text_share: float
    miss_difference: float
    kl_difference: float
    ttft_difference: float
    is_predicted: bool


class StreamBench(msgspec.Struct, frozen=True):
    """All rows; then TTFT of exact blocks as soon as can be on the constant link, and where loading loses.

    break_even_ratio: TTFT over recomputing's, by a loader that knows its link to be far too slow; `_unknown`: by one
    that does not. The CPU seconds, proxy and fetching included, likewise.
    """

    context_tokens: int
    prefill_tokens_per_s: float
    rows: list[StreamBenchRow]
    rows_predicted: int
    all_predicted: bool
    ttft_two_ended_s: float
    ttft_load_s: float
    ttft_recompute_s: float
    two_ended_beats_both: bool
    break_even_ratio: float
    break_even_ratio_unknown: float
    break_even_cpu_ratio: float
    break_even_cpu_ratio_unknown: float


class _Case(NamedTuple):
    name: str
    policy: StreamPolicy
    job: FetchJob
    estimator: Callable[[], Estimator]
    decode_token_s: tuple[float, ...]


class Pair(NamedTuple):
    """One play, measured and predicted."""

    slo_s: float
    ttft_s: float
    kl: float
    text_share: float
    predicted_ttft_s: float
    predicted_kl: float
    predicted_text_share: float


def run(
    model: Any,
    ids: Sequence[int],
    layout: BlockLayout,
    profiles: Sequence[Profile],
    links: Sequence[Link],
    size: StreamSize,
    progress: Callable[[str, int, int], None],
) -> StreamBench:
    """Play every policy over every link. `links` end with the constant one.

    profiles: with one of cachegen and one of tide-layer, both for this layout. ValueError without, and for too few ids.
    """
    if not {"cachegen", "tide-layer"} <= {profile.kind for profile in profiles if profile.fits(layout)}:
        raise ValueError(f"profiles of cachegen and tide-layer must fit the model, got {[p.kind for p in profiles]}")
    wanted = size.context_tokens + SUFFIX_TOKENS
    if len(ids) < wanted:
        raise ValueError(f"a context and its question need {wanted} tokens, got {len(ids)}")
    with _server() as port, ShapedProxy(("127.0.0.1", port), lambda seconds: 1e9 * seconds) as proxy:
        rig = Rig(model, ids[:wanted], layout, profiles, port, proxy)
        speeds = rig.speeds()
        cases = _cases(rig, profiles, speeds)
        costs = speeds.costs._replace(latency_s=rig.latency_s(cases[0].job.objects[0]))
        speeds = speeds._replace(costs=costs)
        ours_bytes_per_s = rig.link_bytes_per_s(cases[0].job)
        behind = {link.name: link.behind(ours_bytes_per_s, LATE_S) for link in links}
        pairs: dict[tuple[str, str], list[Pair]] = {}
        turns = {link.name: _turns(link, links, size.repeats) for link in links}
        total = sum(turns.values()) * len(cases)
        probed_s = rig.probe_s()
        # Policies take turns, so that a slow minute of the machine hits them all.
        for turn in range(max(turns.values())):
            for link in (link for link in links if turn < turns[link.name]):
                at_s = turn * link.cycle_s / turns[link.name] if _is_varying(link, links) else 0.0
                for case in cases:
                    progress("plays", sum(map(len, pairs.values())), total)
                    pair, probed_s = _play(rig, link, behind[link.name], at_s, case, speeds, size.slo_share, probed_s)
                    pairs.setdefault((link.name, case.name), []).append(pair)
        progress("plays", total, total)
        exact = exact_times(rig, links[-1], speeds.prefill, max(3, size.repeats) if size.repeats > 1 else 1)
        rig.close()
    return _result(size, speeds, [row_of(*names, played) for names, played in pairs.items()], exact)


def _is_varying(link: Link, links: Sequence[Link]) -> bool:
    """Tell whether a link is played from moment after moment: not the step, which is at the start, nor the last."""
    return link in links[1:-1]


def _turns(link: Link, links: Sequence[Link], repeats: int) -> int:
    """Return how often a link is played: each moment of a varying one is another case, with a quality of its own."""
    return max(1, (3 * repeats if _is_varying(link, links) else repeats) // 2)


@contextmanager
def _server() -> Iterator[int]:
    words = [sys.executable, "-m", "kvtide.cli", "serve", "--tier", "memory://", "--listen"]
    with started(lambda port, folder: [*words, f"127.0.0.1:{port}"]) as service:
        yield service.port


def _cases(rig: Rig, profiles: Sequence[Profile], speeds: Speeds) -> list[_Case]:
    by_kind = {profile.kind: profile for profile in profiles}
    codecs = [CachegenCodec(level, 0, by_kind["cachegen"]) for level in (4, 3, 2, 1)]
    tide = TideCodec(by_kind["tide-layer"], TIDE_QUALITY, TIDE_REFINEMENTS)
    # The deadline is each play's own.
    wish = LoadRequest(speeds.prefill, 0.0)
    levels = [rig.store(f"level {number}", codec) for number, codec in enumerate(codecs)]
    by_level = level_job(levels, cut(rig.tokens, 4 * rig.layout.tokens), LEVEL_KL, wish)
    by_layer = layered_job(rig.store("tide", tide), cut(rig.tokens, rig.layout.tokens), tide.losses, wish)
    # Of a level all is decoded, of tide what is there.
    levels_s = tuple(rig.decode_token_s(codec, [99])[0] for codec in codecs)
    layers_s = rig.decode_token_s(tide, range(TIDE_REFINEMENTS + 1))
    return [
        _Case("fixed", FixedLevel(1), by_level, HarmonicRate, levels_s),
        _Case("cachegen", CachegenRule(), by_level, LastRate, levels_s),
        _Case("layered", Layered(), by_layer, HarmonicRate, layers_s),
        _Case("two-ended", TwoEnded(), by_layer, HarmonicRate, layers_s),
    ]


def _play(
    rig: Rig,
    link: Link,
    real_link: Link,
    at_s: float,
    case: _Case,
    measured: Speeds,
    slo_share: float,
    before_s: float,
) -> tuple[Pair, float]:
    """Play once, and predict it; return the engine's probe after it too, `before_s` being the one before it."""
    measured = measured._replace(costs=measured.costs._replace(decode_token_s=case.decode_token_s))
    usual_s = measured.prefill.seconds(0, min(PASS_TOKENS, rig.tokens))
    speeds = measured.slowed(before_s / usual_s)
    slo_s = slo_share * speeds.prefill.seconds(0, rig.tokens)
    job = case.job.asked(speeds.prefill, max(0.0, slo_s - _TAIL_RESERVE * speeds.tail_s(rig.tokens)))
    sent = link.carried(at_s)
    played = rig.play(
        job, case.policy, LinkEstimate(case.estimator()), lambda seconds: link.carried(at_s + seconds) - sent
    )
    # The plan went by what was known before it, in the prediction too; what the machine then took is of both sides.
    after_s = rig.probe_s()
    factor = (before_s + after_s) / 2 / before_s
    speeds = speeds.slowed(factor)
    costs = speeds.costs._replace(engine_factor=factor)
    predicted = play(case.policy, job.request, real_link, at_s, case.estimator(), costs)
    pair = Pair(
        slo_s,
        played.ttft_s,
        played.report.kl,
        played.text_share(job),
        predicted.ready_s + speeds.question_s,
        predicted.kl,
        predicted.computed_tokens / rig.tokens,
    )
    return pair, after_s


def row_of(link: str, policy: str, pairs: Sequence[Pair]) -> StreamBenchRow:
    """Return what many plays say together, and whether they were predicted."""
    misses = statistics.fmean(each.ttft_s > (1 + _LATE) * each.slo_s for each in pairs)
    expected = statistics.fmean(each.predicted_ttft_s > (1 + _LATE) * each.slo_s for each in pairs)
    kl, kl_expected = (
        statistics.fmean(column) for column in zip(*((p.kl, p.predicted_kl) for p in pairs), strict=True)
    )
    ttft, ttft_expected = (
        statistics.median(column) for column in zip(*((p.ttft_s, p.predicted_ttft_s) for p in pairs), strict=True)
    )
    kl_difference = _difference(kl, kl_expected)
    return StreamBenchRow(
        link=link,
        policy=policy,
        slo_s=statistics.fmean(each.slo_s for each in pairs),
        miss_rate=misses,
        kl_mean=kl,
        ttft_p50_s=ttft,
        text_share=statistics.fmean(each.text_share for each in pairs),
        predicted_miss_rate=expected,
        predicted_kl_mean=kl_expected,
        predicted_ttft_p50_s=ttft_expected,
        predicted_text_share=statistics.fmean(each.predicted_text_share for each in pairs),
        miss_difference=abs(misses - expected),
        kl_difference=kl_difference,
        ttft_difference=_difference(ttft, ttft_expected),
        is_predicted=abs(misses - expected) <= _NEAR and kl_difference <= _NEAR,
    )


def _difference(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    return abs(found - expected) / expected if expected else 1.0


def _result(size: StreamSize, speeds: Speeds, rows: list[StreamBenchRow], exact: ExactTimes) -> StreamBench:
    return StreamBench(
        context_tokens=size.context_tokens,
        prefill_tokens_per_s=speeds.prefill.tokens_per_s,
        rows=rows,
        rows_predicted=sum(row.is_predicted for row in rows),
        all_predicted=all(row.is_predicted for row in rows),
        ttft_two_ended_s=exact.two_ended_s,
        ttft_load_s=exact.load_s,
        ttft_recompute_s=exact.recompute_s,
        two_ended_beats_both=exact.two_ended_s < min(exact.load_s, exact.recompute_s),
        break_even_ratio=exact.break_even_ratio,
        break_even_ratio_unknown=exact.break_even_ratio_unknown,
        break_even_cpu_ratio=exact.break_even_cpu_ratio,
        break_even_cpu_ratio_unknown=exact.break_even_cpu_ratio_unknown,
    )


def render(result: StreamBench) -> Table:
    """Return the rows as a table."""
    caption = (
        f"{result.rows_predicted} of {len(result.rows)} rows as predicted; exact blocks on the last link: both "
        f"ends {result.ttft_two_ended_s:.2f} s, loading {result.ttft_load_s:.2f} s, recomputing "
        f"{result.ttft_recompute_s:.2f} s; on a far too slow link {result.break_even_ratio:.3f} of recomputing, "
        f"{result.break_even_ratio_unknown:.3f} if nobody knows that "
        f"(CPU {result.break_even_cpu_ratio:.3f}, {result.break_even_cpu_ratio_unknown:.3f})"
    )
    title = f"{result.context_tokens} tokens, prefill {result.prefill_tokens_per_s:.0f} tokens/s; measured / simulated"
    table = Table(title=title, caption=caption)
    for column in ("link", "policy", "SLO", "misses", "KL", "TTFT p50", "recomputed", "as predicted"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("link", "policy") else "right")
    for row in result.rows:
        table.add_row(
            row.link,
            row.policy,
            f"{row.slo_s:.2f} s",
            f"{100 * row.miss_rate:.0f} / {100 * row.predicted_miss_rate:.0f} %",
            f"{row.kl_mean:.2g} / {row.predicted_kl_mean:.2g}",
            f"{row.ttft_p50_s:.2f} / {row.predicted_ttft_p50_s:.2f} s",
            f"{100 * row.text_share:.0f} / {100 * row.predicted_text_share:.0f} %",
            "yes" if row.is_predicted else "no",
        )
    return table
