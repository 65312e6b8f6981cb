from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from kvtide_lab.cli.options import tell
from kvtide_lab.measuring import Spread, tables_of


class Row(msgspec.Struct):
    policy: str
    hit_rate: float | None
    took_s: Spread
    parts: list[Row]


class Result(msgspec.Struct):
    requests: int
    holds: bool
    ratios: dict[str, float]
    missing: str
    rows: list[Row]
    more: list[Row]


def test_result_is_a_line_a_field_and_a_table_for_rows() -> None:
    rows = [Row("lru", 0.123456, Spread(1.0, 0.5, 2.0), []), Row("mix", None, Spread(3.0, 3.0, 3.0), [])]
    console = Console(width=100, record=True)
    console.print(tables_of(Result(12_345, True, {"p50": 1234.5}, "", rows, [])))
    text = console.export_text()
    assert all(said in text for said in ("12,345", "yes", "p50 1,234", "0.1235", "1.00 (0.50 … 2.00)", "3.00"))
    assert "hit rate" in text and "missing" not in text and "more" not in text


def test_no_column_is_cut_where_the_terminal_is_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    # Its column is wider than what the others leave of 80.
    row = Row("mix-" * 30, 0.25, Spread(1.5, 1.0, 2.0), [])
    tell(Result(1, True, {}, "", [row], []), as_json=False)
    said = capsys.readouterr().out
    assert [part for part in (row.policy, "0.25", "1.50 (1.00 … 2.00)", "hit rate") if part not in said] == []
