"""The rig of `bench stream`: model, server, shaped link, stored contexts, and this machine's seconds for each part.

Speeds are measured before anything is played, and again beside each play: a shared machine changes by the second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import SystemClock
from kvtide.codec import Codec, CodecRegistry, Profile
from kvtide.codec.base import RawCodec
from kvtide.config import Limits
from kvtide.engines.calibrate.judge import capture_blocks
from kvtide.engines.transformers.streaming import StreamedPrefill
from kvtide.index import LruPolicy, RadixIndex
from kvtide.keys import block_keys
from kvtide.plan import PASS_TOKENS, Judge, LinkEstimate, PrefillSpeed, StreamPolicy, cut
from kvtide.plan.bandwidth import HarmonicRate
from kvtide.plan.levels import FixedLevel
from kvtide.store import Cache
from kvtide.store.load import LoadAccess
from kvtide.store.load.job import FetchJob
from kvtide.store.load.run import FetchLimits, FetchReport
from kvtide.store.load.streamed import StreamedLoad
from kvtide.tier.http.tier import http_tier
from kvtide.tier.source import read_heads
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Namespace, ObjectId, Section
from kvtide.wire import StoredObject, pack_object
from kvtide_lab.bench.shaped import ShapedProxy
from kvtide_lab.sim.stream import Costs

SUFFIX_TOKENS = 16
# How often short things are timed.
_TIMINGS = 3


class Speeds(NamedTuple):
    """This machine's speeds: the engine's, all that is no byte and no token, and the question at the end."""

    prefill: PrefillSpeed
    costs: Costs
    question_s: float

    def slowed(self, factor: float) -> Speeds:
        """Return the same for a machine that takes `factor` times as long."""
        costs = Costs(
            self.costs.latency_s,
            tuple(factor * each for each in self.costs.decode_token_s),
            factor * self.costs.short_pass_s,
            self.costs.engine_factor,
        )
        prefill = PrefillSpeed(self.prefill.tokens_per_s / factor, self.prefill.double_at)
        return Speeds(prefill, costs, factor * self.question_s)

    def tail_s(self, tokens: int) -> float:
        """Return what follows the last byte if all tokens are loaded: decoding and the question."""
        return tokens * self.costs.decode_token_s[-1] + self.question_s


class Played(NamedTuple):
    """One load for real: seconds until the first token, what came, and how many blocks of it the engine has."""

    ttft_s: float
    report: FetchReport
    blocks: int

    def text_share(self, job: FetchJob) -> float:
        """Return the share of the tokens that the engine computed."""
        loaded = self.blocks * job.objects[0].meta.layout.tokens
        return 1 - loaded / job.request.tokens


class Rig:
    """A model and its stored context, behind a link of any shape. `close` it."""

    def __init__(
        self,
        model: Any,
        ids: Sequence[int],
        layout: BlockLayout,
        profiles: Sequence[Profile],
        server_port: int,
        proxy: ShapedProxy,
    ) -> None:
        """ids: the context and SUFFIX_TOKENS of a question."""
        self.clock = SystemClock()
        self.layout = layout
        self.registry = CodecRegistry(profiles)
        self.ids = list(ids)
        self._model = model
        self._proxy = proxy
        self._blocks = capture_blocks(model, self.ids[:-SUFFIX_TOKENS], layout)
        self._tier = http_tier(f"http://127.0.0.1:{server_port}", self.clock)
        self.link = http_tier(f"http://127.0.0.1:{proxy.port}", self.clock)
        index = RadixIndex(self.clock, lambda blocks_max: LruPolicy(), len(self._blocks))
        self._cache = Cache(TierStack([self.link]), index, RawCodec(), self.registry, self.clock, Limits(), math.inf)
        self._cache.open()

    def close(self) -> None:
        """Close the connections."""
        self._cache.close()

    @property
    def tokens(self) -> int:
        """Return the length of the stored context."""
        return len(self._blocks) * self.layout.tokens

    def store(self, name: str, codec: Codec) -> list[StoredObject]:
        """Put the context on the server, encoded, under a namespace of its own; return what a client sees."""
        metas = self._metas(name)
        self._tier.open()
        for meta, bits in zip(metas, self._blocks, strict=True):
            packed = pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)
            assert self._tier.put_from(meta.id, packed)
        self._tier.close()
        self.restart(lambda seconds: 1e9 * seconds)
        found = read_heads(self.link, [meta.id for meta in metas], self.clock.monotonic_s() + 10.0, 4)
        assert len(found) == len(metas)
        return found

    def _metas(self, name: str) -> list[BlockMeta]:
        namespace = Namespace(name.encode().ljust(32, b"\0"))
        keys = [BlockKey(namespace), *block_keys(namespace, np.array(self.ids, dtype=np.uint32), self.layout.tokens)]
        return [
            BlockMeta(ObjectId(namespace, keys[i + 1]), keys[i], i * self.layout.tokens, self.layout)
            for i in range(len(self._blocks))
        ]

    def restart(self, carried: Callable[[float], float]) -> None:
        """Begin the link's time again, with another link."""
        self._proxy.restart(carried)

    def engine(self) -> StreamedPrefill:
        """Return an engine that has nothing yet."""
        return StreamedPrefill(self._model, self.ids[: self.tokens], self.layout)

    def first_token_s(self, engine: StreamedPrefill) -> float:
        """Run what is after the context of `engine` up to the first token; return how long that took."""
        return self._timed(lambda: engine.first_token(self.ids))

    def plain_s(self) -> float:
        """Return what the first token takes without a cache: one pass over all."""
        engine = StreamedPrefill(self._model, self.ids, self.layout)
        return self._timed(lambda: engine.compute(0, len(self.ids), lambda: True))

    def access(self, link: LinkEstimate) -> LoadAccess:
        """Return what loads work on, knowing so much of the link."""
        self._cache.access.judge = Judge(link=link)
        return self._cache.access

    def play(
        self, job: FetchJob, policy: StreamPolicy, link: LinkEstimate, carried: Callable[[float], float]
    ) -> Played:
        """Load a context for real, up to the first token."""
        self.restart(carried)
        engine = self.engine()
        started_s = self.clock.monotonic_s()
        load = StreamedLoad(self.access(link), job, policy, FetchLimits())
        report = load.finish(engine)
        engine.first_token(self.ids)
        return Played(self.clock.monotonic_s() - started_s, report, len(load.appended))

    def probe_s(self) -> float:
        """Return what one pass over the first tokens takes now."""
        engine = self.engine()
        return self._timed(lambda: engine.compute(0, min(PASS_TOKENS, self.tokens), lambda: True))

    def link_bytes_per_s(self, job: FetchJob) -> float:
        """Return the bytes a second that come through when the link is no bound: proxy, reader and receiver."""
        state = LinkEstimate(HarmonicRate(1000))
        self.play(
            job.asked(job.request.prefill, 0.0),
            FixedLevel(job.request.steps - 1),
            state,
            lambda seconds: 1e12 * seconds,
        )
        rate = state.estimator.bytes_per_s()
        assert rate is not None
        return rate

    def speeds(self) -> Speeds:
        """Measure the engine by its passes. What the first byte and decoding take is measured for each codec."""
        self.probe_s()
        spans = cut(self.tokens, PASS_TOKENS)
        sweeps = [self._passes_s(spans) for _ in range(3)]
        prefill = _speed(spans, [statistics.median(each) for each in zip(*sweeps, strict=True)])
        whole = self.engine()
        whole.compute(0, self.tokens, lambda: True)
        # As shares of the pass beside them: a busy machine is slower for both.
        usual_s, share = prefill.seconds(0, min(PASS_TOKENS, self.tokens)), min(1.0, self.layout.tokens / PASS_TOKENS)
        block = [(0, self.layout.tokens)]
        beside = [(self.probe_s(), self._passes_s(block)[0], self._question_s(whole)) for _ in range(_TIMINGS)]
        over = statistics.median(short_s / pass_s for pass_s, short_s, _ in beside) - share
        question = statistics.median(asked_s / pass_s for pass_s, _, asked_s in beside)
        costs = Costs(short_pass_s=usual_s * max(0.0, over) / (1 - share) if share < 1 else 0.0)
        return Speeds(prefill, costs, usual_s * question)

    def _passes_s(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        engine, seconds = self.engine(), []
        for start, stop in spans:
            started_s = self.clock.monotonic_s()
            engine.compute(start, stop, lambda: True)
            seconds.append(self.clock.monotonic_s() - started_s)
        return seconds

    def _question_s(self, engine: StreamedPrefill) -> float:
        seconds = self.first_token_s(engine)
        engine.past.crop(-(len(self.ids) - self.tokens))
        return seconds

    def latency_s(self, stored: StoredObject) -> float:
        """Return how long the first byte of a range takes."""
        self.restart(lambda seconds: 1e9 * seconds)
        return statistics.median(
            self._timed(lambda: self.link.read_range(stored.meta.id, 0, 1, lambda part: True)) for _ in range(_TIMINGS)
        )

    def decode_token_s(self, codec: Codec, refinements: Sequence[int]) -> tuple[float, ...]:
        """Return what a token takes until the engine has it, with refinements up to each of the numbers given."""
        encoded = [
            codec.encode(meta, block) for meta, block in zip(self._metas("decoding")[:4], self._blocks, strict=False)
        ]
        return tuple(
            statistics.median(
                self._decoded_s(
                    codec, [[each for each in sections if each.id.refinement <= last] for sections in encoded]
                )
                for _ in range(3)
            )
            for last in refinements
        )

    def _decoded_s(self, codec: Codec, parts: Sequence[Sequence[Section]]) -> float:
        engine, bits = self.engine(), np.empty(self.layout.shape, self.layout.bits_dtype)
        metas = self._metas("decoding")[: len(parts)]

        def decode() -> None:
            for number, (meta, sections) in enumerate(zip(metas, parts, strict=True)):
                codec.decode(meta, sections, bits)
                engine.append(number, bits)
            assert engine.past.get_seq_length() == len(metas) * self.layout.tokens

        return self._timed(decode) / (len(metas) * self.layout.tokens)

    def _timed(self, action: Callable[[], object]) -> float:
        started_s = self.clock.monotonic_s()
        action()
        return self.clock.monotonic_s() - started_s


def _speed(spans: Sequence[tuple[int, int]], seconds: Sequence[float]) -> PrefillSpeed:
    """Return the speed that explains what passes over a context took: the same everywhere, or growing with position."""
    flat = PrefillSpeed(spans[-1][1] / sum(seconds))
    if len(spans) < 2:
        return flat
    rates = [each / (stop - start) for each, (start, stop) in zip(seconds, spans, strict=True)]
    slope, at_start = np.polyfit([(start + stop) / 2 for start, stop in spans], rates, 1).tolist()
    return PrefillSpeed(1 / at_start, at_start / slope) if min(slope, at_start) > 0 else flat
