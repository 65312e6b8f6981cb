"""Prints docs/capabilities.md from the register of doors in tests/doors, and says how many are left.

Usage: python -m tests.doors.page [--write]   (exit status 1 if the page is not as it should be)
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tests.doors.capability import Capability
from tests.doors.register import LEFT, OPEN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "capabilities.md"
DOORS = "tests/doors"


def marked_tests() -> Iterator[tuple[str, str]]:
    """Yield capability and test of each `@door("capability")` in tests/doors."""
    for path in sorted((ROOT / DOORS).glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "door":
                    yield ast.literal_eval(mark.args[0]), f"{DOORS}/{path.name}::{node.name}"


def capabilities() -> list[Capability]:
    return list(chain.from_iterable(OPEN.values()))


def section(place: str) -> str | None:
    """Return what stands under `file: heading`, with what is below that; None if there is no such heading."""
    name, _, heading = place.partition(": ")
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    if found is None:
        return None
    rest = text[found.end() :]
    # Within a fence a line with # is no heading.
    end = re.search(rf"^#{{1,{len(found[1])}}} \S", re.sub(r"^```.*?^```$", _blank, rest, flags=re.M | re.S), re.M)
    return rest[: end.start()] if end else rest


def _blank(fence: re.Match[str]) -> str:
    return "." * len(fence[0])


def words(option: str) -> list[str]:
    """Return the words of an option that its documentation has to have."""
    return [word for word in re.split(r"[^\w:/.+-]+", option) if len(word) > 1]


def summary() -> str:
    """Say how many capabilities have a door, and how many are left."""
    count = len(capabilities())
    return f"{count + len(LEFT)} capabilities: {count} doors, {len(LEFT)} left"


def page() -> str:
    tests = dict(marked_tests())
    lines = [
        "# Capabilities",
        "",
        "Everything that can be switched on, with its option, the page that says how, and the test that proves it:",
        f"{summary()}. A capability counts when one documented option switches it on and a test through",
        "that option fails if it did nothing. Made by `python -m tests.doors.page --write` from `tests/doors`.",
    ]
    for title, group in OPEN.items():
        lines += [
            "",
            f"## {title}",
            "| capability | option | documented in | proven on | by | after |",
            "|" + "---|" * 6,
        ]
        lines += [_row(each, each.proven_by or tests.get(each.name, "")) for each in group]
    lines += ["", "## No door yet", "| capability | option, perhaps | opens with | after |", "|" + "---|" * 4]
    lines += [f"| {each.name} | `{each.option}` | {each.opens_with} | {each.source} |" for each in LEFT]
    return "\n".join(lines) + "\n"


def _row(each: Capability, test: str) -> str:
    name, _, heading = each.documented.partition(": ")
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    target = name.removeprefix("docs/") if name.startswith("docs/") else f"../{name}"
    file, _, function = test.partition("::")
    proof = f"[{function.removeprefix('test_').replace('_', ' ')}](../{file})"
    link = f"[{Path(name).name}]({target}#{anchor})"
    return f"| {each.name} | `{each.option}` | {link} | {each.proven_on} | {proof} | {each.source} |"


def main() -> int:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    print(summary(), file=sys.stderr)
    return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page() else 1


if __name__ == "__main__":
    sys.exit(main())
