"""The documents: links lead somewhere, walks name real functions, the route short, README quotes standing figures."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from links import dead_links
from tests.support import PAGE, page

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvtide"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROUTE_LINES_MAX = 7300
README_LINES_MAX = 120
CELL_WORDS_MAX = 25
WALK_LINES = range(6, 11)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def defined(path: Path) -> set[str]:
    """Classes and functions of a module, methods as `Class.method`."""

    def names(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name
                yield from names(child, f"{prefix}{child.name}.")

    return set(names(ast.parse(path.read_text(encoding="utf-8")), ""))


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|\n").split("|")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    assert list(dead_links(document)) == []


def test_walks_name_functions_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text_of("ARCHITECTURE.md"))
    assert len(named) > 50
    wrong = [f"{file}: {name}" for file, name in named if name not in defined(SOURCE / file)]
    assert wrong == []


def test_walks_are_short() -> None:
    walks = re.split(
        r"^### ", text_of("ARCHITECTURE.md").partition("## Walks\n")[2].partition("\n## ")[0], flags=re.MULTILINE
    )
    steps = {walk.split("\n", 1)[0]: walk.count("\n- `") for walk in walks[1:]}
    assert len(steps) == 5
    assert {name: count for name, count in steps.items() if count not in WALK_LINES} == {}


def test_reading_route_is_at_most_8000_lines_and_says_how_many() -> None:
    route = text_of("ARCHITECTURE.md").partition("## Reading route\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`: ", route, re.MULTILINE)
    lines = sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files)
    (said,) = re.findall(r"About ([\d,]+) lines", route)
    assert lines <= ROUTE_LINES_MAX
    assert abs(lines - int(said.replace(",", ""))) <= 150, f"{lines} lines, {said} are stated"


def test_rooms_of_the_map_exist_and_have_short_cells() -> None:
    rows = re.findall(r"^\| (?:\d|–) \|.*$", text_of("ARCHITECTURE.md"), re.MULTILINE)
    assert rows
    for _, rooms, what in map(cells, rows):
        assert len(what.split()) <= CELL_WORDS_MAX, what
        for room in rooms.strip("`").split():
            places = [SOURCE / room, SOURCE / f"{room}.py", ROOT / room]
            assert any(place.exists() for place in places), room


def test_every_package_is_a_room_of_the_map() -> None:
    packages = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")} - {Path()}
    rooms = set(re.findall(r"`([\w/]+)/`", text_of("ARCHITECTURE.md")))
    # Houses without a line of their own; they are inside one that has it.
    inside = {"evict/policies", "engines"}
    assert {str(package) for package in packages} - rooms - inside == set()


def test_readme_is_one_page_and_quotes_standing_figures() -> None:
    readme, standing = text_of("README.md"), text_of("docs/benchmarks.md")
    assert len(readme.splitlines()) <= README_LINES_MAX
    table = readme.partition("## What it gains\n")[2].partition("\n## ")[0]
    figures = re.findall(r"(?<![\w.])\d+\.\d+(?= s\b)", table)
    assert figures
    assert [figure for figure in figures if f"{figure} s" not in standing] == []


def test_matrix_of_support_is_what_the_tests_take() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "renew it: python -m tests.support --write"
