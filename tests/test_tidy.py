"""The house rules and the documents, and that what checks them can fail."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidy
from links import dead_links

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["src/kvtide", "lab/kvtide_lab", "gpu/kvtide_gpu"])
def test_source_keeps_the_house_rules(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = tidy.main(str(ROOT / package))
    assert (capsys.readouterr().out, status) == ("", 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys.py", "from kvtide.tier import Tier", "imports tier"),
        ("explain.py", "import kvtide_lab.sim", "kvtide_lab may be imported only"),
        ("explain.py", "import kvtide_gpu", "kvtide_gpu may be imported only"),
        ("explain.py", "import torch", "torch may be imported only"),
        ("codec/x.py", "import time", "is pure"),
        ("tier/x.py", "import pickle", "pickle may be imported only"),
        ("explain.py", "try:\n    pass\nexcept Exception:\n    pass", "swallows"),
        ("explain.py", "print(1)", "print()"),
        ("explain.py", "eval('1')", "eval"),
        ("explain.py", "import os\nos.environ['A']", "environment"),
        ("explain.py", "# TODO later", "issue number"),
        ("explain.py", "\n" * 701, "longer than 700"),
        ("explain.py", "def f():\n" + "    x = 1\n" * 60, "longer than 60"),
        ("novel.py", "x = 1", "no import rank"),
        ("explain.py", 'class Seen:\n    """What was seen."""', "begins with a relative clause"),
        ("explain.py", 'class Seen:\n    """Blocks seen anew."""', "'anew' is a private word; write again"),
        ("explain.py", "x = 1  # Written aside.", "'aside' is a private word"),
    ],
)
def test_broken_rule_is_found(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvtide" / name
    path.parent.mkdir(parents=True)
    path.write_text(f'"""Docstring."""\n{text}\n')
    assert tidy.main(str(tmp_path / "kvtide")) == 1
    assert message in capsys.readouterr().out


def test_tools_keep_to_the_words() -> None:
    for path in ROOT.joinpath("tools").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [*tidy.word_problems(text, ast.parse(text))], path


SAME = 'class Same:\n    """One."""\n'
METHOD = 'class {}:\n    """One."""\n\n    def victim(self) -> None:\n        pass\n'
LAZY = "def late():\n    from kvtide.{} import X\n\n    return X\n"


@pytest.mark.parametrize(
    ("files", "message", "times"),
    [
        ({"keys": SAME, "block": SAME}, "class Same is in block.py already", 1),
        (
            {"tier/disk/log": "", "explain": "from kvtide.tier.disk.log import SegmentLog\n"},
            "tier.disk.log is inside tier.disk/",
            1,
        ),
        # What a class of ours inherits has its docstring there.
        ({"keys": METHOD.format("Silent"), "block": METHOD.format("Policy(EvictionPolicy)")}, "has no docstring", 1),
        (
            {here: LAZY.format(there) for here, there in (("keys", "block"), ("block", "types"), ("types", "keys"))},
            "imports itself by way of others",
            3,
        ),
    ],
)
def test_rule_that_files_break_together_is_found(
    tmp_path: Path, files: dict[str, str], message: str, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        path = tmp_path / "kvtide" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Docstring."""\n\n\n{text}')
    tidy.main(str(tmp_path / "kvtide"))
    assert capsys.readouterr().out.count(message) == times


SOURCE = ROOT / "src" / "kvtide"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROUTE_LINES_MAX = 6500
README_LINES_MAX = 90
ANSWER_WORDS_MAX = 75
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
    for _, rooms, what in (row.strip("|").split("|") for row in rows):
        assert len(what.split()) <= CELL_WORDS_MAX, what
        for room in rooms.strip("` ").split():
            places = [SOURCE / room, SOURCE / f"{room}.py", ROOT / room]
            assert any(place.exists() for place in places), room


def test_every_package_is_a_room_of_the_map() -> None:
    packages = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")} - {Path()}
    rooms = set(re.findall(r"`([\w/]+)/`", text_of("ARCHITECTURE.md")))
    # Houses without a line of their own; they are inside one that has it.
    inside = {"evict/policies", "engines"}
    assert {str(package) for package in packages} - rooms - inside == set()


def test_readme_is_a_screen_and_a_half() -> None:
    assert len(text_of("README.md").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_page_begins_with_its_answer(document: Path) -> None:
    title, answer = document.read_text(encoding="utf-8").split("\n\n", 2)[:2]
    assert re.fullmatch("# .+", title)
    assert re.match(r"[A-Za-z*`]", answer) and not answer.startswith("This page")
    assert len(answer.split()) <= ANSWER_WORDS_MAX
