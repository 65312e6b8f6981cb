from __future__ import annotations

import time

import numpy as np
import pytest
from tests.store.load.sources import KL, STEP_BYTES, AnyOf, MadeSource, made_objects, parsed

from kvtide.clock import SystemClock
from kvtide.errors import CorruptPayload
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import Progress, is_ready
from kvtide.store.load.run import LoadRequest, ObjectRange, layered_job, level_job
from kvtide.tier.ram import MemoryTier
from kvtide.tier.source import read_heads

OBJECTS = made_objects(4)
STORED = parsed(OBJECTS)
WISH = LoadRequest(PrefillSpeed(100.0), 1.0)


def test_steps_are_ranges_of_each_block_of_a_chunk() -> None:
    job = layered_job(STORED, [(0, 10), (10, 40)], KL, WISH)
    body = STORED[0].entries[0].offset
    assert [chunk.sizes for chunk in job.request.chunks] == [STEP_BYTES, tuple(3 * size for size in STEP_BYTES)]
    assert job.pieces[0] == (
        (ObjectRange(0, body, body + 3000),),
        (ObjectRange(0, body + 3000, body + 5000),),
        (ObjectRange(0, body + 5000, body + 10_000),),
    )
    assert [piece.block for piece in job.pieces[1][2]] == [1, 2, 3]


def test_levels_are_whole_bodies_of_other_objects() -> None:
    small = parsed(made_objects(2, (1000,)))
    large = parsed(made_objects(2, (4000,), seed=1))
    job = level_job([small, large], [(0, 20)], (0.3, 0.1), WISH)
    assert job.request.chunks[0].sizes == (2000, 8000)
    assert not job.request.is_layered
    assert [[piece.block for piece in step] for step in job.pieces[0]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("spans", [[(0, 5), (5, 40)], [(0, 10)], [(0, 50)], [(0, 10), (20, 40)]])
def test_chunks_that_are_not_whole_blocks_of_all_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"whole blocks|chunks end|starts at token"):
        layered_job(STORED, spans, KL, WISH)


@pytest.mark.parametrize(("goal", "raised"), [(0.01, True), (0.02, True), (0.005, False), (0.0, False)])
def test_whole_objects_are_enough_for_the_goal_they_were_stored_for(goal: float, raised: bool) -> None:
    # The law says that the newest block alone loses more than the codec's curve has for all.
    by_block = np.array([[[0.2, 0.1, 0.01], [0.2, 0.1, 0.01], [0.2, 0.1, 0.01], [0.5, 0.3, 0.02]]])
    job = layered_job(STORED, [(0, 20), (20, 40)], KL, WISH._replace(kl_goal=goal), by_block)
    assert job.request.kl_goal == (pytest.approx(0.05) if raised else goal)
    everything = Progress(0.1, (3, 3), (3, 3), is_layered=True)
    assert is_ready(job.request, everything) is raised


def test_wrong_number_of_losses_is_refused() -> None:
    with pytest.raises(ValueError, match="a loss for each of 3 steps, got 2"):
        layered_job(STORED, [(0, 40)], KL[:2], WISH)


def test_objects_that_are_no_run_are_refused() -> None:
    with pytest.raises(CorruptPayload, match="blocks of 10 tokens one behind the other"):
        layered_job(STORED[::2], [(0, 20)], KL, WISH)
    with pytest.raises(CorruptPayload, match="same refinements, got \\[3, 1\\]"):
        layered_job([STORED[0], parsed(made_objects(2, (50,)))[1]], [(0, 20)], KL, WISH)
    with pytest.raises(CorruptPayload, match="same refinements"):
        layered_job([], [], KL, WISH)
    with pytest.raises(CorruptPayload, match=r"every block at every level, got \[4, 3\]"):
        level_job([STORED, STORED[:3]], [(0, 40)], (0.2, 0.1), WISH)


def test_heads_of_a_run_are_read_exactly_and_once() -> None:
    source = MadeSource(OBJECTS, part=100_000)
    heads = read_heads(source, list(OBJECTS), time.monotonic() + 5.0, 4)
    assert [head.version_tag for head in heads] == [stored.version_tag for stored in STORED]
    assert source.served_bytes == sum(len(stored.head) for stored in STORED)
    # Two reads for the first, whose table is of unknown size, one for each of the others.
    assert len(source.served) == 5


def test_heads_end_before_what_is_absent_or_damaged() -> None:
    ids = list(OBJECTS)
    partly = {object_id: OBJECTS[object_id] for object_id in ids if object_id != ids[2]}
    assert len(read_heads(MadeSource(partly), ids, time.monotonic() + 5.0, 2)) == 2
    assert len(read_heads(AnyOf(MadeSource(partly), MadeSource(OBJECTS)), ids, time.monotonic() + 5.0, 2)) == 4
    damaged = {**OBJECTS, ids[0]: b"x" * 5000}
    assert read_heads(MadeSource(damaged), ids, time.monotonic() + 5.0, 2) == []
    assert read_heads(MadeSource(OBJECTS), [], time.monotonic() + 5.0, 2) == []


def test_tier_is_a_source_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.base.SLICE_BYTES", 1000)
    object_id, data = next(iter(OBJECTS.items()))
    tier, parts = MemoryTier(1 << 20, SystemClock(), lambda key: False), list[bytes]()
    tier.open()
    tier.put_from(object_id, data)

    def take(part: memoryview) -> bool:
        parts.append(bytes(part))
        return len(parts) < 3

    assert tier.read_range(object_id, 100, 5000, take)
    assert b"".join(parts) == data[100:3100]
    assert not tier.read_range(object_id, len(data) - 10, len(data) + 10, lambda part: True)
    tier.close()
