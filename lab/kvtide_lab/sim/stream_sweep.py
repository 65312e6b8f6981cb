"""Every policy on every link, context and SLO, and beside them the oracle: what no planner can beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.plan import PrefillSpeed
from kvtide.plan.base import Chunk, Request, StreamPolicy, cut, cut_for_meeting
from kvtide.plan.policies import AnchorFirst, CachegenRule, FixedLevel, Layered, TwoEnded
from kvtide.plan.speeds import estimator_named
from kvtide_lab.sim.curves import CURVES, Curve
from kvtide_lab.sim.links import Link
from kvtide_lab.sim.stream import Costs, Outcome, play

ORACLE = "oracle"
# What the loss law tells apart.
LAW_TOKENS = 64


class StreamSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and their engine. The defaults are a model of 8 billion parameters: 128 KiB of KV in 16 bits a token.

    kv_elements: of a token, 32 layers x 2 x 8 heads x 128. prefill_tokens_per_s: about 80 TFLOP/s of such a model, a
    card that is shared or of the middle class. prefill_double_at: where attention (0.52 MFLOP for each token before)
    costs as much as the weights (16 GFLOP). suffix_tokens: the question behind the context, computed once the context
    is there; its seconds are part of TTFT and come off the deadline. decode_cores: those that decode; with 0 it takes
    no time. ValueError for what is not positive.
    """

    context_tokens: tuple[int, ...] = (9600, 32_000)
    slo_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    trials: int = 200
    kv_elements: int = 65_536
    prefill_tokens_per_s: float = 5000.0
    prefill_double_at: float = 30_600.0
    suffix_tokens: int = 64
    block_tokens: int = 256
    chunk_tokens: int = 1536
    decode_cores: int = 32
    latency_s: float = 0.01
    kl_goal: float = 0.0
    estimator: str = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.context_tokens, self.trials, self.kv_elements, self.block_tokens, self.chunk_tokens)
        if min(counts) < 1 or not self.context_tokens or not self.slo_s:
            raise ValueError(f"contexts, SLOs and trials must be given and positive, got {self}")
        if min(self.suffix_tokens, self.latency_s, self.kl_goal, self.decode_cores) < 0:
            raise ValueError(f"suffix, latency, KL goal and cores must not be negative, got {self}")
        estimator_named(self.estimator)
        for tokens in self.context_tokens:
            if min(self.slo_s) <= self.suffix_s(tokens) + self.latency_s:
                raise ValueError(f"an SLO of {min(self.slo_s)} s is over before {tokens} tokens can be asked for")

    @property
    def prefill(self) -> PrefillSpeed:
        """Return the engine's speed."""
        return PrefillSpeed(self.prefill_tokens_per_s, self.prefill_double_at)

    def suffix_s(self, context_tokens: int) -> float:
        """Return what the question takes behind a context."""
        return self.prefill.seconds(context_tokens, context_tokens + self.suffix_tokens)

    def costs(self, curve: Curve) -> Costs:
        """Return what takes time besides bytes and prefill."""
        if not self.decode_cores:
            return Costs(self.latency_s)
        elements_per_s = [1e9 * self.decode_cores * rate for rate in curve.decode]
        return Costs(self.latency_s, tuple(self.kv_elements / rate for rate in elements_per_s))


class StreamCase(NamedTuple):
    """A policy, and the codec whose sections or levels it chooses from."""

    curve: Curve
    policy: Callable[[Request], StreamPolicy]
    meets_engine: bool = False


STREAM_POLICIES: Mapping[str, StreamCase] = MappingProxyType(
    {
        "fixed": StreamCase(CURVES["cachegen"], lambda request: FixedLevel(1)),
        "cachegen": StreamCase(CURVES["cachegen"], lambda request: CachegenRule()),
        "cachegen-tide": StreamCase(CURVES["tide-levels"], lambda request: CachegenRule()),
        "anchor-first": StreamCase(CURVES["cachegen-apart"], lambda request: AnchorFirst()),
        "layered": StreamCase(CURVES["tide"], lambda request: Layered()),
        "two-ended": StreamCase(CURVES["tide"], lambda request: TwoEnded(), meets_engine=True),
    }
)


class StreamRow(msgspec.Struct, frozen=True):
    """One policy on one link.

    text_share: of the tokens, those recomputed. kl_mean, kl_copy_mean: what the loss law says of what came, for text
    that goes on and for answers that copy, over all requests, misses too.
    """

    link: str
    context_tokens: int
    slo_s: float
    policy: str
    miss_rate: float
    kl_mean: float
    kl_copy_mean: float
    ttft_p50_s: float
    ttft_p95_s: float
    text_share: float
    wasted_share: float


@lru_cache(maxsize=16)
def _lost(curve_name: str, tokens: int) -> NDArray[np.float64]:
    """Return what each LAW_TOKENS add to the loss for each purpose and step; the last step is computing."""
    curve = CURVES[curve_name]
    lost = curve.law().lost(-(-tokens // LAW_TOKENS), LAW_TOKENS)
    return np.concatenate([lost, np.zeros_like(lost[:, :, :1])], axis=2)


def losses(curve: Curve, tokens: int, kept: Sequence[int]) -> tuple[float, float]:
    """Return what the law says by purpose. kept: steps of each LAW_TOKENS, the number of steps where computed."""
    goes_on, copies = _lost(curve.name, tokens)[:, np.arange(len(kept)), np.array(kept)].sum(axis=1).tolist()
    return goes_on, copies


def build_request(setup: StreamSetup, case: StreamCase, context_tokens: int, deadline_s: float) -> Request:
    """Return what a case asks for: sizes of every chunk from its codec's curve, losses by the law."""
    if case.meets_engine:
        spans = cut_for_meeting(context_tokens, setup.block_tokens, setup.prefill, deadline_s, setup.chunk_tokens)
    else:
        spans = cut(context_tokens, setup.chunk_tokens)
    if case.curve.is_layered:
        # The first block and the newest ones are worth most.
        start, stop = spans.pop()
        spans += [(start + a, start + b) for a, b in cut(stop - start, setup.block_tokens)]
        if spans[0][1] > setup.block_tokens:
            spans[:1] = [(0, setup.block_tokens), (setup.block_tokens, spans[0][1])]
    lost, chunks = _lost(case.curve.name, context_tokens)[:, :, :-1], []
    for start, stop in spans:
        elements = (stop - start) * setup.kv_elements
        sizes = tuple(max(1, round(bits * elements / 8)) for bits in case.curve.bits)
        worse = lost[:, start // LAW_TOKENS : -(-stop // LAW_TOKENS)].sum(axis=1).max(axis=0)
        chunks.append(Chunk(start, stop, sizes, tuple((worse * context_tokens / (stop - start)).tolist())))
    return Request(tuple(chunks), case.curve.is_layered, setup.prefill, deadline_s, setup.kl_goal)


def oracle(
    setup: StreamSetup, curve: Curve, context_tokens: int, deadline_s: float, link: Link, at_s: float
) -> Outcome:
    """Return what blocks of a layered codec allow who knows the link's future and decodes for nothing.

    Fewest misses first: as many whole blocks as can be are computed by the deadline, the bases of the rest sent. Then
    what the link still carries goes into refinements in the law's order. If it is a miss, both ends meet as early as
    they can. `kept` is by LAW_TOKENS.
    """
    prefill = setup.prefill
    all_s = prefill.seconds(0, context_tokens)
    bytes_of_bits = setup.kv_elements / 8
    base_bytes = curve.bits[0] * bytes_of_bits

    def carried(ready_s: float) -> float:
        return link.carried(at_s + ready_s) - link.carried(at_s + min(ready_s, setup.latency_s))

    def missing_tokens(ready_s: float) -> int:
        if ready_s >= all_s:
            return 0
        return context_tokens - int(prefill.reach(0, ready_s)) // setup.block_tokens * setup.block_tokens

    early_s, late_s = deadline_s, all_s
    is_miss = all_s > deadline_s and missing_tokens(deadline_s) * base_bytes > carried(deadline_s)
    while is_miss and late_s - early_s > 1e-4:
        middle_s = (early_s + late_s) / 2
        if missing_tokens(middle_s) * base_bytes > carried(middle_s):
            early_s = middle_s
        else:
            late_s = middle_s
    ready_s = late_s if is_miss else min(all_s, deadline_s)
    loaded = missing_tokens(ready_s)
    blocks, steps = _order(curve.name, context_tokens)
    is_loaded = blocks * LAW_TOKENS >= context_tokens - loaded
    sizes = LAW_TOKENS * bytes_of_bits * np.array(curve.bits)[steps]
    spent = np.cumsum(np.where(is_loaded, sizes, 0.0))
    is_sent = is_loaded & ((steps == 0) | (spent <= (0 if is_miss else carried(ready_s))))
    kept = np.bincount(blocks, weights=is_sent, minlength=-(-context_tokens // LAW_TOKENS)).astype(int) - 1
    kept[kept < 0] = len(curve.bits)
    kl = max(losses(curve, context_tokens, kept.tolist()))
    return Outcome(ready_s, kl, context_tokens - loaded, 0, tuple(kept.tolist()))


@lru_cache(maxsize=16)
def _order(curve_name: str, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the law's order in which to send a context: of each LAW_TOKENS, and the step."""
    order = np.array(CURVES[curve_name].law().order(-(-tokens // LAW_TOKENS), LAW_TOKENS))
    return order[:, 0], order[:, 1]


def sweep(
    setup: StreamSetup,
    links: Sequence[Link],
    policies: Sequence[str],
    note: Callable[[StreamRow], None] | None = None,
) -> list[StreamRow]:
    """Play `setup.trials` requests of every kind with every policy and the oracle, all from the same moments of a link.

    `note` hears of each row as it is done. ValueError for an unknown policy.
    """
    unknown = [name for name in policies if name not in STREAM_POLICIES]
    if unknown:
        raise ValueError(f"unknown policy {unknown[0]!r}, expected all or some of {', '.join(STREAM_POLICIES)}")
    rows = []
    for link in links:
        starts = np.random.default_rng(setup.seed).uniform(0, link.cycle_s, setup.trials).tolist()
        for tokens in setup.context_tokens:
            for slo_s in setup.slo_s:
                deadline_s = slo_s - setup.suffix_s(tokens)
                for name in (*policies, ORACLE):
                    outcomes = _outcomes(setup, name, tokens, deadline_s, link, starts)
                    rows.append(_row(setup, link, tokens, slo_s, name, outcomes))
                    if note is not None:
                        note(rows[-1])
    return rows


def _outcomes(
    setup: StreamSetup, name: str, tokens: int, deadline_s: float, link: Link, starts: Sequence[float]
) -> list[tuple[Outcome, tuple[float, float]]]:
    if name == ORACLE:
        curve = CURVES["tide"]
        bounds = [oracle(setup, curve, tokens, deadline_s, link, at_s) for at_s in starts]
        return [(each, losses(curve, tokens, each.kept)) for each in bounds]
    case = STREAM_POLICIES[name]
    costs = setup.costs(case.curve)
    # As a load does: what decoding all of it takes comes off the deadline.
    decode_s = tokens * max(costs.decode_token_s, default=0.0)
    request = build_request(setup, case, tokens, max(0.0, deadline_s - decode_s))
    policy = case.policy(request)
    played = [play(policy, request, link, at_s, estimator_named(setup.estimator), costs) for at_s in starts]
    counts = [-(-chunk.stop // LAW_TOKENS) - chunk.start // LAW_TOKENS for chunk in request.chunks]
    kept = [[step for step, count in zip(each.kept, counts, strict=True) for _ in range(count)] for each in played]
    return [(each, losses(case.curve, tokens, by_token)) for each, by_token in zip(played, kept, strict=True)]


def _row(
    setup: StreamSetup,
    link: Link,
    tokens: int,
    slo_s: float,
    name: str,
    found: Sequence[tuple[Outcome, tuple[float, float]]],
) -> StreamRow:
    outcomes, kls = zip(*found, strict=True)
    ttft = np.array([each.ready_s for each in outcomes]) + setup.suffix_s(tokens)
    raw_bytes = 2 * setup.kv_elements * tokens
    return StreamRow(
        link=link.name,
        context_tokens=tokens,
        slo_s=slo_s,
        policy=name,
        # Who starts at the deadline is in time, however sums round.
        miss_rate=float(np.mean(ttft > slo_s + 1e-9)),
        kl_mean=float(np.mean(kls, axis=0)[0]),
        kl_copy_mean=float(np.mean(kls, axis=0)[1]),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        text_share=float(np.mean([each.computed_tokens for each in outcomes])) / tokens,
        wasted_share=float(np.mean([each.wasted_bytes for each in outcomes])) / raw_bytes,
    )
