"""Prefixes loaded in part: exact where asked, rough elsewhere, never wrong."""

import math
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import Mock
from weakref import WeakValueDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.servers import running_server
from tests.store.load.sources import (
    AnyOf,
    IdleEngine,
    MadeEngine,
    MadeSource,
    access_of,
    made_job,
    made_objects,
    parsed,
)
from tests.store.test_cache import metas_of
from tests.stores import open_memory, opened, read_object
from tests.suites import smooth_bits

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import SystemClock
from kvtide.codec import Codec, CodecRegistry
from kvtide.codec.base import RawCodec
from kvtide.codec.packed import PackedCodec
from kvtide.codec.published import ChunkwiseCodec
from kvtide.codec.tide import TideCodec
from kvtide.errors import TierUnavailable
from kvtide.importance import packing_orders
from kvtide.plan import LinkEstimate, PrefillSpeed
from kvtide.plan.base import Reason, StreamPolicy
from kvtide.plan.policies import CachegenRule, Layered, TwoEnded
from kvtide.store.load import sparse, streamed
from kvtide.store.load.run import Engine, FetchJob, FetchLimits, FetchReport, FetchRun, LoadRequest, level_job
from kvtide.store.load.sparse import ChunkBits, PackedFront, PackedPart, SparseLoad
from kvtide.store.load.streamed import Streamed
from kvtide.tier.base import Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http.tier import http_tier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, Section
from kvtide.wire import pack_object, parse_object
from kvtide.wire.receiver import Receiver
from kvtide_lab.bench.services import wait_until
from kvtide_lab.bench.shaped import ShapedProxy

REGISTRY = CodecRegistry([fitted(LAYOUT)])
CODEC = PackedCodec(fitted(LAYOUT), 1e-2, 4)
METAS = metas_of(LAYOUT, 3)
BITS = [smooth_bits(LAYOUT, 70 + i) for i in range(3)]
# All tokens, by layer.
WHOLE = np.concatenate(BITS, axis=2)


def a_tier(seed: int = 0, codec: Codec = CODEC) -> MemoryTier:
    tier = open_memory()
    fill_tier(tier, seed, codec)
    return tier


def fill_tier(tier: Tier, seed: int = 0, codec: Codec = CODEC) -> None:
    """Store BITS, packed in orders by chance if the codec packs."""
    rng = np.random.default_rng(seed)
    for meta, bits in zip(METAS, BITS, strict=True):
        sections = codec.encode(meta, bits)
        if isinstance(codec, PackedCodec):
            orders = packing_orders(rng.random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32))
            sections = codec.repack(meta, sections, orders)
        assert tier.put_from(meta.id, pack_object(meta, codec.codec_id, sections, codec.profile))


def stored_chain(blocks: int) -> tuple[list[BlockMeta], MemoryTier]:
    """Blocks stored in orders by chance from the beginning."""
    metas = metas_of(LAYOUT, blocks)
    tier = open_memory()
    for number, meta in enumerate(metas):
        orders = packing_orders(np.random.default_rng(number).random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32))
        sections = CODEC.ordered(orders).encode(meta, BITS[number % 3])
        tier.put_from(meta.id, pack_object(meta, CODEC.codec_id, sections, CODEC.profile))
    return metas, tier


def fetched(load: SparseLoad, layer: int, chunks: NDArray[np.int64]) -> ChunkBits:
    found = [each.result() for each in load.start({layer: chunks})]
    return load.joined([each[layer] for each in found if layer in each])


@given(st.integers(0, 100), st.integers(0, LAYOUT.layers - 1), st.data())
@settings(max_examples=15, deadline=None)
def test_chunks_are_exact_and_hold_the_tokens_that_were_asked_for(seed: int, layer: int, data: st.DataObject) -> None:
    load = SparseLoad(a_tier(seed))
    assert load.open(METAS, REGISTRY) == 3
    tokens = np.array(sorted(data.draw(st.sets(st.integers(0, 3 * LAYOUT.tokens - 1), max_size=9))), dtype=np.int64)
    loaded = fetched(load, layer, load.chunks_with(layer, tokens))
    assert set(tokens.tolist()) <= set(loaded.tokens.tolist())
    assert np.array_equal(loaded.bits, WHOLE[layer][:, loaded.tokens])


def test_a_block_packed_anew_meanwhile_stays_rough() -> None:
    tier = a_tier(1)
    load = SparseLoad(tier)
    load.open(METAS, REGISTRY)
    assert tier.replace(METAS[1].id, read_object(a_tier(2), METAS[1].id))
    loaded = fetched(load, 0, np.arange(3 * load.chunks_per_block))
    assert len(loaded.tokens) < 3 * LAYOUT.tokens
    assert np.array_equal(loaded.bits, WHOLE[0][:, loaded.tokens])


def test_it_ends_before_what_is_absent_damaged_or_of_another_codec() -> None:
    tier = a_tier()
    tier.delete(METAS[2].id, "test")
    assert SparseLoad(tier).open(METAS, REGISTRY) == 2
    assert SparseLoad(a_tier(codec=RawCodec())).open(METAS, REGISTRY) == 0
    assert SparseLoad(a_tier()).open(METAS, CodecRegistry([])) == 0
    damaged = read_object(tier, METAS[0].id)
    damaged[40 * 48] ^= 1
    tier.replace(METAS[0].id, damaged)
    assert SparseLoad(tier).open(METAS, REGISTRY) == 0


@pytest.mark.parametrize("absent", [None, 0, 7, 29])
def test_many_blocks_open_with_few_of_them_read_before_they_are_decoded(absent: int | None) -> None:
    metas, tier = stored_chain(30)
    if absent is not None:
        tier.delete(metas[absent].id, "test")
    load, got = SparseLoad(tier), dict[int, np.ndarray]()
    assert load.open(metas, REGISTRY, got.__setitem__, tokens_ahead=5) == (30 if absent is None else absent)
    assert set(range(load.blocks)) <= set(got)
    if load.blocks:
        loaded = fetched(load, 0, np.arange(load.blocks * load.chunks_per_block))
        whole = np.concatenate([BITS[number % 3][0] for number in range(load.blocks)], axis=1)
        assert np.array_equal(loaded.bits, whole[:, loaded.tokens])
        assert len(loaded.tokens) == load.tokens
    load.close()


def test_leading_chunks_are_exact_from_the_beginning_where_blocks_were_packed_by_uses() -> None:
    load, got = SparseLoad(a_tier()), dict[int, np.ndarray]()
    assert load.open(METAS, REGISTRY, got.__setitem__, tokens_ahead=5) == 3
    assert load.ahead_chunks().tolist() == [0, 4, 8]
    read_bytes = load.read_bytes
    for layer in range(LAYOUT.layers):
        first = fetched(load, layer, load.ahead_chunks())
        stored = np.concatenate([got[block][layer] for block in range(3)], axis=1)
        assert np.array_equal(first.bits, stored[:, first.tokens])
        assert np.array_equal(first.bits, WHOLE[layer][:, first.tokens])
    assert load.read_bytes - read_bytes == 3 * LAYOUT.raw_bytes * 4 // LAYOUT.tokens
    load.close()


def test_a_damaged_leading_chunk_leaves_its_tokens_rough() -> None:
    tier = a_tier()
    damaged = read_object(tier, METAS[0].id)
    entries = parse_object(damaged, METAS[0].id).entries
    damaged[next(entry.offset for entry in entries if entry.id.refinement == 1)] ^= 1
    assert tier.replace(METAS[0].id, damaged)
    load = SparseLoad(tier)
    assert load.open(METAS, REGISTRY, tokens_ahead=4) == 3
    tokens = fetched(load, 0, load.ahead_chunks()).tokens
    assert len(tokens) and tokens.min() >= LAYOUT.tokens


def test_a_block_whose_leading_chunks_matter_comes_by_one_read() -> None:
    """Once the first two have told how much that is; a base that is longer than the last one takes another read."""
    metas, tier = stored_chain(30)
    load = SparseLoad(tier)
    assert load.open(metas, REGISTRY, tokens_ahead=8) == 30
    assert load.reads <= 30 + 2 * 3 + 28 / 2 + 7
    load.close()


def test_the_rest_of_a_block_comes_by_one_read_and_is_exact() -> None:
    metas, tier = stored_chain(3)
    load, got = SparseLoad(tier), dict[int, np.ndarray]()
    load.open(metas, REGISTRY, got.__setitem__, tokens_ahead=8)
    before = load.reads
    rest = np.setdiff1d(np.arange(3 * load.chunks_per_block), load.ahead_chunks())
    for block in load.start(dict.fromkeys(range(LAYOUT.layers), rest)):
        for layer, loaded in block.result().items():
            position = int(loaded.tokens[0]) // LAYOUT.tokens
            got[position][layer][:, loaded.tokens % LAYOUT.tokens] = loaded.bits
    assert load.reads - before == 3
    assert all(np.array_equal(got[position], BITS[position]) for position in range(3))
    load.close()


def test_chunks_of_a_block_come_by_one_request_from_a_server_and_not_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        running_server(tiers=("memory://",)) as server,
        ShapedProxy((server.address.host, server.address.port), lambda s: 1e9 * s) as relay,
        opened(http_tier(f"http://127.0.0.1:{relay.port}", SystemClock())) as tier,
    ):
        fill_tier(tier)
        monkeypatch.setattr(sparse, "GAP_BYTES", 0)
        load = SparseLoad(tier)
        assert load.open(METAS, REGISTRY) == 3
        wanted = {layer: np.array([0, 2]) for layer in range(LAYOUT.layers)}
        reads, requests = load.reads, relay.requests
        (found,) = [block.result() for block in load.start(wanted)]
        assert (load.reads - reads, relay.requests - requests) == (2, 1)
        for layer, loaded in found.items():
            assert np.array_equal(loaded.bits, BITS[0][layer][:, loaded.tokens])
        load.close()


def test_sections_are_read_together_unless_more_than_a_gap_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a_tier()
    for gap_bytes, reads in ((0, 2), (1 << 20, 1)):
        monkeypatch.setattr(sparse, "GAP_BYTES", gap_bytes)
        load = SparseLoad(tier)
        load.open(METAS, REGISTRY)
        before = load.reads
        assert len(fetched(load, 0, np.array([0, 2])).tokens) == (12 if gap_bytes else 8)  # What lies between is used.
        assert load.reads - before == reads
        load.close()


@pytest.mark.parametrize("reads", range(9))
@pytest.mark.parametrize("is_fault", [True, False])
def test_a_read_that_fails_or_is_of_what_is_packed_anew_removes_nothing(is_fault: bool, reads: int) -> None:
    """Through a stack a fault is None, which was taken for an object without bytes."""
    tier, anew, numbers = a_tier(1), read_object(a_tier(2), METAS[0].id), count()
    happens = Mock(side_effect=TierUnavailable("made to fail") if is_fault else lambda: tier.replace(METAS[0].id, anew))
    get_into = tier.get_into
    tier.get_into = lambda *each: (next(numbers) == reads and happens(), get_into(*each))[1]  # type: ignore[method-assign]
    with opened(TierStack([tier])) as stack:
        load = SparseLoad(stack, lambda object_id, error: tier.delete(object_id, "corrupt"))
        chunks = np.arange(load.open(METAS, REGISTRY) * load.chunks_per_block)
        assert all(each.result() is not None for each in load.start({0: chunks}))
        assert all(tier.contains(meta.id) for meta in METAS)


def test_reads_of_fronts_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def brings_nothing(*arguments: Any) -> None:
        time.sleep(min(60.0, max(0.0, caller_deadline_s() - time.monotonic())))
        raise TierUnavailable("nothing came")

    metas, tier = stored_chain(3)
    monkeypatch.setattr(tier, "get_into", brings_nothing)
    began_s = time.monotonic()
    assert SparseLoad(tier).open(metas, REGISTRY, deadline_s=began_s + 0.2) == 0
    assert time.monotonic() - began_s < 30.0


def test_fronts_are_let_go_once_they_are_decoded() -> None:
    metas, tier = stored_chain(60)
    read, most = list[weakref.ref[object]](), 0

    class Watched(SparseLoad):
        def _decode(self, front: PackedFront, sink: Callable[[BlockBits], None]) -> PackedPart:
            nonlocal most
            read.append(weakref.ref(front.data.obj))
            most = max(most, sum(each() is not None for each in read))
            return super()._decode(front, sink)

    assert Watched(tier).open(metas, REGISTRY) == 60
    assert most < 30


@pytest.mark.parametrize("last", ["has fewer refinements", "is over the bound", "can't be decoded", "is damaged"])
def test_stream_ends_before_a_block_that_can_not_come_with_others(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChunkwiseCodec(2) if "damaged" in last else TideCodec(fitted(LAYOUT))
    codec = TideCodec(fitted(LAYOUT), refinements=1) if "fewer" in last else first
    sections = [Section(each.id, bytes(each.data)["decoded" in last :]) for each in codec.encode(METAS[2], BITS[2])]
    data, tier = pack_object(METAS[2], codec.codec_id, sections, codec.profile), a_tier(codec=first)
    data[-1] ^= "damaged" in last
    assert tier.replace(METAS[2].id, data)
    monkeypatch.setattr(streamed, "_RECEIVE_BYTES_MAX", sum(each.size for each in tier.objects()) - ("bound" in last))
    with opened(TierStack([tier])) as stack:
        access = access_of(stack)
        access.registry = REGISTRY
        load = Streamed(Mock(), LoadRequest(PrefillSpeed(1.0), 30.0), Layered(), computes=False)
        assert load.load(access, METAS, 30.0).blocks == 2
        assert tier.contains(METAS[2].id) == ("fewer" in last or "bound" in last)
        access.backfill.close()


def test_a_whole_load_keeps_no_copy_of_what_was_appended() -> None:
    access, alive, counts = access_of(MadeSource({})), WeakValueDictionary[int, BlockBits](), list[int]()
    access.queued = lambda object_id: lambda: BITS[0]
    engine = Mock(append=lambda block, bits: alive.update({block: bits}) or counts.append(len(alive)))
    Streamed(engine, LoadRequest(PrefillSpeed(1.0), 0.0), Layered()).load(access, METAS, 30.0)
    assert counts == [1, 1, 1]


OBJECTS = made_objects(6)
ALL_BYTES = 6 * 10_000


def load(
    job: FetchJob,
    policy: StreamPolicy,
    *sources: MadeSource,
    engine: Engine | None = None,
    limits: FetchLimits | None = None,
    give_up_s: float = math.inf,
) -> tuple[FetchReport, list[Receiver]]:
    receivers = [Receiver(stored) for stored in job.objects]
    bounds, clock = limits or FetchLimits(retry_s=0.01), SystemClock()
    run = FetchRun(job, receivers, policy, AnyOf(*sources), LinkEstimate(), clock, bounds, give_up_s)
    run.start()
    report = run.until_ready(engine or IdleEngine())
    for receiver in receivers:
        receiver.check()
    return report, receivers


def test_both_ends_work_and_meet() -> None:
    # The engine has a block every 50 ms, the link a base every 60 ms.
    engine = MadeEngine(tokens_per_s=200)
    job = made_job(OBJECTS, deadline_s=0.0, tokens_per_s=200)
    report, _ = load(job, TwoEnded(), MadeSource(OBJECTS, bytes_per_s=5e4), engine=engine)
    computed = engine.spans[-1][1] // 10
    # Half of what nobody had begun with, in one pass; then what the link has left.
    assert engine.spans[0] == (0, 30)
    assert [stop for _, stop in engine.spans[:-1]] == [start for start, _ in engine.spans[1:]]
    assert 3 <= computed <= 6
    assert all(report.progress.here[chunk] for chunk in range(computed, 6))


def test_threads_without_work_leave_the_engine_alone() -> None:
    # All is text: the engine computes for 0.6 s, and there is nothing to fetch.
    job = level_job([parsed(OBJECTS)], [(0, 30), (30, 60)], (0.3,), LoadRequest(PrefillSpeed(1000.0), 5.0))
    engine, policy = MadeEngine(100.0), Mock(wraps=CachegenRule())
    load(job, policy, MadeSource(OBJECTS), engine=engine, limits=FetchLimits())
    assert engine.spans == [(0, 60)]
    # Four threads look every 50 ms; waking each other they did so 10,000 times a second.
    assert policy.plan.call_count < 500


def test_dead_source_leaves_all_to_the_engine() -> None:
    source, engine = MadeSource(OBJECTS), MadeEngine(tokens_per_s=1000)
    source.is_down = True
    report, _ = load(made_job(OBJECTS, 0.02, tokens_per_s=1000), TwoEnded(), source, engine=engine)
    assert (report.kl, report.received_bytes, engine.spans[-1][1]) == (0.0, 0, 60)


# The second one is given up once, and not for each chunk: six, one after the other, would take two minutes.
@pytest.mark.parametrize(("read_s_max", "give_up_after_s", "ready_s_max"), [(0.2, math.inf, 20.0), (20.0, 0.3, 10.0)])
def test_without_engine_a_dead_source_ends_a_load(
    read_s_max: float, give_up_after_s: float, ready_s_max: float
) -> None:
    source, limits = MadeSource(OBJECTS), FetchLimits(read_s_max=read_s_max, retry_s=0.01)
    source.is_down = True
    give_up_s = SystemClock().monotonic_s() + give_up_after_s
    report, receivers = load(made_job(OBJECTS, 0.1), Layered(), source, limits=limits, give_up_s=give_up_s)
    assert report.kl == math.inf
    assert report.ready_s < ready_s_max
    assert not any(receiver.sections() for receiver in receivers)


def test_error_that_nobody_expects_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    # The thread that met it ended, and its range was awaited for good.
    source = MadeSource(OBJECTS)
    monkeypatch.setattr(source, "_read", lambda *arguments: 1 / 0)
    assert load(made_job(OBJECTS, 0.1), Layered(), source)[0].kl == math.inf


def test_load_fetches_with_the_threads_that_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start = list[threading.Thread](), threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    # What had begun looked for something to fetch for good, and the load failed.
    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert load(made_job(OBJECTS, 20.0), Layered(), MadeSource(OBJECTS))[0].progress.here == (3,) * 6
    begun[0].join(10)
    assert not begun[0].is_alive()


def test_reads_that_break_off_go_on_where_they_stopped() -> None:
    sources = [MadeSource(OBJECTS, cut_bytes=700), MadeSource(OBJECTS, cut_bytes=1100)]
    report, _ = load(made_job(OBJECTS, deadline_s=20.0), Layered(), *sources)
    assert report.progress.here == (3,) * 6
    assert report.faults > 10
    assert report.received_bytes == sum(source.served_bytes for source in sources) == ALL_BYTES


def test_damaged_base_is_computed() -> None:
    # After the deadline the first chunks' bases are here; the damaged one is computed on top of them.
    job = made_job(OBJECTS, deadline_s=0.0, tokens_per_s=50)
    report, _ = load(job, TwoEnded(), MadeSource(damaged_in(4, 1)), engine=MadeEngine(tokens_per_s=50))
    assert not report.progress.here[4]
    assert 4 in report.progress.computed
    assert report.faults == 1


def damaged_in(block: int, section: int) -> dict[ObjectId, bytes]:
    """Return the objects, with one bit of a section flipped."""
    (object_id, data), offset = list(OBJECTS.items())[block], parsed(OBJECTS)[block].entries[section].offset
    return {**OBJECTS, object_id: data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]}


def test_damaged_refinement_costs_its_own_quality_only() -> None:
    # Met by all others being whole.
    job = made_job(OBJECTS, deadline_s=20.0, goal=0.1)
    report, _ = load(job, Layered(), MadeSource(damaged_in(0, 2)))
    assert report.progress.here == (1, 3, 3, 3, 3, 3)


def test_only_what_keeps_the_link_busy_is_in_flight() -> None:
    # The first byte comes with the first part of 500 bytes: 10 ms at this rate, so that little is asked for ahead. On a
    # machine that was held up it came later, once.
    tries = [MadeSource(OBJECTS, bytes_per_s=5e4) for _ in range(3)]
    for source in tries:
        load(made_job(OBJECTS, deadline_s=0.5), Layered(), source)
    assert 1 <= min(source.reading_max for source in tries) <= 2
    limited = MadeSource(OBJECTS)
    load(made_job(OBJECTS, deadline_s=5.0), Layered(), limited, limits=FetchLimits(requests_max=2))
    assert limited.reading_max <= 2


def test_nothing_is_taken_after_the_load() -> None:
    source = MadeSource(OBJECTS, bytes_per_s=5e4)
    _, receivers = load(made_job(OBJECTS, deadline_s=0.45), Layered(), source)
    before = [receiver.missing() for receiver in receivers]
    time.sleep(0.2)
    assert [receiver.missing() for receiver in receivers] == before
    assert any(before)


def test_levels_are_loaded_one_for_each_chunk() -> None:
    small, large = made_objects(3, (1000,)), made_objects(3, (9000,), seed=1)
    spans = [(0, 10), (10, 20), (20, 30)]
    job = level_job([parsed(small), parsed(large)], spans, (0.3, 0.1), LoadRequest(PrefillSpeed(0.1), 30.0))
    # A middle level, the smaller of two, first; then all large ones would take 1.8 s, if the estimate is right.
    source = MadeSource({**small, **large}, bytes_per_s=1e4)
    report, receivers = load(job, CachegenRule(), source)
    assert report.progress.here == (1, 2, 2)
    assert (report.reasons, report.received_bytes) == ({Reason.FIRST: 1, Reason.LEVEL: 2}, 19_000)
    assert [bool(receiver.sections()) for receiver in receivers] == [True, False, False, False, True, True]


def test_object_that_no_source_has_ends_its_fetch_at_once() -> None:
    absent = list(OBJECTS)[2]
    partly = {object_id: data for object_id, data in OBJECTS.items() if object_id != absent}
    report, _ = load(made_job(OBJECTS, deadline_s=30.0), Layered(), MadeSource(partly), MadeSource(partly))
    assert report.progress.here == (3, 3, 0, 3, 3, 3)
    assert report.ready_s < 20.0


def test_errors_of_the_engine_reach_the_caller_and_end_the_load() -> None:
    with pytest.raises(AssertionError, match="asked to compute"):
        load(made_job(OBJECTS, deadline_s=5.0), TwoEnded(), MadeSource(OBJECTS, bytes_per_s=1e4))
    wait_until(lambda: not any(each.name.startswith("kvtide-fetch") for each in threading.enumerate()), "its threads")
