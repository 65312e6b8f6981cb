"""A device's memory as a tier: the contract of every tier, a stack with it in front, and a device that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, read_all

from faulty import FaultyKernels, Switch
from kvtide.clock import ManualClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.evict import RankedOrder, RecencyRanking
from kvtide.tier import Tier, stack_of, tiers_of
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.memory import STAGE_BYTES, DeviceTier, KernelMemory
from twin import needs_compiler

pytestmark = needs_compiler
PAGE = 4096


def nothing_pinned(key: bytes) -> bool:
    return False


def device_tier(kernels: Kernels, bytes_max: int = TIER_BYTES) -> DeviceTier:
    return DeviceTier(bytes_max, ManualClock(0.0), nothing_pinned, KernelMemory(kernels))


class TestDevice(TierSuite):
    @pytest.fixture
    def tier(self, kernels: Kernels) -> Iterator[Tier]:
        tier = device_tier(kernels)
        tier.open()
        yield tier
        tier.check()


class TestStackOfDeviceMemoryAndDisk(TierSuite):
    @pytest.fixture
    def tier(self, kernels: Kernels, tmp_path: Path) -> Iterator[Tier]:
        limits = Limits(device_bytes_max=100_000, memory_bytes_max=200_000, disk_bytes_max=TIER_BYTES)
        stack = stack_of(str(tmp_path), limits, ManualClock(0.0), nothing_pinned, device=KernelMemory(kernels))
        assert stack.tier_names == ["device", "memory", "disk"]
        stack.open()
        yield stack
        stack.check()
        stack.close()

    # Each tier holds a copy: what they count together is theirs to say.
    test_second_put_keeps_first_object = None  # type: ignore[assignment]
    test_bytes_stay_under_the_cap = None  # type: ignore[assignment]


@pytest.mark.parametrize("size", [STAGE_BYTES - 1, STAGE_BYTES, 3 * STAGE_BYTES + 5])
def test_objects_larger_than_a_stage_come_back_from_any_offset(kernels: Kernels, size: int) -> None:
    tier = device_tier(kernels, 4 * STAGE_BYTES)
    tier.open()
    data = object_bytes(1, size)
    tier.put_from(object_id(1), data)
    assert read_all(tier, 1, size + 1) == data
    rest = bytearray(size)
    assert tier.get_into(object_id(1), memoryview(rest), STAGE_BYTES // 2) == size - STAGE_BYTES // 2
    assert rest[: size - STAGE_BYTES // 2] == data[STAGE_BYTES // 2 :]
    tier.close()


def test_objects_in_scattered_frames_come_back(kernels: Kernels) -> None:
    tier = device_tier(kernels, 6 * PAGE)
    tier.open()
    for number in range(6):
        tier.put_from(object_id(number), object_bytes(number))
    for number in (1, 3, 5):
        tier.delete(object_id(number), "removed")
    tier.put_from(object_id(9), object_bytes(9, 3 * PAGE - 7))
    assert read_all(tier, 9) == object_bytes(9, 3 * PAGE - 7)
    tail = bytearray(PAGE)
    assert tier.get_into(object_id(9), memoryview(tail), PAGE + 100) == PAGE
    assert tail == object_bytes(9, 3 * PAGE - 7)[PAGE + 100 : 2 * PAGE + 100]
    tier.check()


def test_stack_moves_what_is_used_to_the_device_and_lets_the_least_used_go(kernels: Kernels, tmp_path: Path) -> None:
    ranking = RecencyRanking()
    device = DeviceTier(2 * PAGE, ManualClock(0.0), nothing_pinned, KernelMemory(kernels), RankedOrder(ranking))
    disk = DiskTier(tmp_path, TIER_BYTES, ManualClock(0.0), nothing_pinned)
    stack = TierStack([device, disk], ranking)
    stack.open()
    for number in range(4):
        stack.put_from(object_id(number), object_bytes(number))
    for number in (3, 3, 2, 2, 3):
        assert read_all(stack, number) == object_bytes(number)
    assert [n for n in range(4) if device.contains(object_id(n))] == [2, 3]
    read_all(stack, 0)
    read_all(stack, 0)
    assert [n for n in range(4) if device.contains(object_id(n))] == [0, 3]
    assert device.removed_reason(object_id(2)) == "evicted"
    stack.check()
    stack.close()


def test_device_url_needs_a_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hand a device's memory"):
        tiers_of(["device://", str(tmp_path)], Limits(), ManualClock(0.0), nothing_pinned)


def scenario(kernels: Kernels, switch: Switch) -> None:
    """Put and read through a stack of the device and memory; every read must give the object's bytes."""
    device = device_tier(kernels, 4 * PAGE)
    memory = MemoryTier(TIER_BYTES, ManualClock(0.0), nothing_pinned)
    stack = TierStack([device, memory])
    stack.open()
    for number in range(6):
        assert stack.put_from(object_id(number), object_bytes(number))
    for number in [*range(6), *range(6)]:
        assert read_all(stack, number) == object_bytes(number)
    stack.check()
    stack.close()
    faults = stack.guard.counts.all()[device.name]
    assert not switch.failed or faults or switch.failed == ["finish"], switch.failed


@pytest.mark.parametrize("is_lost", [False, True])
def test_device_that_fails_at_any_call_hides_nothing(kernels: Kernels, is_lost: bool) -> None:
    switch = Switch()
    scenario(FaultyKernels(kernels, switch), switch)
    calls = switch.calls
    assert calls > 20
    for number in range(calls):
        switch = Switch(number, is_lost)
        scenario(FaultyKernels(kernels, switch), switch)
        assert switch.failed


def test_device_without_memory_is_unavailable(kernels: Kernels) -> None:
    with pytest.raises(TierUnavailable, match="no 1048576 bytes"):
        device_tier(FaultyKernels(kernels, Switch(0, is_lost=True))).open()
