"""Runs a job into an engine: what is loaded is decoded and appended before what the engine computes behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.block import BlockBits
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.errors import CorruptPayload
from kvtide.plan import StreamPolicy
from kvtide.store.load.job import FetchJob
from kvtide.store.load.receiver import Receiver
from kvtide.store.load.run import Engine, FetchLimits, FetchReport, FetchRun, LinkState
from kvtide.tier.source import Source

_log = logging.getLogger(__name__)

# A loaded block by its number, for the engine to put behind what it has: called in order.
LoadedBlock = Callable[[int, BlockBits], None]


class LoadedPrefix(NamedTuple):
    """What the engine has: leading tokens, of them the blocks that were appended, decoded in `append_s`."""

    tokens: int
    appended: Sequence[int]
    append_s: float
    report: FetchReport
    receiver: Receiver
    job: FetchJob


class StreamedLoad:
    """A load into an engine: it fetches from the first moment on, and ends in `finish`."""

    def __init__(
        self,
        job: FetchJob,
        policy: StreamPolicy,
        sources: Sequence[Source],
        link: LinkState,
        clock: Clock,
        limits: FetchLimits,
        registry: CodecRegistry,
        computed: Sequence[int] = (),
        begun: Sequence[int] = (),
    ) -> None:
        """computed, begun: chunks that the engine has, and those behind them that it is computing."""
        self._job = job
        self._clock = clock
        self._registry = registry
        self._receiver = Receiver(job.objects)
        self._run = FetchRun(job, self._receiver, policy, sources, link, clock, limits, computed, begun)
        self._tokens = max((job.request.chunks[chunk].stop for chunk in computed), default=0)
        self._begun = begun
        self._run.start()

    def is_ready(self) -> bool:
        """Tell whether the engine should start now, so that what it computes is for nothing."""
        return self._run.is_ready()

    def stop(self) -> None:
        """End it with what is there, and nothing appended."""
        self._run.stop()

    def finish(self, engine: Engine, append: LoadedBlock, is_begun_computed: bool = False) -> LoadedPrefix:
        """Have the engine compute its part, then append all that is usable.

        Damaged blocks end it early, they raise nothing. is_begun_computed: whether the engine has what it had begun.
        """
        behind = _Behind(engine, append, self._job, self._receiver, self._registry, self._clock)
        behind.tokens = self._tokens
        if is_begun_computed:
            self._run.add_computed(self._begun)
            behind.tokens = max((self._job.request.chunks[chunk].stop for chunk in self._begun), default=self._tokens)
        report = self._run.until_ready(behind)
        behind.append_until(self._job.request.tokens)
        return LoadedPrefix(behind.tokens, behind.appended, behind.append_s, report, self._receiver, self._job)


class _Behind:
    """The engine, given what is loaded before each chunk that it computes."""

    def __init__(
        self,
        engine: Engine,
        append: LoadedBlock,
        job: FetchJob,
        receiver: Receiver,
        registry: CodecRegistry,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._append = append
        self._job = job
        self._receiver = receiver
        self._registry = registry
        self._clock = clock
        # What the engine has, from the start on.
        self.tokens = 0
        self.appended: list[int] = []
        self.append_s = 0.0

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        self.append_until(start)
        if self.tokens != start or not self._engine.compute(start, stop, is_wanted):
            return False
        self.tokens = stop
        return True

    def append_until(self, stop: int) -> None:
        """Append the loaded blocks up to token `stop`, or to the first that is not usable."""
        layout = self._job.objects[0].meta.layout
        started_s = self._clock.monotonic_s()
        bits: BlockBits = np.empty(layout.shape, layout.bits_dtype)
        while self.tokens < stop and self._decode(self.tokens // layout.tokens, bits):
            self._append(self.tokens // layout.tokens, bits)
            self.appended.append(self.tokens // layout.tokens)
            self.tokens += layout.tokens
        self.append_s += self._clock.monotonic_s() - started_s

    def _decode(self, block: int, bits: BlockBits) -> bool:
        """Decode what is here of a block: of levels, the one that was loaded."""
        blocks = self._job.request.tokens // bits.shape[2]
        for number in range(block, len(self._job.objects), blocks):
            stored, sections = self._job.objects[number], self._receiver.sections(number)
            codec = self._registry.get(stored.codec_id, stored.profile)
            if not sections or codec is None:
                continue
            try:
                codec.decode(stored.meta, sections, bits)
            except CorruptPayload as error:
                _log.debug("object %d can't be decoded, what is behind it is not used: %s", number, error)
                continue
            return True
        return False
