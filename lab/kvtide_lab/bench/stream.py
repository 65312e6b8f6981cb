"""Streaming as a user has it: `attach` over shaped links, judged by what the model says on the cache that came of it.

Every policy stands beside plain recomputing and beside the paper's system, on texts that no profile was calibrated on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple, Self

import msgspec
import torch
from transformers import DynamicCache

from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry, Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import Purpose
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.engines.transformers.generation import FirstToken
from kvtide.plan.base import StreamPolicy
from kvtide.plan.policies import POLICIES, AnchorFirst, is_by_level, policy_named
from kvtide.store.load.streamed import StreamedReport
from kvtide_lab.bench.position import passages_of
from kvtide_lab.bench.services import server_behind
from kvtide_lab.bench.shaped import as_fast_as_the_machine
from kvtide_lab.judge.law import CURVE_OVER_MEAN, LossLaw
from kvtide_lab.judge.position_judge import PositionJudge
from kvtide_lab.measuring import Show
from kvtide_lab.sim.links import Link

# Tokens of the question behind the context; its prefill is part of the time to the first token.
QUESTION_TOKENS = 16
# What is stored in the background must be there before the next play.
_STORE_S_MAX = 120.0


class StreamSize(NamedTuple):
    """The amount that is measured. slo_share: the deadline of the first token, as a share of recomputing all."""

    context_tokens: int
    block_tokens: int
    answer_tokens: int
    texts: int
    slo_share: float = 0.5

    @property
    def tokens(self) -> int:
        """Return the length of a text."""
        return self.context_tokens + self.answer_tokens + 1


class StreamDoor(NamedTuple):
    """A way to load: the codec of what is stored, and what `attach` is told. is_timed: it is told when to start."""

    name: str
    codec: str
    policy: str | None = None
    quality: float | None = None
    is_timed: bool = False


class Played(NamedTuple):
    """One first token: seconds to it, and the cache that it was answered from.

    kl_model, kl_copy: the model's own on that cache, for text that goes on and for answers that copy. kl_law: what the
    loss law expects of it, None for a codec without one. link_bytes: those that passed the link. share_computed:
    of the context's tokens.
    """

    ttft_s: float
    kl_model: float
    kl_copy: float
    kl_law: float | None
    link_bytes: int
    share_computed: float


class StreamWorld:
    """A model, a server with its contexts, and a link between them. Use it with `with`."""

    def __init__(self, model: Any, texts: Sequence[Sequence[int]], size: StreamSize, profiles: Sequence[Profile]):
        """texts: as ids; one more than are played, for `warm`. ValueError for too few that are long enough."""
        found = [list(ids[: size.tokens]) for ids in texts if len(ids) >= size.tokens][: size.texts + 1]
        if len(found) <= size.texts:
            raise ValueError(f"expected {size.texts + 1} texts of {size.tokens} tokens, got {len(found)}")
        self.size = size
        self._model, self._profiles = model, profiles
        self._layout = model_layout(model, size.block_tokens)
        tokens, answer = size.context_tokens, size.answer_tokens
        self._judges = [PositionJudge(model, self._layout, ids, tokens, answer) for ids in found[:-1]]
        self._prompts = [torch.tensor([ids[: tokens + QUESTION_TOKENS]]) for ids in found]

    def __enter__(self) -> Self:
        self._running = server_behind(as_fast_as_the_machine)
        _, self._link = self._running.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def attached(self, door: StreamDoor, start_within_s: float | None = None) -> CachedModel:
        """Attach a cache behind the link, as a user would."""
        size = self.size
        return attach(
            self._model,
            self._link.url,
            codec=door.codec,
            profiles=self._profiles,
            block_tokens=size.block_tokens,
            # Each codec has a copy of its own.
            tenant_salt=door.codec.encode(),
            start_within_s=start_within_s,
            quality=door.quality,
            policy=door.policy,
            # As many choices in a short context as there are in a long one.
            chunk_tokens=max(size.block_tokens, size.context_tokens // 8),
        )

    def store(self, codec: str) -> None:
        """Store all contexts, over a link that is as fast as this machine."""
        self._link.restart(as_fast_as_the_machine)
        with self.attached(StreamDoor("store", codec)) as cached:
            for prompt in self._prompts:
                cached.generate(prompt, max_new_tokens=1, do_sample=False)
                if not cached.flush(_STORE_S_MAX) or not cached.hit_tokens(prompt):
                    raise ValueError(f"the contexts can't be stored by {codec}")

    def recompute_s(self, text: int) -> float:
        """Return the seconds to the first token without a cache."""
        return self._generated(self._model, text)[0]

    def tail_s(self, codec: str, text: int) -> float:
        """Return what follows the last loaded token: the question's prefill."""
        self._link.restart(as_fast_as_the_machine)
        with self.attached(StreamDoor("tail", codec, "layered")) as cached:
            ttft_s, _ = self._generated(cached, text)
            assert cached.last is not None and cached.last.streamed is not None
            return ttft_s - cached.last.streamed.ready_s

    def _generated(self, model: Any, text: int) -> tuple[float, DynamicCache]:
        clock = SystemClock()
        first, began_s = FirstToken(clock), clock.monotonic_s()
        output = model.generate(
            self._prompts[text],
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            stopping_criteria=[first],
        )
        return first.seen_s - began_s, output.past_key_values

    def warm(self, cached: CachedModel, link: Link, at_s: float, recompute_s: float) -> None:
        """Let a cache learn what link and machine do, as a user's has, on a text that is not played.

        What was loaded before is near: in memory.
        """
        cached.cache.judge.note_prefill(0, self.size.context_tokens + QUESTION_TOKENS, recompute_s)
        self._begin(link, at_s)
        self._generated(cached, -1)
        cached.flush(_STORE_S_MAX)

    def play(self, door: StreamDoor, cached: CachedModel, text: int, link: Link, at_s: float) -> Played:
        """Answer a text's question from the link's moment `at_s` on, and judge the cache that was built."""
        self._begin(link, at_s)
        before_bytes = self._link.passed_bytes
        ttft_s, past = self._generated(cached, text)
        link_bytes, report = self._link.passed_bytes - before_bytes, cached.last
        assert report is not None and report.bypass is None, report
        tokens, block_tokens = self.size.context_tokens, self.size.block_tokens
        kls = [max(0.0, kl) for kl in self._judges[text].kls_of(past, passages_of(tokens, self.size.answer_tokens))]
        cached.flush(_STORE_S_MAX)
        loaded = report.streamed.loaded if report.streamed is not None else range(report.hit_tokens // block_tokens)
        law, kl_law = self.law(door.codec), None
        if law is not None:
            kept = kept_blocks(report.streamed, loaded, tokens // block_tokens, len(law.losses) - 1)
            kl_law = None if kept is None else law.kl(kept, block_tokens, Purpose.GOES_ON) / CURVE_OVER_MEAN
        return Played(ttft_s, kls[0], fmean(kls[1:]), kl_law, link_bytes, 1 - len(loaded) * block_tokens / tokens)

    def _begin(self, link: Link, at_s: float) -> None:
        sent = link.carried(at_s)
        self._link.restart(lambda seconds: link.carried(at_s + seconds) - sent)

    def law(self, codec: str) -> LossLaw | None:
        """Return the loss law of a codec that has one."""
        made = CodecRegistry(self._profiles).make(codec, self._layout)
        return LossLaw.of(made) if isinstance(made, TideCodec) and made.model is not None else None


def kept_blocks(
    report: StreamedReport | None, loaded: Sequence[int], blocks: int, refinements: int
) -> list[int] | None:
    """Return the refinements that each block of a context keeps: one more than there are where it was computed.

    None where a load in parts does not say which of its blocks share a chunk.
    """
    found = [refinements + 1] * blocks
    for block in loaded:
        found[block] = refinements
    if report is None or report.fetch is None:
        return found
    here = report.fetch.progress.here
    # Only the first chunk has several blocks: what the engine had computed before anything was known.
    first = blocks - len(here)
    if any(not 0 <= block - first < len(here) for block in loaded) or (first and loaded and min(loaded) <= first):
        return None
    for block in loaded:
        found[block] = here[block - first] - 1
    return found


# An embedded copy of four levels: a base of about half a bit, and three refinements to where the curve flattens.
TIDE = "tide:9e-4:3"
LEVELS, ANCHORS = "cachegen:1-4", "cachegen:2"
RECOMPUTE, RIVAL = "recompute", "cachegen"
FULL = StreamSize(context_tokens=2048, block_tokens=256, answer_tokens=128, texts=3)
QUICK = StreamSize(context_tokens=512, block_tokens=64, answer_tokens=64, texts=1)
# By so much of its bound a first token may be late: the noise of a machine.
LATE = 1.05
# The law holds where it is so near; smaller losses are noise beside what anybody asks for.
CLOSE, KL_MIN = 0.25, 2e-5


class LinkRoute(NamedTuple):
    """A link, and whether each play begins at another moment of it."""

    link: Link
    is_trace: bool = False


class StreamBenchRow(msgspec.Struct, frozen=True):
    """One policy over one link, the mean of its texts (of seconds the median).

    codec: of what was loaded. kl_model, kl_copy: the model's own KL in nats on the cache that was built, for text that
    goes on and for answers that copy. kl_law: what the loss law expects of the former. bytes: passed the link.
    share_computed: of the context.
    """

    policy: str
    codec: str
    link: str
    ttft_s: float
    kl_model: float
    kl_copy: float
    kl_law: float | None
    bytes: int
    share_computed: float


class StreamVerdict(NamedTuple):
    """The rows' verdict for kvtide or against it; None where there is nothing to compare.

    ttft_within: share of kvtide's rows whose first token came by the deadline, or as early as by recomputing.
    kl_vs_cachegen: share of links on which one of its policies has half of CacheGen's KL or less, no later.
    law_within_25: share of rows in which the law is within 25 % of the model's KL, where anything rough was loaded.
    """

    ttft_within: float | None
    kl_vs_cachegen: float | None
    law_within_25: float | None


class StreamBench(msgspec.Struct, frozen=True):
    """All rows and what they say (StreamVerdict)."""

    context_tokens: int
    texts: int
    tide: str
    recompute_s: float
    deadline_s: float
    ttft_within: float | None
    kl_vs_cachegen: float | None
    law_within_25: float | None
    rows: list[StreamBenchRow]


def all_doors(tide: str = TIDE) -> list[StreamDoor]:
    """Return all ways to load: whole, to a quality, and by every policy that has a name."""
    codecs = {name: _codec_of(policy_named(name), tide) for name in POLICIES}
    named = [StreamDoor(name, codec, policy=name, is_timed=True) for name, codec in codecs.items()]
    return [StreamDoor("whole", tide), StreamDoor("to 5e-3", tide, quality=5e-3), *named]


def _codec_of(policy: StreamPolicy, tide: str) -> str:
    """Return what a policy is made for: tide's refinements, the paper's levels, or anchors and deltas of one level."""
    if is_by_level(policy):
        return LEVELS
    return ANCHORS if isinstance(policy, AnchorFirst) else tide


def run(
    model: Any,
    texts: Sequence[Sequence[int]],
    profiles: Sequence[Profile],
    routes: Sequence[LinkRoute],
    doors: Sequence[StreamDoor],
    size: StreamSize,
    show: Show,
) -> StreamBench:
    """Play every way over every link. ValueError for too few texts that are long enough, or no profile that fits."""
    with StreamWorld(model, texts, size, profiles) as world:
        codecs = list(dict.fromkeys(door.codec for door in doors))
        for done, codec in enumerate(codecs):
            show("contexts", done, len(codecs))
            world.store(codec)
        tail_s = statistics.median(world.tail_s(codecs[0], text) for text in range(size.texts))
        recompute_s = statistics.median(world.recompute_s(text) for text in range(size.texts))
        deadline_s = size.slo_share * recompute_s
        rows: list[StreamBenchRow] = []
        total = len(routes) * (1 + len(doors))
        for route in routes:
            plain_s = [world.recompute_s(text) for text in range(size.texts)]
            rows.append(
                row_of(RECOMPUTE, "", route.link.name, [Played(each, 0.0, 0.0, None, 0, 1.0) for each in plain_s])
            )
            for door in doors:
                show("rows", len(rows), total)
                start_within_s = max(0.0, deadline_s - tail_s) if door.is_timed else None
                played = _plays(world, route, door, start_within_s, statistics.median(plain_s))
                rows.append(row_of(door.name, door.codec, route.link.name, played))
        show("rows", total, total)
    verdict = verdict_of(rows, deadline_s)
    return StreamBench(size.context_tokens, size.texts, doors[0].codec, recompute_s, deadline_s, *verdict, rows)


def _plays(
    world: StreamWorld, route: LinkRoute, door: StreamDoor, start_within_s: float | None, recompute_s: float
) -> list[Played]:
    link, turns = route.link, world.size.texts
    moments = [turn * link.cycle_s / (turns + 1) if route.is_trace else 0.0 for turn in range(turns + 1)]
    with world.attached(door, start_within_s) as cached:
        world.warm(cached, link, moments[-1], recompute_s)
        return [world.play(door, cached, turn, link, moments[turn]) for turn in range(turns)]


def row_of(policy: str, codec: str, link: str, played: Sequence[Played]) -> StreamBenchRow:
    """Return what the plays of one way over one link say together."""
    laws = [each.kl_law for each in played if each.kl_law is not None]
    return StreamBenchRow(
        policy,
        codec,
        link,
        statistics.median(each.ttft_s for each in played),
        statistics.fmean(each.kl_model for each in played),
        statistics.fmean(each.kl_copy for each in played),
        statistics.fmean(laws) if len(laws) == len(played) else None,
        round(statistics.fmean(each.link_bytes for each in played)),
        statistics.fmean(each.share_computed for each in played),
    )


def verdict_of(rows: Sequence[StreamBenchRow], deadline_s: float) -> StreamVerdict:
    """Return what rows say; kvtide's are those of its own codec."""
    plain_s = {row.link: row.ttft_s for row in rows if row.policy == RECOMPUTE}
    rivals = {row.link: row for row in rows if row.policy == RIVAL}
    ours = [row for row in rows if row.codec.startswith("tide")]
    within = [row.ttft_s <= LATE * max(deadline_s, plain_s[row.link]) for row in ours]
    halved = [
        any(
            row.kl_model <= max(rival.kl_model / 2, KL_MIN)
            for row in ours
            if row.link == link and row.ttft_s <= LATE * rival.ttft_s
        )
        for link, rival in rivals.items()
    ]
    near = [
        abs(row.kl_law / row.kl_model - 1) <= CLOSE for row in ours if row.kl_law is not None and row.kl_model > KL_MIN
    ]
    return StreamVerdict(*(statistics.fmean(each) if each else None for each in (within, halved, near)))
