"""Use records and packing: what merging may never depend on, bytes that are no record, chunks that a choice reads."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtide import importance as uses
from kvtide.errors import CorruptPayload
from kvtide.types import BlockKey, Namespace, ObjectId

KEY = BlockKey(bytes(range(32)))
EMPTY = uses.UseRecord(KEY, 2, 3)
ENTRIES = st.builds(
    uses.UseEntry,
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([0.0, 1.5]).map(lambda mean: np.full((2, 3), mean, dtype=np.float16)),
)
# Few writers and few values, so that all kinds of ties come up; more writers than a record keeps.
RECORDS = st.dictionaries(st.integers(0, 11).map(lambda n: bytes([n]) * 8), ENTRIES, max_size=12).map(
    lambda entries: EMPTY.merged(uses.UseRecord(KEY, 2, 3, entries))
)


@given(RECORDS, RECORDS, RECORDS)
def test_merging_does_not_depend_on_order_or_repetition(
    a: uses.UseRecord, b: uses.UseRecord, c: uses.UseRecord
) -> None:
    whole = a.merged(b).merged(c).to_bytes()
    assert whole == a.merged(b.merged(c)).to_bytes() == c.merged(a).merged(b).merged(a).to_bytes()
    assert a.merged(a).to_bytes() == a.to_bytes()
    assert len(a.merged(b).merged(c).entries) <= uses.WRITERS_MAX


@given(RECORDS)
def test_a_record_survives_its_bytes(record: uses.UseRecord) -> None:
    assert uses.UseRecord.parse(record.to_bytes(), KEY, 2, 3).to_bytes() == record.to_bytes()


@given(st.data())
def test_damaged_records_are_refused(data: st.DataObject) -> None:
    stored = bytearray(EMPTY.noted(b"writer-1", np.ones((2, 3), dtype=np.float32), 5.0).to_bytes())
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(stored)))
    with pytest.raises(CorruptPayload):
        uses.UseRecord.parse(stored[:cut], KEY, 2, 3)


def test_a_record_of_another_block_is_refused() -> None:
    with pytest.raises(CorruptPayload, match="not this block's"):
        uses.UseRecord.parse(EMPTY.to_bytes(), BlockKey(bytes(32)), 2, 3)
    with pytest.raises(ValueError, match="two blocks"):
        EMPTY.merged(uses.UseRecord(BlockKey(bytes(32)), 2, 3))


def _scores(record: uses.UseRecord, time_s: float) -> NDArray[np.float32]:
    scores = record.scores(time_s)
    assert scores is not None
    return scores


def test_scores_are_means_over_uses_of_all_writers() -> None:
    one, other = np.full((2, 3), 1.0, dtype=np.float32), np.full((2, 3), 4.0, dtype=np.float32)
    record = EMPTY.noted(b"writer-1", one, 0.0).noted(b"writer-1", one, 0.0).noted(b"writer-2", other, 0.0)
    assert np.allclose(_scores(record, 0.0), 2.0)
    assert record.uses() == 3
    assert EMPTY.scores(0.0) is None


def test_old_uses_fade() -> None:
    old, new = np.full((2, 3), 3.0, dtype=np.float32), np.zeros((2, 3), dtype=np.float32)
    record = EMPTY.noted(b"writer-1", old, 0.0).noted(b"writer-1", new, uses.HALF_LIFE_S)
    assert np.allclose(_scores(record, uses.HALF_LIFE_S), 1.0, rtol=1e-3)


def test_importance_that_is_none_is_refused() -> None:
    for bad in (np.ones((3, 2)), np.full((2, 3), np.nan), np.full((2, 3), -1.0)):
        with pytest.raises(ValueError, match="importance"):
            EMPTY.noted(b"writer-1", bad.astype(np.float32), 0.0)


def test_a_record_lies_beside_its_block() -> None:
    block = ObjectId(Namespace(bytes(32)), KEY)
    assert uses.record_id(block).namespace == block.namespace and uses.record_id(block).key != KEY


def golden_record() -> uses.UseRecord:
    importance = np.arange(6, dtype=np.float32).reshape(2, 3)
    record = uses.UseRecord(BlockKey(b"b" * 32), 2, 3)
    return record.noted(b"writer-1", importance, 1e9).noted(b"writer-2", 3 - importance / np.float32(2), 1e9 + 60)


def test_golden_bytes_are_still_written_and_read() -> None:
    stored = (Path(__file__).parent.parent / "golden" / "uses-1.kvu").read_bytes()
    record = golden_record()
    assert record.to_bytes() == stored
    found = uses.UseRecord.parse(stored, record.block, record.layers, record.tokens)
    assert (found.block, found.uses()) == (record.block, 2)
    assert np.array_equal(_scores(found, 1e9 + 60), _scores(record, 1e9 + 60))


@given(st.integers(1, 4), st.integers(1, 70), st.integers(0, 5))
def test_an_order_has_every_token_once_the_most_important_first(layers: int, tokens: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, (layers, tokens)).astype(np.float32)
    orders = uses.packing_orders(scores)
    assert uses.is_order(orders)
    assert (np.diff(np.take_along_axis(scores, orders.astype(np.int64), axis=1), axis=1) <= 0).all()


@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 33), st.floats(0, 1), st.integers(0, 5))
def test_chunks_hold_what_was_asked_for_and_no_chunk_more(
    blocks: int, tokens: int, chunk: int, ratio: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(tokens) for _ in range(blocks)]).astype(np.uint16)
    count = int(ratio * blocks * tokens)
    chosen = uses.select_chunks(rng.random((blocks, tokens), dtype=np.float32), orders, count, chunk)
    per_block = -(-tokens // chunk)
    sizes = [min(chunk, tokens - number % per_block * chunk) for number in chosen]
    assert sum(sizes) >= count and (not sizes or sum(sizes) - max(sizes) < count or count == 0)
    assert len(set(chosen)) == len(chosen)


def test_what_must_come_comes() -> None:
    importance = np.zeros((1, 64), dtype=np.float32)
    importance[0, [5, 40]] = np.inf
    identity = np.arange(64, dtype=np.uint16)[None]
    assert uses.select_chunks(importance, identity, 1, 16).tolist() == [0, 2]


def test_packing_by_uses_brings_important_tokens_together() -> None:
    scores = np.zeros((2, 256), dtype=np.float32)
    scores[:, ::8] = 1
    identity = np.tile(np.arange(256, dtype=np.uint16), (2, 1))
    assert uses.shares_touched(scores, identity, 1 / 8, 32) == (1.0, 1 / 8)
    assert uses.shares_touched(scores, uses.packing_orders(scores), 1 / 8, 32) == (1 / 8, 1 / 8)


def test_bad_scores_are_refused() -> None:
    for bad in (np.zeros(3), np.full((1, 3), np.nan)):
        with pytest.raises(ValueError, match="finite"):
            uses.packing_orders(bad.astype(np.float32))
