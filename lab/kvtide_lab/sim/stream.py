"""Plays a request over a link with the real planner, and what no planner can beat.

Time is counted, not measured. The link carries one fetch after the other without gaps, as several in flight make it; a
cancelled one stops at once. The engine computes one pass after the other and can be stopped between two layers. What
else takes time on a machine is in `Costs`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.plan import PrefillSpeed
from kvtide.plan.base import (
    Chunk,
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    cut,
    cut_for_meeting,
    expected_s,
    is_ready,
    leading_pass,
    mean_kl,
)
from kvtide.plan.policies import AnchorFirst, CachegenRule, Layered, TwoEnded
from kvtide.plan.speeds import HarmonicRate
from kvtide_lab.sim.curves import CURVES, Curve
from kvtide_lab.sim.links import Link


class Costs(NamedTuple):
    """Time besides that of the link's bytes and the engine's tokens; nothing unless it was measured.

    latency_s: until the first byte. decode_token_s: decoding a token of which one step is here, two, and so on: by the
    thread that computes, before it computes what is behind, and at the end.
    """

    latency_s: float = 0.0
    decode_token_s: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """One request's outcome: when the context was decoded, at which loss, how much was computed or sent in vain.

    kl: as the plan counts it. kept: by chunk, the last step that is there; the number of steps where it was computed.
    """

    ready_s: float
    kl: float
    computed_tokens: int
    wasted_bytes: int
    kept: tuple[int, ...] = ()


class _Flight(NamedTuple):
    fetch: Fetch
    start_s: float
    stop_s: float


class _Player:
    """One request: what is under way on the link and in the engine, and the moments at which something ends."""

    def __init__(self, policy: StreamPolicy, request: Request, link: Link, start_s: float, costs: Costs) -> None:
        self._policy = policy
        self._request = request
        self._link = link
        self._start_s = start_s
        self._estimator = HarmonicRate(1)
        self._costs = costs
        self.progress = Progress.start(request)
        self._queue: deque[Fetch] = deque()
        self._flight: _Flight | None = None
        self._given: deque[int] = deque()
        self._pass: tuple[int, ...] = ()
        self._engine_stop_s: float | None = None
        self._is_left = False
        # Chunks before this one are in the engine, decoded or computed.
        self._front = 0
        self.wasted_bytes = 0

    def run(self) -> Progress:
        """Play until the engine may start; decoding what it has not yet is to follow."""
        link_free_s = self._costs.latency_s
        self._replan()
        while not is_ready(self._request, self.progress):
            if not self._queue and self._flight is None:
                self._replan()
            if self._is_left and self._engine_stop_s is None and not self._given:
                self._compute_rest()
                break
            self._start_fetch(link_free_s)
            self._start_computing()
            if not self._step():
                break
        assert all(self.progress.is_usable(chunk) for chunk in range(len(self._request.chunks)))
        self._cancel(self.progress.now_s)
        return self.progress

    def _step(self) -> bool:
        """Go to the next moment at which something ends; False if nothing is under way."""
        link_s = self._flight.stop_s if self._flight else math.inf
        engine_s = self._engine_stop_s if self._engine_stop_s is not None else math.inf
        if link_s == engine_s == math.inf:
            return False
        deadline_s = self._request.deadline_s
        next_s = min(link_s, engine_s)
        if self.progress.now_s < deadline_s < next_s:
            self._advance(deadline_s)
            self._replan()
        elif link_s <= engine_s:
            self._arrive()
        else:
            self._compute_done()
        return True

    def _advance(self, now_s: float) -> None:
        if self.progress.now_s < self._request.deadline_s <= now_s:
            # What was planned for before the deadline is no longer wanted.
            self._queue.clear()
        self.progress = self.progress.at(now_s, self._estimator.bytes_per_s(), self._coming_s(now_s))

    def _coming_s(self, now_s: float) -> float | None:
        if self._flight is None:
            return None
        fetch, start_s, _ = self._flight
        size = self._request.chunks[fetch.chunk].sizes[fetch.step]
        came = self._link.carried(self._start_s + now_s) - self._link.carried(self._start_s + start_s)
        return expected_s(now_s, start_s, size, min(size, size - came), self._costs.latency_s)

    def _compute_rest(self) -> None:
        """Have the engine compute all that is not usable, in one pass."""
        rest = [chunk for chunk in range(len(self._request.chunks)) if not self.progress.is_usable(chunk)]
        seconds = self.decode_s(rest[0]) + sum(
            self._request.prefill.seconds(self._request.chunks[chunk].start, self._request.chunks[chunk].stop)
            for chunk in rest
        )
        self._cancel(self.progress.now_s)
        self._front = len(self._request.chunks)
        self.progress = self.progress.left_to_engine(rest).at(self.progress.now_s + seconds, None)

    def _replan(self) -> None:
        plan: Plan = self._policy.plan(self._request, self.progress)
        self._queue = deque(plan.fetches)
        self._is_left = plan.reason is Reason.LEFT
        if plan.computes:
            self.progress = self.progress.assigning(plan.computes)
            self._given.extend(plan.computes)
        if self._flight and self._is_useless(self._flight.fetch):
            self._cancel(self.progress.now_s)

    def _is_useless(self, fetch: Fetch) -> bool:
        is_late = self.progress.now_s >= self._request.deadline_s
        return fetch.chunk in self.progress.computed or (is_late and self.progress.is_usable(fetch.chunk))

    def _start_fetch(self, link_free_s: float) -> None:
        if self._flight is None and self._queue:
            fetch = self._queue.popleft()
            start_s = max(self.progress.now_s, link_free_s)
            size = self._request.chunks[fetch.chunk].sizes[fetch.step]
            stop_s = self._link.arrival_s(self._start_s + start_s, size) - self._start_s
            self._flight = _Flight(fetch, start_s, max(start_s, stop_s))
            self.progress = self.progress.asking(fetch)

    def _start_computing(self) -> None:
        if self._engine_stop_s is None and self._given and all(map(self.progress.is_usable, range(self._given[0]))):
            self._pass = leading_pass(self._request, self._given)
            for _ in self._pass:
                self._given.popleft()
            start, stop = self._request.chunks[self._pass[0]].start, self._request.chunks[self._pass[-1]].stop
            seconds = self.decode_s(self._pass[0]) + self._request.prefill.seconds(start, stop)
            self._front = max(self._front, self._pass[0])
            self._engine_stop_s = self.progress.now_s + seconds

    def decode_s(self, stop: int) -> float:
        """Return what it takes to decode the loaded chunks before `stop` that the engine does not have."""
        if not self._costs.decode_token_s:
            return 0.0
        return sum(
            self._request.chunks[chunk].tokens * self._costs.decode_token_s[self.progress.here[chunk] - 1]
            for chunk in range(self._front, stop)
            if self.progress.here[chunk] and chunk not in self.progress.computed
        )

    def _arrive(self) -> None:
        assert self._flight is not None
        fetch, start_s, stop_s = self._flight
        self._flight = None
        self._estimator.add(self._request.chunks[fetch.chunk].sizes[fetch.step], start_s, stop_s)
        self._advance(stop_s)
        self.progress = self.progress.arrived(fetch)

    def _compute_done(self) -> None:
        assert self._engine_stop_s is not None
        self._advance(self._engine_stop_s)
        self._engine_stop_s = None
        for chunk in self._pass:
            self.progress = self.progress.computing_done(chunk)
        self._front = max(self._front, self._pass[-1] + 1)
        self._replan()

    def _cancel(self, now_s: float) -> None:
        if self._flight:
            start_s = self._start_s + self._flight.start_s
            self.wasted_bytes += max(0, round(self._link.carried(self._start_s + now_s) - self._link.carried(start_s)))
            self._flight = None


def play(policy: StreamPolicy, request: Request, link: Link, start_s: float, costs: Costs | None = None) -> Outcome:
    """Play one request from `start_s` of the link on, until the engine starts."""
    player = _Player(policy, request, link, start_s, costs or Costs())
    progress = player.run()
    computed = sum(request.chunks[chunk].tokens for chunk in progress.computed)
    ready_s = progress.now_s + player.decode_s(len(request.chunks))
    kept = [request.steps if i in progress.computed else here - 1 for i, here in enumerate(progress.here)]
    return Outcome(ready_s, mean_kl(request, progress), computed, player.wasted_bytes, tuple(kept))


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
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.context_tokens, self.trials, self.kv_elements, self.block_tokens, self.chunk_tokens)
        if min(counts) < 1 or not self.context_tokens or not self.slo_s:
            raise ValueError(f"contexts, SLOs and trials must be given and positive, got {self}")
        if min(self.suffix_tokens, self.latency_s, self.kl_goal, self.decode_cores) < 0:
            raise ValueError(f"suffix, latency, KL goal and cores must not be negative, got {self}")
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


class FixedLevel:
    """The same level for every chunk."""

    def __init__(self, level: int) -> None:
        self._level = level

    def plan(self, request: Request, progress: Progress) -> Plan:
        """Ask for the next chunk."""
        chunk = next((chunk for chunk, asked in enumerate(progress.asked) if not asked), None)
        if chunk is None:
            return Plan((), (), Reason.COMPLETE)
        return Plan((Fetch(chunk, self._level),), (), Reason.LEVEL)


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
    order = np.array(CURVES[curve_name].order(-(-tokens // LAW_TOKENS), LAW_TOKENS))
    return order[:, 0], order[:, 1]


def sweep(setup: StreamSetup, links: Sequence[Link], policies: Sequence[str]) -> list[StreamRow]:
    """Play `setup.trials` requests of every kind with every policy and the oracle, all from the same moments of a link.

    ValueError for an unknown policy.
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
    played = [play(policy, request, link, at_s, costs) for at_s in starts]
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


# What kvtide is held against; all other policies are its own.
_RIVALS = ("fixed", "cachegen", "cachegen-tide")


class Standing(msgspec.Struct, frozen=True):
    """The best policy of kvtide over all rows: fewest misses, then least loss, each row's for the worse purpose.

    miss_over_oracle_max, miss_over_cachegen_max: the worst row. halved_share: of all rows, those with at most half of
    CacheGen's loss at no more misses. None where oracle's or CacheGen's rows are not there.
    """

    policy: str
    miss_over_oracle_max: float | None
    miss_over_cachegen_max: float | None
    halved_share: float | None


class StreamReport(msgspec.Struct, frozen=True):
    """All rows with what they rest on, besides the codecs' CURVES."""

    setup: StreamSetup
    standing: Standing | None
    rows: list[StreamRow]


def stream_report(setup: StreamSetup, rows: Sequence[StreamRow]) -> StreamReport:
    """Return what `kvtide-lab sim stream --json` prints."""
    return StreamReport(setup, _standing(rows), list(rows))


def _standing(rows: Sequence[StreamRow]) -> Standing | None:
    names = [name for name in dict.fromkeys(row.policy for row in rows) if name not in (*_RIVALS, ORACLE)]
    if not names:
        return None
    totals = {
        name: (
            sum(row.miss_rate for row in rows if row.policy == name),
            sum(_kl(row) for row in rows if row.policy == name),
        )
        for name in names
    }
    best = min(names, key=lambda name: totals[name])
    ours = [row for row in rows if row.policy == best]
    bounds, rivals = ([row for row in rows if row.policy == name] for name in (ORACLE, "cachegen"))
    if not rivals:
        return Standing(best, _worst(ours, bounds), None, None)
    halved = [
        _kl(own) <= _kl(rival) / 2 and own.miss_rate <= rival.miss_rate for own, rival in zip(ours, rivals, strict=True)
    ]
    return Standing(best, _worst(ours, bounds), _worst(ours, rivals), sum(halved) / len(halved))


def _kl(row: StreamRow) -> float:
    return max(row.kl_mean, row.kl_copy_mean)


def _worst(ours: Sequence[StreamRow], others: Sequence[StreamRow]) -> float:
    return max(own.miss_rate - other.miss_rate for own, other in zip(ours, others, strict=True))
