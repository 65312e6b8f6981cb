from collections.abc import Iterator

import pytest
from tests.stores import Slow, open_memory, opened
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, read_all

from kvtide.clock import ManualClock
from kvtide.tier import Tier
from kvtide_lab.wrapped import Counting, Paced


class TestThatDoNothing(TierSuite):
    @pytest.fixture
    def tier(self, clock: ManualClock) -> Iterator[Tier]:
        with opened(Counting(Slow(open_memory(TIER_BYTES), clock.advance, latency_s=0.01))) as tier:
            yield tier


def test_counting_tier_counts_calls_and_bytes_that_moved() -> None:
    tier = Counting(open_memory())
    tier.put_from(object_id(1), object_bytes(1))
    read_all(tier, 1)
    read_all(tier, 2)
    assert (tier.calls["put"], tier.calls["get"]) == (1, 2)
    assert (tier.bytes["put"], tier.bytes["get"]) == (1000, 1000)


def test_paced_reads_share_one_device() -> None:
    clock = ManualClock()
    tier = Paced(open_memory(), clock, clock.advance, 1e4)
    tier.put_from(object_id(1), bytes(1000))
    buffer = memoryview(bytearray(2000))
    for _ in range(3):
        assert tier.get_into(object_id(1), buffer) == 1000
    assert clock.monotonic_s() == pytest.approx(0.3)
    assert tier.read_bytes == 3000
    with pytest.raises(ValueError, match="bandwidth"):
        Paced(tier, clock, clock.advance, 0)
