"""Every policy on every link, context and SLO, and beside them the oracle: what no planner can beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from kvtide.plan import Chunk, PrefillSpeed, Request, StreamPolicy, TwoEnded, cut, cut_for_meeting
from kvtide.plan.bandwidth import estimator_named
from kvtide.plan.layered import AnchorFirst, Layered
from kvtide.plan.levels import CachegenRule, FixedLevel
from kvtide_lab.sim.curves import CURVES, Curve
from kvtide_lab.sim.links import Link
from kvtide_lab.sim.stream import Costs, Outcome, play

ORACLE = "oracle"


class StreamSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The requests and the model. Defaults: 8 billion parameters, 128 KiB of KV in 16 bits for each token.

    kv_elements: of a token, 32 layers x 2 x 8 heads x 128. prefill_tokens_per_s: about 80 TFLOP/s of such a model, a
    card that is shared or of the middle class. prefill_double_at: where attention (0.52 MFLOP for each token before)
    costs as much as the weights (16 GFLOP). suffix_tokens: the question after the context, computed once the context
    is there; its seconds are part of TTFT and come off the deadline. ValueError for what is not positive.
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
    latency_s: float = 0.01
    kl_goal: float = 0.0
    estimator: str = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.context_tokens, self.trials, self.kv_elements, self.block_tokens, self.chunk_tokens)
        if min(counts) < 1 or not self.context_tokens or not self.slo_s:
            raise ValueError(f"contexts, SLOs and trials must be given and positive, got {self}")
        if min(self.suffix_tokens, self.latency_s, self.kl_goal) < 0:
            raise ValueError(f"suffix, latency and KL goal must not be negative, got {self}")
        estimator_named(self.estimator)
        for tokens in self.context_tokens:
            if min(self.slo_s) <= self.suffix_s(tokens) + self.latency_s:
                raise ValueError(f"an SLO of {min(self.slo_s)} s is over before {tokens} tokens can be asked for")

    @property
    def prefill(self) -> PrefillSpeed:
        """Return the engine's speed."""
        return PrefillSpeed(self.prefill_tokens_per_s, self.prefill_double_at)

    def suffix_s(self, context_tokens: int) -> float:
        """Return what the question takes after a context."""
        return self.prefill.seconds(context_tokens, context_tokens + self.suffix_tokens)


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
    """One policy on one link. text_share: of the tokens, those recomputed. kl_mean: over all requests, misses too."""

    link: str
    context_tokens: int
    slo_s: float
    policy: str
    miss_rate: float
    kl_mean: float
    ttft_p50_s: float
    ttft_p95_s: float
    text_share: float
    wasted_share: float


def build_request(setup: StreamSetup, case: StreamCase, context_tokens: int, deadline_s: float) -> Request:
    """Return what a case asks for: sizes and losses of every chunk from its codec's curve."""
    if case.meets_engine:
        spans = cut_for_meeting(context_tokens, setup.block_tokens, setup.prefill, deadline_s, setup.chunk_tokens)
    else:
        spans = cut(context_tokens, setup.chunk_tokens)
    chunks = []
    for start, stop in spans:
        elements = (stop - start) * setup.kv_elements
        sizes = tuple(max(1, round(bits * elements / 8)) for bits in case.curve.bits)
        chunks.append(Chunk(start, stop, sizes, case.curve.kl))
    return Request(tuple(chunks), case.curve.is_layered, setup.prefill, deadline_s, setup.kl_goal)


def oracle(
    setup: StreamSetup, curve: Curve, context_tokens: int, deadline_s: float, link: Link, at_s: float
) -> Outcome:
    """Return the best that blocks of a layered codec allow who knows the link's future.

    Fewest misses first: as many whole blocks as can be are computed by the deadline, the bases of the rest sent. Then
    the least loss: what the link still carries goes into refinements, cut at any byte. If it is a miss, both ends meet
    as early as they can.
    """
    prefill = setup.prefill
    all_s = prefill.seconds(0, context_tokens)
    base_bytes = curve.bits[0] * setup.kv_elements / 8

    def carried(ready_s: float) -> float:
        return link.carried(at_s + ready_s) - link.carried(at_s + min(ready_s, setup.latency_s))

    def missing_tokens(ready_s: float) -> int:
        if ready_s >= all_s:
            return 0
        return context_tokens - int(prefill.reach(0, ready_s)) // setup.block_tokens * setup.block_tokens

    if all_s <= deadline_s:
        return Outcome(all_s, 0.0, context_tokens, 0)
    early_s, late_s = deadline_s, all_s
    is_miss = missing_tokens(deadline_s) * base_bytes > carried(deadline_s)
    while is_miss and late_s - early_s > 1e-4:
        middle_s = (early_s + late_s) / 2
        if missing_tokens(middle_s) * base_bytes > carried(middle_s):
            early_s = middle_s
        else:
            late_s = middle_s
    ready_s = late_s if is_miss else deadline_s
    loaded = missing_tokens(ready_s)
    left_bytes, loss = carried(ready_s) - loaded * base_bytes, curve.kl[0]
    for step in range(1, len(curve.bits)):
        step_bytes = loaded * curve.bits[step] * setup.kv_elements / 8
        share = 0.0 if is_miss else min(1.0, max(0.0, left_bytes) / step_bytes)
        loss -= share * (curve.kl[step - 1] - curve.kl[step])
        left_bytes -= share * step_bytes
    return Outcome(ready_s, loss * loaded / context_tokens, context_tokens - loaded, 0)


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
) -> list[Outcome]:
    if name == ORACLE:
        return [oracle(setup, CURVES["tide"], tokens, deadline_s, link, at_s) for at_s in starts]
    case = STREAM_POLICIES[name]
    request = build_request(setup, case, tokens, deadline_s)
    policy = case.policy(request)
    costs = Costs(setup.latency_s)
    return [play(policy, request, link, at_s, estimator_named(setup.estimator), costs) for at_s in starts]


def _row(
    setup: StreamSetup, link: Link, tokens: int, slo_s: float, name: str, outcomes: Sequence[Outcome]
) -> StreamRow:
    ttft = np.array([each.ready_s for each in outcomes]) + setup.suffix_s(tokens)
    raw_bytes = 2 * setup.kv_elements * tokens
    return StreamRow(
        link=link.name,
        context_tokens=tokens,
        slo_s=slo_s,
        policy=name,
        # Who starts at the deadline is in time, however sums round.
        miss_rate=float(np.mean(ttft > slo_s + 1e-9)),
        kl_mean=float(np.mean([each.kl for each in outcomes])),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        text_share=float(np.mean([each.computed_tokens for each in outcomes])) / tokens,
        wasted_share=float(np.mean([each.wasted_bytes for each in outcomes])) / raw_bytes,
    )
