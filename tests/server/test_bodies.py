"""Buffers for bodies: one cap over all sizes, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import QueueFull
from kvtide.server.http import BodyBuffers
from kvtide.tier.buffers import is_aligned


def test_buffer_is_aligned_and_used_again() -> None:
    buffers = BodyBuffers(1 << 20)
    first = buffers.take(100_000)
    assert first is not None and len(first) >= 100_000 and is_aligned(first)
    buffers.give_back(first)
    assert buffers.take(100_000) is first


def test_cap_holds_over_sizes_and_frees_what_nobody_uses() -> None:
    buffers = BodyBuffers(1 << 20)
    small = [buffers.take(64 << 10) for _ in range(16)]
    assert all(small) and buffers.take(1) is None
    for buffer in small:
        assert buffer is not None
        buffers.give_back(buffer)
    assert buffers.take(1 << 20) is not None
    buffers.check()


def test_tenant_has_its_share_and_no_more() -> None:
    buffers = BodyBuffers(1 << 20, 256 << 10)
    held = [buffers.take(64 << 10, "a") for _ in range(4)]
    with pytest.raises(QueueFull, match="of a tenant"):
        buffers.take(1, "a")
    other, nobody = buffers.take(256 << 10, "b"), buffers.take(512 << 10)
    assert other is not None and nobody is not None and buffers.take(1, "c") is None
    for buffer in held:
        assert buffer is not None
        buffers.give_back(buffer, "a")
    buffers.give_back(nobody)
    again = buffers.take(200 << 10, "a")
    assert again is not None
    buffers.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), max_size=60))
def test_any_order_keeps_the_accounts(steps: list[tuple[bool, int]]) -> None:
    buffers, lent = BodyBuffers(4 << 20), []
    for is_take, size in steps:
        if is_take:
            buffer = buffers.take(size)
            if buffer is not None:
                assert len(buffer) >= size
                lent.append(buffer)
        elif lent:
            buffers.give_back(lent.pop(size % len(lent)))
        buffers.check()
        assert buffers.lent_bytes == sum(map(len, lent))
