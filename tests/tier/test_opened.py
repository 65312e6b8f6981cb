"""Segments kept open for reading: few, closed once, and never those of a store that is gone."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.tier.test_log import open_tier

from kvtide.testing.tier_suite import object_bytes, object_id, read_all
from kvtide.tier.disk.segment import OPEN_MAX, OpenSegments
from kvtide.tier.files import Files


class Watched(Files):
    """Counts what is open."""

    def __init__(self) -> None:
        self.open_now: Counter[int] = Counter()
        self.opens = 0

    def open(self, path: Path | str, flags: int) -> int:
        descriptor = super().open(path, flags)
        self.open_now[descriptor] += 1
        self.opens += 1
        return descriptor

    def close(self, descriptor: int) -> None:
        assert self.open_now[descriptor] == 1, "closed twice"
        del self.open_now[descriptor]
        super().close(descriptor)


@pytest.fixture
def files() -> Watched:
    return Watched()


@pytest.fixture
def opened(tmp_path: Path, files: Watched) -> OpenSegments:
    for number in range(OPEN_MAX + 5):
        (tmp_path / str(number)).write_bytes(bytes(4096))
    return OpenSegments(files, lambda number: str(tmp_path / str(number)))


def test_file_is_opened_once_and_few_stay_open(opened: OpenSegments, files: Watched) -> None:
    for number in (0, 0, *range(OPEN_MAX + 5)):
        opened.take(number)
    assert files.opens == OPEN_MAX + 5
    assert len(files.open_now) == OPEN_MAX
    opened.close()
    assert not files.open_now


def test_file_in_use_stays_open_until_nobody_holds_it(opened: OpenSegments, files: Watched) -> None:
    first, second = opened.take(1), opened.take(1)
    opened.drop(1)
    del first
    assert os.fstat(second.descriptor).st_size == 4096
    del second
    assert not files.open_now


def test_file_that_was_removed_or_made_anew_is_not_read(opened: OpenSegments, files: Watched, tmp_path: Path) -> None:
    opened.take(1)
    (tmp_path / "1").unlink()
    with pytest.raises(FileNotFoundError):
        opened.take(1)
    (tmp_path / "1").write_bytes(bytes(8192))
    again = opened.take(1)
    assert os.fstat(again.descriptor).st_size == 8192
    assert len(files.open_now) == 1


def test_store_that_was_removed_is_no_longer_served(tmp_path: Path) -> None:
    files = Watched()
    tier = open_tier(tmp_path / "store", files=files)
    tier.put_from(object_id(1), object_bytes(1))
    assert read_all(tier, 1) == object_bytes(1)
    shutil.rmtree(tmp_path / "store")
    assert tier.get_into(object_id(1), memoryview(bytearray(10))) is None
    tier.close()
    assert not files.open_now
