"""Doors of streaming: a stored prefix over a shaped link, by options of `attach` and of a call."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.codec.tide_profiles import fitted_on
from tests.doors.register import door
from tests.doors.user import BLOCK, PROMPT, RESTORED, answer
from tests.pieces import pack_frame
from tests.server.worlds import ask
from tests.servers import RunningServer, running_server

from kvtide.clock import SystemClock
from kvtide.codec import Profile
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.engines.transformers.streaming import StreamedPrefill
from kvtide.outcomes import Choice, Decided, Why, parse_decisions
from kvtide.plan.base import Reason
from kvtide.store.load.run import FetchRun
from kvtide.store.load.streamed import StreamedReport
from kvtide.wire import parse_object
from kvtide_lab.bench.shaped import ShapedProxy

# A deadline that a base of six blocks comes by, over the slow link, and their refinements don't.
SLOW_BYTES_PER_S, SOON_S = 2e4, 0.6
PLENTY_BYTES_PER_S = 1e8


class World:
    """A server that has the prompt's blocks by a codec, and what loads them over a link."""

    def __init__(self, model: Any, server: RunningServer, **options: Any) -> None:
        self._model, self._server, self.options = model, server, options
        answer(self._model, self._server.url, PROMPT, **self.options)
        self.whole_bytes = answer(self._model, self._server.url, PROMPT, **self.options).read_bytes

    def answered(self, prompt: torch.Tensor) -> None:
        """Have the server keep another prompt's blocks too."""
        answer(self._model, self._server.url, prompt, **self.options)

    def objects(self) -> Iterator[bytes]:
        """Yield the prompt's blocks as the server has them."""
        for info in list(self._server.store.objects()):
            data = bytearray(info.size)
            self._server.store.get_into(info.id, memoryview(data))
            if parse_object(data).meta.parent != parse_object(data).meta.id.key:
                yield bytes(data)

    @contextmanager
    def attached(
        self, bytes_per_s: float, server: RunningServer | None = None, **options: Any
    ) -> Iterator[CachedModel]:
        place, given = (server or self._server).address, {**self.options, **options}
        with (
            ShapedProxy((place.host, place.port), bytes_per_s.__mul__) as proxy,
            attach(self._model, proxy.url, block_tokens=BLOCK, **given) as cached,
        ):
            yield cached


@pytest.fixture
def server() -> Iterator[RunningServer]:
    # Each test has its own: what is known of a link is kept beside the objects.
    with running_server(tiers=("memory://",)) as found:
        yield found


@pytest.fixture(scope="module")
def profile(tiny_model: Any) -> Profile:
    return fitted_on(tiny_model, model_layout(tiny_model, BLOCK), PROMPT)


@pytest.fixture
def world(tiny_model: Any, server: RunningServer, profile: Profile) -> World:
    return World(tiny_model, server, codec="tide:1e-3:3", profiles=[profile])


@pytest.fixture
def levels(tiny_model: Any, server: RunningServer) -> World:
    """The prompt's blocks in four levels of CacheGen."""
    found = World(tiny_model, server, codec="cachegen:1-4")
    assert server.store.stats().objects == 4 * RESTORED // BLOCK
    return found


@pytest.fixture
def anchors(tiny_model: Any, server: RunningServer) -> World:
    """The prompt's blocks as CacheGen's: anchors, and nine positions of deltas."""
    return World(tiny_model, server, codec="cachegen:2")


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is never done before a link: a tiny model computes faster than any."""

    def compute(self: StreamedPrefill, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        give_up_s = time.monotonic() + 60.0
        while is_wanted():
            assert time.monotonic() < give_up_s, "nothing came"
            time.sleep(0.002)
        return False

    monkeypatch.setattr(StreamedPrefill, "compute", compute)


@pytest.fixture
def deadline_after_bases(monkeypatch: pytest.MonkeyPatch) -> float:
    """A deadline that passes in the moment in which every chunk's base is here, however busy the machine is."""
    start_within_s, real_s, arrive = 60.0, SystemClock.monotonic_s, FetchRun._arrive
    ahead_s = 0.0

    def arrived(self: FetchRun, fetch: Any) -> None:
        nonlocal ahead_s
        arrive(self, fetch)
        ahead_s = start_within_s if min(self._progress.here) >= 1 else ahead_s

    monkeypatch.setattr(FetchRun, "_arrive", arrived)
    monkeypatch.setattr(SystemClock, "monotonic_s", lambda self: real_s(self) + ahead_s)
    return start_within_s


def asked(cached: CachedModel, **options: Any) -> StreamedReport:
    cached.generate(PROMPT, max_new_tokens=2, do_sample=False, **options)
    assert cached.last is not None and cached.last.streamed is not None
    return cached.last.streamed


@door("stream a prefix to a deadline")
@pytest.mark.real_time
def test_at_the_deadline_the_model_starts_with_what_has_come(world: World, slow_engine: None) -> None:
    with world.attached(SLOW_BYTES_PER_S, start_within_s=SOON_S) as cached:
        report = asked(cached)
    assert report.tokens == RESTORED
    assert 0 < report.received_bytes < 0.8 * world.whole_bytes
    assert report.kl > 1e-3, "not all refinements were there"


@door("sections put together by the server")
def test_a_stream_starts_with_bases_while_refinements_are_uploaded(
    world: World, slow_engine: None, deadline_after_bases: float
) -> None:
    with running_server() as east:
        rest = []
        for data in world.objects():
            stored = parse_object(data)
            frames = [pack_frame(stored, at) for at in range(len(stored.entries))]
            bases = sum(entry.id.refinement == 0 for entry in stored.entries)
            path = f"/v1/{stored.meta.id.namespace.hex()}/{stored.meta.id.key.hex()}"
            assert ask(east, "POST", path, stored.head + b"".join(frames[:bases]))[0].status == 202
            rest.append((path, b"".join(frames[bases:])))
        with world.attached(PLENTY_BYTES_PER_S, east, start_within_s=deadline_after_bases) as cached:
            report = asked(cached)
            assert (report.tokens, report.computed_tokens, report.is_whole) == (RESTORED, 0, False)
            assert report.fetch is not None and set(report.fetch.progress.here) == {1}
        assert {ask(east, "HEAD", path)[0].status for path, _ in rest} == {404}, "there is no whole object yet"
        assert [ask(east, "POST", path, frames)[0].status for path, frames in rest] == [201] * len(rest)
        with world.attached(PLENTY_BYTES_PER_S, east, start_within_s=60.0) as cached:
            assert asked(cached).is_whole


@door("a deadline and a quality for each request")
def test_a_call_says_when_it_wants_to_start(world: World, slow_engine: None) -> None:
    reports = []
    for quality in (1e-3, 1.0):
        # What one call has brought is near the next.
        with world.attached(PLENTY_BYTES_PER_S) as cached:
            reports.append(asked(cached, kvtide_quality=quality))
    fine, rough = reports
    assert fine.is_whole and not rough.is_whole
    assert fine.kl < rough.kl <= 1.0
    assert rough.received_bytes < fine.received_bytes


@door("load no more than a quality needs")
def test_a_quality_is_loaded_with_fewer_bytes(world: World, slow_engine: None) -> None:
    with world.attached(PLENTY_BYTES_PER_S, quality="0.5") as cached:
        report = asked(cached)
    assert report.tokens == RESTORED
    assert report.kl <= 0.5
    assert report.received_bytes < 0.9 * world.whole_bytes


@door("compute what would come too late")
def test_both_ends_meet(world: World) -> None:
    with world.attached(SLOW_BYTES_PER_S / 10, policy="two-ended", start_within_s=30.0) as cached:
        report = asked(cached)
    # The tiny model is far faster than this link.
    assert report.computed_tokens > 0
    assert report.kl == 0.0


@door("read only the base on a slow link")
def test_layered_computes_nothing_and_reads_the_base_of_all_first(
    world: World, slow_engine: None, deadline_after_bases: float
) -> None:
    with world.attached(SLOW_BYTES_PER_S, policy="layered", start_within_s=deadline_after_bases) as cached:
        report = asked(cached)
    assert (report.tokens, report.computed_tokens) == (RESTORED, 0)
    assert report.fetch is not None and min(report.fetch.progress.here) >= 1
    assert report.received_bytes < 0.8 * world.whole_bytes


@door("never rougher in the store than it says")
def test_what_is_computed_on_top_of_rough_blocks_is_not_stored(
    world: World, slow_engine: None, deadline_after_bases: float
) -> None:
    longer = torch.cat([PROMPT, PROMPT[:, :40]], dim=1)
    with world.attached(SLOW_BYTES_PER_S, start_within_s=deadline_after_bases) as cached:
        cached.generate(longer, max_new_tokens=2, do_sample=False)
        assert (cached.last.streamed.kl > 1e-3, cached.last.blocks_queued) == (True, 0)


@door("level of each chunk by the bandwidth")
@door("levels of one context together")
@pytest.mark.real_time
def test_cachegen_picks_a_level_for_each_chunk(levels: World, slow_engine: None) -> None:
    read = {}
    for rate, within_s in ((SLOW_BYTES_PER_S, SOON_S), (PLENTY_BYTES_PER_S, 60.0)):
        with levels.attached(rate, policy="cachegen", start_within_s=within_s, chunk_tokens=BLOCK) as cached:
            # Slower than any link: no chunk is sent as text.
            cached.cache.judge.note_prefill(0, 100, 1000.0)
            report = asked(cached)
            assert (report.tokens, report.computed_tokens) == (RESTORED, 0)
            read[rate] = report.fetch.progress.here
    # The level after the first two, in the middle while no rate is known.
    assert read[SLOW_BYTES_PER_S][0] == read[PLENTY_BYTES_PER_S][0] == 2
    assert read[SLOW_BYTES_PER_S][-1] < read[PLENTY_BYTES_PER_S][-1] == 4


@door("text where computing fits")
def test_cachegen_sends_text_where_computing_fits(levels: World) -> None:
    with levels.attached(SLOW_BYTES_PER_S, policy="cachegen", start_within_s=30.0) as cached:
        report = asked(cached)
    assert report.received_bytes == 0
    assert report.kl == 0.0


@door("anchors first, then deltas")
def test_anchors_of_all_come_before_deltas_of_any(
    anchors: World, slow_engine: None, deadline_after_bases: float
) -> None:
    with anchors.attached(SLOW_BYTES_PER_S, policy="anchor-first", start_within_s=deadline_after_bases) as cached:
        report = asked(cached)
    assert (report.tokens, report.computed_tokens) == (RESTORED, 0)
    here = report.fetch.progress.here
    assert min(here) >= 1
    assert min(here) < 10, "the link was not slow"
    assert list(here) == sorted(here, reverse=True), "chunk after chunk"
    assert report.kl > 0.03


@door("deltas one by one on a slow link")
@pytest.mark.real_time
def test_slow_links_bring_deltas_before_anchors(anchors: World, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StreamedPrefill.compute

    def late(self: StreamedPrefill, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        give_up_s = time.monotonic() + 5.0
        while is_wanted() and time.monotonic() < give_up_s:
            time.sleep(0.002)
        return is_wanted() and compute(self, start, stop, is_wanted)

    monkeypatch.setattr(StreamedPrefill, "compute", late)
    reasons = {}
    # Anchors that were asked for last come too late: the model has to compute their tokens.
    for rate, within_s in ((PLENTY_BYTES_PER_S, 60.0), (SLOW_BYTES_PER_S, 2 * SOON_S)):
        with anchors.attached(rate, policy="deltas-first-when-slow", start_within_s=within_s) as cached:
            # Slower than any link.
            cached.cache.judge.note_prefill(0, 100, 1000.0)
            report = asked(cached)
        reasons[rate] = report.fetch.reasons
    assert reasons[SLOW_BYTES_PER_S][Reason.DELTAS] > 0
    assert Reason.DELTAS not in reasons[PLENTY_BYTES_PER_S]


@door("never slower than computing, in transformers")
def test_a_link_that_is_slower_than_computing_is_left_alone(world: World) -> None:
    other = PROMPT.flip(1)
    world.answered(other)
    with world.attached(SLOW_BYTES_PER_S) as cached:
        cached.cache.judge.note_prefill(0, RESTORED, 0.5)
        cached.generate(PROMPT, max_new_tokens=2, do_sample=False)
        first = cached.last
        cached.cache.judge.note_prefill(0, RESTORED, 0.5)
        cached.generate(other, max_new_tokens=2, do_sample=False)
        second = cached.last
        counted = parse_decisions(cached.cache.stats().decisions)
    assert first.hit_tokens < RESTORED, "the link was not slow"
    assert (second.hit_tokens, second.stored_bytes_read) == (0, 0)
    assert counted[Decided(Choice.RECOMPUTE, Why.LINK_SLOWER)] == RESTORED


def test_what_was_learnt_of_a_link_is_known_after_a_restart(world: World, slow_engine: None) -> None:
    for is_known in (False, True):
        with world.attached(PLENTY_BYTES_PER_S, quality=0.5) as cached:
            # Slower than any link, also one that a busy machine has made slow.
            cached.cache.judge.note_prefill(0, 100, 1000.0)
            asked(cached)
            ((choice, why),) = parse_decisions(cached.cache.stats().decisions)
            assert choice is Choice.LOAD
            assert (why is not Why.UNKNOWN_LINK) is is_known


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"start_within_s": -1.0}, "start_within_s is a number of seconds"),
        ({"start_within_s": float("nan")}, "start_within_s is a number of seconds"),
        ({"quality": "rough"}, "could not convert"),
        ({"quality": -1.0}, "quality is a KL divergence"),
        ({"policy": "quickest"}, "expected one of two-ended, layered"),
        ({"policy": "layered", "importance": 0.5, "codec": "lossless"}, "takes no start_within_s"),
    ],
)
def test_bad_options_are_refused(tiny_model: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        attach(tiny_model, "memory://", **options)
