from __future__ import annotations

from typing import NamedTuple

import pytest

from kvtide_lab.bench.codec_quality import Point, bits_at_kl, bits_of, embedded_penalty, ratio_to_tide


class Row(NamedTuple):
    codec: str
    bits_per_element: float
    kl: float
    coder: str = "rans"
    profile: str = "shared"
    refinements: int = 0
    over_single: float | None = None


ROWS = [
    Row("raw", 32, 0.0),
    Row("tide-deep", 1, 2e-2, over_single=-0.01),
    Row("tide-deep", 1.2, 3e-2),  # worse than the one before it: not on the line
    Row("tide-deep", 2, 1.25e-3, over_single=0.003),
    Row("cachegen", 3, 5e-2),
    Row("cachegen", 5, 5e-4),
    Row("cachegen", 3.5, 4e-3, coder="prefix", profile="payload"),
]


def test_bits_lie_between_the_rows_in_bits_and_log_kl() -> None:
    assert bits_of(bits_at_kl(ROWS), 5e-3, "tide-deep", "shared") == pytest.approx(1.5)
    assert ratio_to_tide(bits_at_kl(ROWS), "cachegen", "shared") == pytest.approx(4 / 1.5)
    said = next(each for each in bits_at_kl(ROWS) if (each.codec, each.kl) == ("tide-deep", 5e-3))
    assert said.between == (Point(1, 2e-2), Point(2, 1.25e-3))


def test_nothing_is_said_beyond_the_rows() -> None:
    found = bits_at_kl(ROWS)
    assert bits_of(found, 1e-3, "tide-deep", "shared") is None
    assert ratio_to_tide(found, "cachegen", "payload") is None
    assert {(each.codec, each.kl): each.bits_of_row for each in found}["tide-deep", 5e-3] == 2
    assert {each.codec for each in found} == {"tide-deep", "cachegen"}


def test_penalty_is_the_worst_prefixs() -> None:
    assert embedded_penalty(ROWS) == 0.003
    assert embedded_penalty(ROWS[:1]) is None
