"""TTFT of exact blocks as soon as can be: both ends, loading, recomputing; and where loading loses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.codec import LosslessCodec
from kvtide.plan import LinkEstimate, PrefillSpeed, StreamPolicy, TwoEnded, cut
from kvtide.plan.layered import Layered
from kvtide.store.load.job import LoadRequest, layered_job
from kvtide.store.load.streamed import Streamed
from kvtide.wire import StoredObject
from kvtide_lab.bench.stream_rig import Rig
from kvtide_lab.sim.links import Link

# A tenth of a block of exact SmolLM2 a second: recomputing is a hundred times as fast.
SLOW_BYTES_PER_S = 1e6 / 8


class ExactTimes(NamedTuple):
    """Medians of seconds, and medians of ratios to the recomputing beside them: of the clock's and of CPU seconds."""

    two_ended_s: float
    load_s: float
    recompute_s: float
    break_even_ratio: float
    break_even_ratio_unknown: float
    break_even_cpu_ratio: float
    break_even_cpu_ratio_unknown: float


class _Spent(NamedTuple):
    """Seconds of the clock, and of this process's threads."""

    wall_s: float
    cpu_s: float


def exact_times(rig: Rig, link: Link, speed: PrefillSpeed, repeats: int) -> ExactTimes:
    """Take turns between all ways, and between what is compared with one another in either order."""
    stored = rig.store("exact", LosslessCodec())
    job = layered_job(stored, cut(rig.tokens, rig.layout.tokens), (0.0,), LoadRequest(speed, 0.0))

    def played(policy: StreamPolicy) -> float:
        return rig.play(job, policy, LinkEstimate(), link.carried).ttft_s

    loads = [(played(TwoEnded()), played(Layered()), rig.plain_s()) for _ in range(repeats)]
    ratios = []
    for repeat in range(repeats):
        ways = [rig.plain_s, lambda: _slow_s(rig, stored, speed, True), lambda: _slow_s(rig, stored, speed, False)]
        ratios.append(_ratios(ways, is_reversed=repeat % 2 == 1))
    medians = [statistics.median(each) for each in zip(*loads, strict=True)]
    known, unknown = (_medians(each) for each in zip(*ratios, strict=True))
    return ExactTimes(medians[0], medians[1], medians[2], known.wall_s, unknown.wall_s, known.cpu_s, unknown.cpu_s)


def _ratios(ways: Sequence[Callable[[], float]], is_reversed: bool) -> list[_Spent]:
    """Return what the second and third way took over the first."""
    order = range(len(ways) - 1, -1, -1) if is_reversed else range(len(ways))
    spent = {}
    for position in order:
        before_s = time.process_time()
        wall_s = ways[position]()
        spent[position] = _Spent(wall_s, time.process_time() - before_s)
    return [_Spent(spent[way].wall_s / spent[0].wall_s, spent[way].cpu_s / spent[0].cpu_s) for way in (1, 2)]


def _medians(ratios: Sequence[_Spent]) -> _Spent:
    return _Spent(*(statistics.median(each) for each in zip(*ratios, strict=True)))


def _slow_s(rig: Rig, stored: Sequence[StoredObject], speed: PrefillSpeed, is_known: bool) -> float:
    """Return TTFT by a loader over a link that is far too slow, and known to be so or not."""
    rig.restart(lambda seconds: SLOW_BYTES_PER_S * seconds)
    link = LinkEstimate()
    if is_known:
        link.estimator.add(int(SLOW_BYTES_PER_S), 0.0, 1.0)
    engine = rig.engine()
    started_s = rig.clock.monotonic_s()
    metas = [each.meta for each in stored]
    Streamed(engine, LoadRequest(speed, 0.0)).load(rig.access(link), metas, 30.0)
    engine.first_token(rig.ids)
    return rig.clock.monotonic_s() - started_s
