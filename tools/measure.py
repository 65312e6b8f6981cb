"""Measure the tree: files, lines, names, what entry points import, the wheel.

Usage: measure.py [--json] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidy import OPEN, circles, repeated_classes

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ROOT / "src" / "kvtide"
LAB = ROOT / "lab" / "kvtide_lab"
GPU = ROOT / "gpu" / "kvtide_gpu"
# Goals of the product as a whole; what is over one is printed with it.
GOALS = {
    "product_lines": 38_000,
    "product_files": 200,
    "lab_lines": 12_000,
    "tests_lines": 36_000,
    "exported_names": 420,
    "repeated_class_names": 0,
    "circles": 0,
    "closure_lines_vllm": 11_000,
    "closure_lines_sglang": 8_500,
    "wheel_mb": 2.0,
}
ENTRY_POINTS = {
    "transformers": "kvtide.engines.transformers",
    "vllm": "kvtide.engines.vllm.connector",
    "sglang": "kvtide.engines.sglang.storage",
    "server": "kvtide.server",
}


class Code(NamedTuple):
    """Size and shape of a set of files. Percentages are of functions or definitions."""

    files: int
    lines: int
    file_lines_median: int
    file_lines_max: int
    function_lines_median: int
    function_lines_max: int
    typed_percent: int
    documented_percent: int


class Source(NamedTuple):
    """One parsed file."""

    path: Path
    module: str
    lines: int
    tree: ast.Module


def sources(root: Path) -> list[Source]:
    """Return the Python files under a package directory, parsed."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(path, module, text.count("\n"), ast.parse(text)))
    return found


def functions(files: Iterable[Source]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def is_typed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether every argument but self and the result are annotated."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = [each for each in arguments if each.arg not in {"self", "cls"}]
    return function.returns is not None and all(each.annotation is not None for each in named)


def code_of(files: Sequence[Source]) -> Code:
    """Return size and shape of the files."""
    found = list(functions(files))
    lengths = [(each.end_lineno or each.lineno) - each.lineno + 1 for each in found]
    public = [each for each in found if not each.name.startswith("_")]
    sizes = [file.lines for file in files]
    return Code(
        files=len(files),
        lines=sum(sizes),
        file_lines_median=round(statistics.median(sizes)),
        file_lines_max=max(sizes),
        function_lines_median=round(statistics.median(lengths)),
        function_lines_max=max(lengths),
        typed_percent=round(100 * sum(map(is_typed, found)) / len(found)),
        documented_percent=round(100 * sum(ast.get_docstring(each) is not None for each in public) / len(public)),
    )


def exported(file: Source) -> list[str]:
    """Return the names that others may use: those in `__all__`, or all public ones of a module that is open."""
    for node in file.tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    if file.module.partition(".")[2] not in OPEN:
        return []
    targets = [node.targets[0] for node in file.tree.body if isinstance(node, ast.Assign)]
    names = [node.id for node in targets if isinstance(node, ast.Name)]
    names += [node.name for node in file.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")]


def imported(file: Source, known: set[str]) -> Iterator[str]:
    """Yield the package's modules that a file imports when it is imported itself: not in functions, not for types."""
    todo: list[ast.stmt] = list(file.tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in (node.module, *names) if name in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            todo += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            todo += node.body


def closure(entry: str, files: Sequence[Source]) -> list[Source]:
    """Return what importing a module imports of the package, itself and the folders above included."""
    by_name = {file.module: file for file in files}
    known, seen, todo = set(by_name), set(), [entry]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        todo += [*imported(by_name[module], known), *([module.rpartition(".")[0]] if "." in module else [])]
    return [by_name[module] for module in seen]


def measure(wheel: Path | None) -> dict[str, Any]:
    """Return all figures of the tree, and of a wheel."""
    product, lab, gpu = sources(PRODUCT), sources(LAB), sources(GPU)
    tests, gpu_tests = sources(ROOT / "tests"), sources(GPU.parent / "tests")
    modules = ((file.path, file.tree) for file in [*product, *lab, *gpu])
    repeated = [problem.message for _, problem in repeated_classes(modules, ROOT)]
    kernels = sum(path.read_text(encoding="utf-8").count("\n") for path in GPU.rglob("*.cuh"))
    figures: dict[str, Any] = {
        "product_lines": sum(file.lines for file in product),
        "product_files": len(product),
        "lab_lines": sum(file.lines for file in lab),
        "tests_lines": sum(file.lines for file in tests),
        "gpu_lines": sum(file.lines for file in gpu),
        "gpu_tests_lines": sum(file.lines for file in gpu_tests),
        "kernel_lines": kernels,
        "exported_names": sum(len(exported(file)) for file in product),
        "repeated_class_names": len(repeated),
        "repeated": repeated,
        "circles": len(list(circles([(file.path, file.tree) for file in product], PRODUCT))),
    }
    for name, entry in ENTRY_POINTS.items():
        found = closure(entry, product)
        figures[f"closure_lines_{name}"] = sum(file.lines for file in found)
        figures[f"closure_files_{name}"] = len(found)
    if wheel is not None:
        figures["wheel_mb"] = round(wheel.stat().st_size / 1e6, 2)
    parts = {
        "product": product,
        "lab": lab,
        "gpu": gpu,
        "gpu_tests": gpu_tests,
        "tests": tests,
        "tools": sources(ROOT / "tools"),
    }
    parts |= {
        f"kvtide.{folder.name}": [file for file in product if folder in file.path.parents]
        for folder in sorted(PRODUCT.iterdir())
        if (folder / "__init__.py").is_file()
    }
    figures["rows"] = [{"part": name, **code_of(files)._asdict()} for name, files in parts.items() if files]
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table, goals beside them."""
    rows = figures["rows"]
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    print("  ".join(key.ljust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(str(row[key]).ljust(width) for key, width in widths.items()))
    print()
    for key, value in figures.items():
        if key == "rows":
            continue
        goal = GOALS.get(key)
        over = " (over)" if goal is not None and value > goal else ""
        print(f"{key}: {value}" + (f", goal {goal}{over}" if goal is not None else ""))


def main() -> int:
    """Print the figures; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--wheel", type=Path, help="a built wheel, to weigh")
    arguments = parser.parse_args()
    if arguments.wheel is not None and not arguments.wheel.is_file():
        parser.error(f"no wheel at {arguments.wheel}")
    figures = measure(arguments.wheel)
    if arguments.json:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        print(json.dumps({"commit": commit.stdout.strip(), "command": " ".join(sys.argv), **figures}))
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
