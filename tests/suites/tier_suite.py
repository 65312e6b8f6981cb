"""Conformance of a tier. Inherit and give a fixture `tier` that yields an open tier of at least TIER_BYTES.

class TestMemory(TierSuite):
    @pytest.fixture
    def tier(self): ...
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import pytest

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.errors import TierFull
from kvtide.tier import Tier
from kvtide.tier.base import RangeRead
from kvtide.tier.source import read_ranges
from kvtide.types import BlockKey, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object
from tests.suites import namespace

TIER_BYTES = 1 << 20
# Header and a table of one section.
_OBJECT_BYTES_MIN = 256 + 48


def object_id(number: int) -> ObjectId:
    return ObjectId(namespace(), BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest()))


def made_object(name: ObjectId, content: bytes, quality: float = 0.0) -> bytes:
    """Return a whole object of one section."""
    meta = BlockMeta(name, BlockKey(name.namespace), 0, BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16), "made up")
    sections = [Section(SectionId(SectionKind.DATA, 0, 0, 1), content)]
    return bytes(pack_object(meta, "raw-1", sections, quality=quality))


def object_bytes(number: int, size: int = 1000, quality: float = 0.0) -> bytes:
    """Return content that tells which object it belongs to: a valid object, if one of one section can be so small."""
    room = size - _OBJECT_BYTES_MIN
    filling = hashlib.sha256(b"content" + number.to_bytes(8, "little")).digest() * (size // 32 + 1)
    if room < 0:
        return filling[:size]
    return made_object(object_id(number), filling[:room], quality)


def put_all(tier: Tier, numbers: Iterable[int], size: int = 1000) -> None:
    for number in numbers:
        assert tier.put_from(object_id(number), object_bytes(number, size))


def read_all(tier: Tier, number: int, size_max: int = TIER_BYTES) -> bytes | None:
    buffer = bytearray(size_max)
    size = tier.get_into(object_id(number), memoryview(buffer))
    return None if size is None else bytes(buffer[:size])


class TierSuite:
    """Conformance of a tier. counts_overhead: its bytes are more than those of its objects."""

    counts_overhead: ClassVar[bool] = False

    def test_put_then_get_gives_same_bytes(self, tier: Tier) -> None:
        assert tier.put_from(object_id(1), object_bytes(1))
        assert tier.contains(object_id(1))
        assert read_all(tier, 1) == object_bytes(1)

    def test_many_look_ups_say_what_single_ones_say(self, tier: Tier) -> None:
        put_all(tier, (0, 1, 3))
        assert tier.count_leading([object_id(number) for number in (3, 1, 0, 4, 3)]) == 3
        assert tier.count_leading([object_id(number) for number in (4, 3)]) == 0
        assert tier.count_leading([]) == 0
        asked = [object_id(number) for number in (2, 1, 4, 0, 3)]
        assert tier.contains_each(asked) == [False, True, False, True, True]
        assert tier.contains_each([]) == []

    def test_absent_object_is_a_miss(self, tier: Tier) -> None:
        assert not tier.contains(object_id(1))
        assert read_all(tier, 1) is None
        assert not tier.delete(object_id(1), "removed")

    def test_range_is_read_from_its_offset(self, tier: Tier) -> None:
        tier.put_from(object_id(1), object_bytes(1))
        buffer = bytearray(100)
        assert tier.get_into(object_id(1), memoryview(buffer), 50) == 100
        assert bytes(buffer) == object_bytes(1)[50:150]
        assert tier.get_into(object_id(1), memoryview(buffer), 950) == 50
        assert tier.get_into(object_id(1), memoryview(buffer), 5000) == 0

    def test_many_ranges_are_read_as_each_alone(self, tier: Tier) -> None:
        tier.put_from(object_id(1), object_bytes(1, 300_000))
        for count in (1, 2, 5, 150):
            # The last but one ends after the object, the last begins there.
            spans = [(1900 * number, 1900 * number + 700 + number) for number in range(count)]
            spans += [(299_900, 300_100), (300_200, 300_300)]
            ranges = [RangeRead(start, memoryview(bytearray(stop - start))) for start, stop in spans]
            sizes = read_ranges(tier, object_id(1), ranges)
            assert sizes == [*(700 + number for number in range(count)), 100, 0]
            for (start, _), size, (_, buffer) in zip(spans, sizes, ranges, strict=True):
                assert buffer[:size] == object_bytes(1, 300_000)[start : start + size]
        assert read_ranges(tier, object_id(2), ranges) is None
        assert read_ranges(tier, object_id(1), ranges[-1:]) == [0]
        assert read_ranges(tier, object_id(1), []) == []

    def test_negative_offset_is_a_value_error(self, tier: Tier) -> None:
        with pytest.raises(ValueError, match="offset"):
            tier.get_into(object_id(1), memoryview(bytearray(1)), -1)

    def test_deleted_object_is_gone_and_remembered(self, tier: Tier) -> None:
        tier.put_from(object_id(1), object_bytes(1))
        assert tier.delete(object_id(1), "corrupt")
        assert read_all(tier, 1) is None
        assert tier.removed_reason(object_id(1)) == "corrupt"
        assert tier.removed_reason(object_id(2)) is None

    def test_second_put_keeps_first_object(self, tier: Tier) -> None:
        tier.put_from(object_id(1), object_bytes(1))
        assert tier.put_from(object_id(1), object_bytes(1))
        assert tier.stats().objects == 1

    def test_listing_names_each_object_once_with_its_size_and_is_no_use(self, tier: Tier) -> None:
        for number in range(5):
            tier.put_from(object_id(number), object_bytes(number, 400 + number))
        before, sizes = tier.stats(), [(object_id(number), 400 + number) for number in range(5)]
        assert sorted((info.id, info.size) for info in tier.objects()) == sorted(sizes)
        assert (tier.stats().hits, tier.stats().misses) == (before.hits, before.misses)
        tier.delete(object_id(1), "removed")
        assert {info.id for info in tier.objects()} == {object_id(number) for number in (0, 2, 3, 4)}

    def test_callers_buffer_is_not_kept(self, tier: Tier) -> None:
        buffer = bytearray(object_bytes(1))
        tier.put_from(object_id(1), buffer)
        buffer[:] = bytes(len(buffer))
        assert read_all(tier, 1) == object_bytes(1)

    def test_bytes_stay_under_the_cap(self, tier: Tier) -> None:
        for number in range(100):
            tier.put_from(object_id(number), object_bytes(number, 50_000))
            assert tier.stats().used_bytes <= tier.stats().bytes_max
        stats = tier.stats()
        assert self.counts_overhead or stats.objects == stats.used_bytes // 50_000
        assert stats.evictions == 100 - stats.objects
        assert read_all(tier, 99) == object_bytes(99, 50_000)

    def test_threads_never_see_foreign_or_partial_bytes(self, tier: Tier) -> None:
        wrong: list[int] = []

        def work(first: int) -> None:
            for number in range(first, first + 40):
                # A store this small may be full of what the other threads read just now.
                with suppress(TierFull):
                    tier.put_from(object_id(number % 50), object_bytes(number % 50, 30_000))
                found = read_all(tier, (number * 7) % 50)
                if found is not None and found != object_bytes((number * 7) % 50, 30_000):
                    wrong.append(number)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(0, 40, 10)))
        assert wrong == []

    def test_close_twice_is_harmless(self, tier: Tier) -> None:
        tier.close()
        tier.close()
