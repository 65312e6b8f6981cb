"""Prefixes loaded in part: exact where asked, rough elsewhere, never wrong."""

import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.servers import running_server

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import ManualClock, SystemClock
from kvtide.codec import Codec, CodecRegistry
from kvtide.codec.base import RawCodec
from kvtide.codec.packed import PackedCodec
from kvtide.errors import TierUnavailable
from kvtide.importance import packing_orders
from kvtide.store.load import sparse
from kvtide.store.load.sparse import PackedFront, PackedPart, SparseLoad
from kvtide.testing import block_meta, smooth_bits
from kvtide.tier.base import WrappedTier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.http.tier import http_tier
from kvtide.tier.ram import MemoryTier
from kvtide.types import BlockKey, ObjectId
from kvtide.wire import pack_object, parse_object
from kvtide_lab.bench.shaped import ShapedProxy

REGISTRY = CodecRegistry([fitted(LAYOUT)])
CODEC = PackedCodec(fitted(LAYOUT), 1e-2, 4)


def chain(blocks: int) -> list[BlockMeta]:
    metas = [block_meta(LAYOUT, i * LAYOUT.tokens, i + 1) for i in range(blocks)]
    return [
        BlockMeta(
            ObjectId(metas[0].id.namespace, meta.id.key),
            metas[i - 1].id.key if i else BlockKey(metas[0].id.namespace),
            i * LAYOUT.tokens,
            LAYOUT,
        )
        for i, meta in enumerate(metas)
    ]


METAS = chain(3)
BITS = [smooth_bits(LAYOUT, 70 + i) for i in range(3)]


def a_tier(seed: int = 0, codec: Codec = CODEC) -> MemoryTier:
    tier = MemoryTier(1 << 22, ManualClock(), lambda key: False)
    tier.open()
    rng = np.random.default_rng(seed)
    for meta, bits in zip(METAS, BITS, strict=True):
        sections = codec.encode(meta, bits)
        if isinstance(codec, PackedCodec):
            orders = packing_orders(rng.random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32))
            sections = codec.repack(meta, sections, orders)
        tier.put_from(meta.id, pack_object(meta, codec.codec_id, sections, codec.profile))
    return tier


def stored_chain(blocks: int) -> tuple[list[BlockMeta], MemoryTier]:
    """Blocks stored in orders by chance from the beginning."""
    metas = chain(blocks)
    tier = MemoryTier(1 << 24, ManualClock(), lambda key: False)
    tier.open()
    for number, meta in enumerate(metas):
        orders = packing_orders(np.random.default_rng(number).random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32))
        sections = CODEC.ordered(orders).encode(meta, BITS[number % 3])
        tier.put_from(meta.id, pack_object(meta, CODEC.codec_id, sections, CODEC.profile))
    return metas, tier


@given(st.integers(0, 100), st.integers(0, LAYOUT.layers - 1), st.data())
@settings(max_examples=15, deadline=None)
def test_chunks_are_exact_and_hold_the_tokens_that_were_asked_for(seed: int, layer: int, data: st.DataObject) -> None:
    load = SparseLoad(a_tier(seed))
    assert load.open(METAS, REGISTRY) == 3
    tokens = np.array(sorted(data.draw(st.sets(st.integers(0, 3 * LAYOUT.tokens - 1), max_size=9))), dtype=np.int64)
    loaded = load.fetch(layer, load.chunks_with(layer, tokens))
    assert set(tokens.tolist()) <= set(loaded.tokens.tolist())
    whole = np.concatenate([bits[layer] for bits in BITS], axis=1)
    assert np.array_equal(loaded.bits, whole[:, loaded.tokens])


def test_only_what_is_asked_for_is_read() -> None:
    load = SparseLoad(a_tier())
    load.open(METAS, REGISTRY)
    before = load.read_bytes
    loaded = load.fetch(0, np.array([0, 5]))
    assert load.read_bytes - before == loaded.bits.nbytes


def test_a_block_packed_anew_meanwhile_stays_rough() -> None:
    tier = a_tier(1)
    load = SparseLoad(tier)
    load.open(METAS, REGISTRY)
    other = bytearray(1 << 20)
    size = a_tier(2).get_into(METAS[1].id, memoryview(other))
    assert size and tier.replace(METAS[1].id, other[:size])
    loaded = load.fetch(0, np.arange(3 * load.chunks_per_block))
    whole = np.concatenate([bits[0] for bits in BITS], axis=1)
    assert load.damaged_chunks and len(loaded.tokens) < whole.shape[1]
    assert np.array_equal(loaded.bits, whole[:, loaded.tokens])


def test_it_ends_before_what_is_absent_damaged_or_of_another_codec() -> None:
    tier = a_tier()
    tier.delete(METAS[2].id, "test")
    assert SparseLoad(tier).open(METAS, REGISTRY) == 2
    assert SparseLoad(a_tier(codec=RawCodec())).open(METAS, REGISTRY) == 0
    assert SparseLoad(a_tier()).open(METAS, CodecRegistry([])) == 0
    damaged = bytearray(1 << 20)
    size = tier.get_into(METAS[0].id, memoryview(damaged)) or 0
    damaged[40 * 48] ^= 1
    tier.replace(METAS[0].id, damaged[:size])
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
        loaded = load.fetch(0, np.arange(load.blocks * load.chunks_per_block))
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
        first = load.fetch(layer, load.ahead_chunks())
        stored = np.concatenate([got[block][layer] for block in range(3)], axis=1)
        assert np.array_equal(first.bits, stored[:, first.tokens])
        assert np.array_equal(first.bits, np.concatenate([bits[layer] for bits in BITS], axis=1)[:, first.tokens])
    assert load.read_bytes - read_bytes == 3 * LAYOUT.raw_bytes * 4 // LAYOUT.tokens
    load.close()


def test_a_damaged_leading_chunk_leaves_its_tokens_rough() -> None:
    tier = a_tier()
    whole = bytearray(1 << 20)
    size = tier.get_into(METAS[0].id, memoryview(whole))
    stored = parse_object(memoryview(whole)[:size], METAS[0].id)
    entry = next(entry for entry in stored.entries if entry.id.refinement == 1)
    whole[entry.offset] ^= 1
    assert size and tier.replace(METAS[0].id, whole[:size])
    load = SparseLoad(tier)
    assert load.open(METAS, REGISTRY, tokens_ahead=4) == 3
    assert load.damaged_chunks == 1


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


def test_chunks_of_a_block_come_by_one_request_from_a_server_and_not_by_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        running_server(tiers=("memory://",)) as server,
        ShapedProxy((server.address.host, server.address.port), lambda s: 1e9 * s) as relay,
    ):
        tier = http_tier(f"http://127.0.0.1:{relay.port}", SystemClock())
        tier.open()
        for info in (memory := a_tier()).objects():
            data = memoryview(bytearray(info.size))
            memory.get_into(info.id, data)
            assert tier.put_from(info.id, data)
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
        tier.close()


def test_sections_are_read_together_unless_more_than_a_gap_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a_tier()
    for gap_bytes, reads in ((0, 2), (1 << 20, 1)):
        monkeypatch.setattr(sparse, "GAP_BYTES", gap_bytes)
        load = SparseLoad(tier)
        load.open(METAS, REGISTRY)
        before = load.reads
        assert len(load.fetch(0, np.array([0, 2])).tokens) == (12 if gap_bytes else 8)  # What lies between is used.
        assert load.reads - before == reads
        load.close()


class Waited(WrappedTier):
    """Reads as a link does that brings nothing: until the deadline of the thread that asks."""

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        time.sleep(min(60.0, max(0.0, caller_deadline_s() - time.monotonic())))
        raise TierUnavailable("nothing came")


def test_reads_of_fronts_end_at_the_deadline() -> None:
    metas, tier = stored_chain(3)
    began_s = time.monotonic()
    assert SparseLoad(Waited(tier)).open(metas, REGISTRY, deadline_s=began_s + 0.2) == 0
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
