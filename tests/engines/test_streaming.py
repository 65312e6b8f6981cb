import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.doors.user import PROMPT
from tests.store.load.sources import MadeSource, MadeTier, access_of
from tests.stores import read_object

from kvtide.block import BlockLayout
from kvtide.clock import Clock
from kvtide.codec import Codec, LosslessCodec
from kvtide.config import Limits
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.groups import model_layout
from kvtide.engines.transformers.streaming import StreamedPrefill
from kvtide.outcomes import Choice, Decided, Why, parse_decisions
from kvtide.plan import Judge, PrefillSpeed
from kvtide.plan.policies import TwoEnded
from kvtide.store.load.run import FetchLimits, LoadRequest
from kvtide.store.load.streamed import Streamed
from kvtide.tier.base import IsPinned
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey
from kvtide.wire import pack_object
from kvtide_lab.judge.quality import block_metas, capture_blocks

SPEED = PrefillSpeed(500.0)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class SlowPrefill(StreamedPrefill):
    """Takes three seconds for each pass, unless it is stopped."""

    pass_s = 3.0

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        for _ in range(int(100 * self.pass_s)):
            time.sleep(0.01)
            if not is_wanted():
                return False
        return super().compute(start, stop, is_wanted)


class EndlessPrefill(SlowPrefill):
    """Takes longer than any load here, also on a busy machine."""

    pass_s = 60.0


class NotingPrefill(StreamedPrefill):
    """Notes what it computed to the end, and what for nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passes: list[tuple[int, int]] = []
        self.stopped_tokens = 0

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        is_computed = super().compute(start, stop, is_wanted)
        self.passes += [(start, stop)] if is_computed else []
        self.stopped_tokens += 0 if is_computed else stop - start
        return is_computed


class Stored:
    """A prompt's blocks, encoded, and what loads them."""

    def __init__(self, model: Any, prompt: torch.Tensor, codec: Codec) -> None:
        self.model = model
        self.layout: BlockLayout = model_layout(model, 16)
        self.ids: list[int] = prompt[0].tolist()
        self.metas = block_metas(self.ids, self.layout)
        blocks = capture_blocks(model, self.ids, self.layout)
        self.objects = {
            meta.id: bytes(pack_object(meta, codec.codec_id, codec.encode(meta, bits)))
            for meta, bits in zip(self.metas, blocks, strict=True)
        }

    def load(
        self,
        source: MadeSource,
        request: LoadRequest,
        judge: Judge | None = None,
        prefill: type[StreamedPrefill] = StreamedPrefill,
    ) -> Any:
        engine = prefill(self.model, self.ids[:96], self.layout)
        streamed = Streamed(engine, request, TwoEnded(), limits=FetchLimits(retry_s=0.01, read_s_max=5.0))
        access = access_of(source, judge)
        with access.pinned(self.metas):
            streamed.load(access, self.metas, 30.0)
        return engine, streamed.report, access

    def answer(self, engine: StreamedPrefill) -> torch.Tensor:
        return self.model.generate(torch.tensor([self.ids]), past_key_values=engine.past, **GREEDY)

    def plain_answer(self) -> torch.Tensor:
        return self.model.generate(torch.tensor([self.ids]), **GREEDY)


@pytest.fixture
def stored(tiny_model: Any) -> Stored:
    return Stored(tiny_model, PROMPT, LosslessCodec())


@pytest.mark.parametrize("bytes_per_s", [2e4, 1e5, 1e6])
def test_both_ends_together_give_the_plain_answer(stored: Stored, bytes_per_s: float) -> None:
    source = MadeSource(stored.objects, bytes_per_s=bytes_per_s)
    engine, report, _ = stored.load(source, LoadRequest(SPEED, 0.0))
    assert report.tokens == 96
    assert engine.past.get_seq_length() == 96
    computed = StreamedPrefill(stored.model, stored.ids, stored.layout)
    assert computed.compute(0, 96, lambda: True)
    for one, other in zip(engine.past.layers, computed.past.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5)
    assert torch.equal(stored.answer(engine), stored.plain_answer())


@pytest.mark.parametrize("fault", [None, RuntimeError("a bug")])
def test_without_anything_stored_the_engine_computes_meanwhile(stored: Stored, fault: Exception | None) -> None:
    source = MadeSource({})
    source.read_range = Mock(side_effect=fault, return_value=False)  # type: ignore[method-assign]
    engine, report, access = stored.load(source, LoadRequest(SPEED, 1.0))
    assert (report.fetch, report.decision) == (None, None)
    assert engine.past.get_seq_length() == report.tokens == report.computed_tokens
    assert set(access.decisions.counts()) == {Decided(Choice.RECOMPUTE, Why.ABSENT)}
    assert torch.equal(stored.answer(engine), stored.plain_answer())


@pytest.mark.parametrize(("deadline_s", "is_slow"), [(1.0, True), (0.0, False)])
def test_link_known_to_be_too_slow_is_left_alone(stored: Stored, deadline_s: float, is_slow: bool) -> None:
    judge, prefill = Judge(), SlowPrefill if is_slow else NotingPrefill
    judge.link.estimator.add(10, 0.0, 1.0)
    source = MadeSource(stored.objects)
    engine, report, access = stored.load(source, LoadRequest(PrefillSpeed(1e5), deadline_s), judge, prefill)
    assert (report.fetch, report.received_bytes) == (None, 0)
    if is_slow:
        assert report.decision.why is Why.LINK_SLOWER
        assert access.decisions.counts() == {Decided(Choice.RECOMPUTE, Why.LINK_SLOWER): 96}
    else:
        # What was under way when the headers came goes on.
        assert engine.stopped_tokens == 0
    assert torch.equal(stored.answer(engine), stored.plain_answer())


def test_block_that_waits_to_be_stored_has_none_over_a_link_loaded_whole(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the next turn of a chat: a whole load does not end when the stream should, and nothing is computed."""
    read_whole = Mock(return_value=None)
    monkeypatch.setattr(MadeTier, "get_into", read_whole)
    access, engine = access_of(MadeSource(stored.objects)), StreamedPrefill(stored.model, stored.ids, stored.layout)
    access.queued = lambda object_id: Mock() if object_id == stored.metas[-1].id else None
    Streamed(engine, LoadRequest(SPEED, 0.0), TwoEnded()).load(access, stored.metas, 30.0)
    assert not read_whole.called
    assert torch.equal(stored.answer(engine), stored.plain_answer())


@pytest.mark.parametrize("fault", ["the source dies", "a block is damaged"])
def test_what_does_not_come_is_computed(stored: Stored, fault: str) -> None:
    objects = dict(stored.objects)
    if fault == "a block is damaged":
        data = objects[stored.metas[4].id]
        objects[stored.metas[4].id] = data[:-1] + bytes([data[-1] ^ 1])
        engine, report, _ = stored.load(MadeSource(objects), LoadRequest(SPEED, 0.0), prefill=SlowPrefill)
        assert report.fetch.faults <= 1
    else:
        engine, report, _ = stored.load(MadeSource(objects, cut_bytes=3000), LoadRequest(SPEED, 0.0))
    assert report.tokens == 96
    assert torch.equal(stored.answer(engine), stored.plain_answer())


@pytest.mark.parametrize(("start", "answers"), [(0, [False]), (32, [True, True, False])])
def test_computing_that_is_stopped_leaves_nothing_behind(stored: Stored, start: int, answers: list[bool]) -> None:
    engine = StreamedPrefill(stored.model, stored.ids, stored.layout)
    assert not start or engine.compute(0, start, lambda: True)
    assert not engine.compute(start, 64, iter(answers).__next__)
    assert engine.past.get_seq_length() == start
    assert not start or [layer.keys.shape[2] for layer in engine.past.layers] == [start] * 3
    assert engine.compute(start, 96, lambda: True)
    assert torch.equal(stored.answer(engine), stored.plain_answer())


def test_objects_that_are_not_the_blocks_asked_for_are_not_loaded(stored: Stored) -> None:
    stored.metas = [replace(meta, parent=BlockKey(bytes(32))) for meta in stored.metas]
    _, report, _access = stored.load(MadeSource(stored.objects), LoadRequest(SPEED, 0.5))
    assert (report.decision, report.received_bytes) == (None, 0)


@pytest.fixture
def attached(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CachedModel]:
    """Attach a cache of memory in front of a source, and stream."""

    def attach_to(source: MadeSource) -> CachedModel:
        def stack(store: Any, limits: Limits, clock: Clock, is_pinned: IsPinned, *rest: Any) -> TierStack:
            return TierStack([MemoryTier(1 << 30, clock, is_pinned), MadeTier(source)])

        monkeypatch.setattr("kvtide.store.cache.stack_of", stack)
        return attach(stored.model, "memory://", block_tokens=16, fingerprint=b"tiny", start_within_s=0.0)

    return attach_to


def stored_elsewhere(stored: Stored, folder: Path) -> MadeSource:
    """Store the prompt's blocks by a cache of its own, as another machine does."""
    with attach(stored.model, str(folder), block_tokens=16, fingerprint=b"tiny") as cached:
        cached.generate(torch.tensor([stored.ids]), max_new_tokens=1, do_sample=False)
        assert cached.cache.flush(60)
        tiers = cached.cache.tiers
        return MadeSource({info.id: bytes(read_object(tiers, info.id)) for info in tiers.objects()})


def test_generate_streams_what_is_not_here_which_is_here_for_the_next_call(
    stored: Stored, tmp_path: Path, attached: Callable[..., CachedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.engines.transformers.cached.StreamedPrefill", EndlessPrefill)
    source = stored_elsewhere(stored, tmp_path / "far")
    with attached(source) as cached:
        first = cached.generate(torch.tensor([stored.ids]), **GREEDY)
        # Slow as computing is here, what is stored elsewhere comes over the link.
        assert cached.last is not None and cached.last.streamed is not None and cached.last.hit_tokens == 96
        assert cached.last.streamed.fetch is not None and cached.last.streamed.stored_tokens > 0
        assert cached.cache.access.backfill.flush(60)
        assert cached.cache.flush(60)
        source.objects.clear()
        second = cached.generate(torch.tensor([stored.ids]), **GREEDY)
        decided = parse_decisions(cached.cache.stats().decisions)
    assert torch.equal(first, stored.plain_answer()) and torch.equal(second, first)
    assert (cached.last.streamed, cached.last.hit_tokens) == (None, 96)
    assert decided[Decided(Choice.LOAD, Why.IN_TIME)] == 96


def test_fault_of_streaming_never_fails_the_model(stored: Stored, attached: Callable[..., CachedModel]) -> None:
    source = MadeSource({})
    source.read_range = Mock(side_effect=RuntimeError("a bug"))  # type: ignore[method-assign]
    with attached(source) as cached:
        answer = cached.generate(torch.tensor([stored.ids]), **GREEDY)
    assert torch.equal(answer, stored.plain_answer())


def test_prompt_without_a_whole_block_is_no_fault(stored: Stored, attached: Callable[..., CachedModel]) -> None:
    with attached(MadeSource({})) as cached:
        cached.generate(torch.tensor([stored.ids[:16]]), **GREEDY)
        assert not cached.cache.guarded.counts.all()


def test_cache_that_is_opened_again_keeps_what_came_late(
    stored: Stored, tmp_path: Path, attached: Callable[..., CachedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.engines.transformers.cached.StreamedPrefill", EndlessPrefill)
    with (cached := attached(stored_elsewhere(stored, tmp_path / "far"))):
        pass
    with cached:
        cached.generate(torch.tensor([stored.ids]), **GREEDY)
        assert cached.cache.access.backfill.flush(60)
        assert cached.cache.is_near([meta.id for meta in cached.prefixes.metas(stored.ids[:96])[0]])


def test_headers_that_never_come_cost_nothing(stored: Stored) -> None:
    over, source = threading.Event(), MadeSource({})
    source.read_range = lambda *arguments: over.wait(20.0) and False  # type: ignore[method-assign]
    engine, report, _ = stored.load(source, LoadRequest(SPEED, 0.0), prefill=NotingPrefill)
    over.set()
    # Half of it, as the link may begin at any moment, and then as much again.
    assert engine.passes == [(0, 48), (48, 96)]
    assert (report.computed_tokens, engine.stopped_tokens) == (96, 0)
    assert torch.equal(stored.answer(engine), stored.plain_answer())
