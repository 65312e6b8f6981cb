"""The matrix of docs/support.md, from what tests take: `python -m tests.support --write` writes it."""

import importlib.metadata
import sys
from pathlib import Path

from kvtide.engines.plugin import TESTED_VLLM
from tests.families import SUPPORT

PAGE = Path(__file__).parents[1] / "docs/support.md"
BEGIN, END = "<!-- matrix: made by `python -m tests.support --write` -->\n", "<!-- end of matrix -->\n"
_SHOWN = {"": "not tested"}


def matrix() -> str:
    """Return the matrix as Markdown."""
    transformers = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    vllm = ", ".join(version.rpartition(".")[0] for version in TESTED_VLLM)
    engines = [f"transformers {transformers}", f"`KVTideConnector`, vLLM {vllm}", f"`KVTideTier`, vLLM {vllm}"]
    head = f"| architecture | its layers keep | {' | '.join(engines)} |"
    rows = [
        f"| {each.name} | {each.keeps} | {' | '.join(_SHOWN.get(how, how) for how in each[2:])} |"
        for each in SUPPORT.values()
    ]
    return "\n".join([head, "|---|---|---|---|---|", *rows, ""])


def page(text: str) -> str:
    """Return the page with the matrix in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + matrix() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(matrix())
