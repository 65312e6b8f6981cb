"""Blocks kept as pages: how many, which go first, which earn a place."""

from __future__ import annotations

from typing import Any

from kvtide.engines.paged.loads import KeptBlocks
from kvtide.types import BlockKey, Namespace, ObjectId

SPACE = Namespace(bytes(32))
A, B, C = (ObjectId(SPACE, BlockKey(bytes([number]) * 32)) for number in range(3))


def _captured() -> Any:
    return object()


def test_what_was_used_last_goes_last() -> None:
    kept, block = KeptBlocks(250, 100, lambda object_id: True), _captured()
    kept.put(A, block)
    kept.put(B, _captured())
    assert kept.leading([A, C]) == [block]
    kept.put(C, _captured())
    kept.check()
    assert [len(kept.leading([each])) for each in (A, B, C)] == [1, 0, 1]


def test_second_load_earns_a_place() -> None:
    kept = KeptBlocks(100, 100, lambda object_id: True)
    assert [kept.is_loaded_again(A) for _ in range(3)] == [False, True, False]
    assert not kept.is_loaded_again(B)


def test_without_room_for_a_block_nothing_is_kept() -> None:
    kept = KeptBlocks(99, 100, lambda object_id: True)
    kept.put(A, _captured())
    kept.check()
    assert kept.leading([A]) == []
    assert [kept.is_loaded_again(A) for _ in range(2)] == [False, False]
