"""House rules that a linter does not know (STYLE.md), as one fast test.

Usage: tidy.py SRC_PACKAGE_DIR   (exit status 1 when a rule is broken)
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

# A module imports equal or lower ranks only. Names are the first component under the package.
RANK = {
    **dict.fromkeys(("types", "errors", "clock", "config"), 0),
    **dict.fromkeys(("keys", "block", "group", "outcomes", "index", "evict", "codec", "importance", "wire", "plan"), 1),
    "tier": 2,
    **dict.fromkeys(("store", "explain"), 3),
    **dict.fromkeys(("server", "engines"), 4),
    "cli": 5,
    # The package itself holds its version alone; the native module is fenced below.
    **dict.fromkeys(("__init__", "_native"), 0),
}
# Modules whose names everybody may use; of other folders only what their `__init__` exports.
OPEN = {
    *(
        "wire.http",
        "wire.protocol",
        "wire.ranges",
        "wire.receiver",
        "codec.packed",
        "codec.rotary",
    ),
    *("server.settings", "tier.base", "tier.breaker", "tier.buffers", "tier.faults", "tier.files", "tier.source"),
    *("tier.http.records", "tier.stack.invalidation"),
    *("engines.paged.device", "engines.paged.proof", "engines.surface", "plan.base", "plan.policies"),
    *("store.profiles", "store.repack", "store.load.run", "store.load.sparse", "store.load.streamed"),
}
PRODUCT = Path(__file__).resolve().parents[1] / "src" / "kvtide"
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 700
# Only these may import the heavy, optional or dangerous thing named; the empty set means nobody.
FENCED = {
    "torch": {"engines"},
    "vllm": {"engines"},
    "sglang": {"engines"},
    "transformers": {"engines"},
    "socket": {"tier", "server"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "kvtide._native": {"codec", "importance", "server", "cli"},
    "kvtide_lab": set(),
    "kvtide_gpu": set(),
}
# Other distributions may look into all of kvtide, and are held to the rules of a single file alone: what measures it,
# and kernels, which are its codecs in another language and read their tables.
APART = {"kvtide_lab", "kvtide_gpu"}
# Ranks 0 and 1 do no I/O, read no clock and start no thread (locks are theirs: the index is thread-safe).
PURE_RANK_MAX = 1
IMPURE = {"time", "datetime", "random", "secrets", "subprocess", "socket", "asyncio", "concurrent"}
IMPURE_ALLOWED = {"clock": {"time"}}
ENVIRONMENT = re.compile(r"\bos\.(environ|getenv)\b")
# A docstring says what a thing is (a noun) or does (a verb); these begin a riddle.
RIDDLE = re.compile(r"(What|Which|Who|Whom|Whose|How|Where|Whether|When|Why|Those|That)\b")
# Private words, and what the field says.
BANNED = {
    "anew": "again",
    "aside": "to a file of its own",
    "what there is of": "a noun",
    "what came of": "result, outcome",
    "what became of": "result, outcome",
    "of late": "last, recent",
    "is none any more": "is closed, is gone",
}
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
TODO = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")


class Problem(NamedTuple):
    """One broken rule at a line."""

    lineno: int
    message: str


def first_component(path: Path, root: Path) -> str:
    """Return the module or package right under the root that `path` belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py").removesuffix(".pyi")


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported, `from a import b` as a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
                continue
            # Only relative imports may leave it out.
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_module(dotted: str, root: Path) -> bool:
    """Tell whether a dotted name under the package is a module that is no folder."""
    return root.joinpath(*dotted.split(".")).with_suffix(".py").is_file()


def door_problems(tree: ast.AST, path: Path, root: Path) -> Iterator[Problem]:
    """Yield imports that reach past the `__init__` of a folder into a module of it."""
    here = ".".join(path.relative_to(root).parent.parts)
    for lineno, module in imported_modules(tree):
        inner = module.removeprefix(f"{root.name}.")
        folder = inner.rpartition(".")[0]
        if inner == module or not folder or inner in OPEN or not is_module(inner, root):
            continue
        if f"{here}.".startswith(f"{folder}."):
            continue
        yield Problem(lineno, f"{inner} is inside {folder}/; import what its __init__ exports")


def import_problems(tree: ast.AST, here: str, package: str) -> Iterator[Problem]:
    """Yield imports that point up, sideways over a fence, or out of a pure module."""
    for lineno, module in imported_modules(tree):
        if module.startswith("."):
            yield Problem(lineno, "relative import; name the module in full")
        head, _, tail = module.partition(".")
        if head == package and tail:
            there = tail.split(".")[0]
            if there in RANK and RANK[there] > RANK[here]:
                yield Problem(lineno, f"{here} (rank {RANK[here]}) imports {there} (rank {RANK[there]})")
        for fenced, allowed in FENCED.items():
            if (module == fenced or module.startswith(f"{fenced}.")) and here not in allowed:
                yield Problem(lineno, f"{fenced} may be imported only under {sorted(allowed) or 'nothing'}")
        if RANK[here] <= PURE_RANK_MAX and head in IMPURE - IMPURE_ALLOWED.get(here, set()):
            yield Problem(lineno, f"{here} is pure (rank {RANK[here]}) and may not import {head}")


def is_swallowed(node: ast.ExceptHandler) -> bool:
    """Tell whether a handler drops every error without a word."""
    broad = node.type is None or getattr(node.type, "id", "") in {"Exception", "BaseException"}
    return broad and all(isinstance(statement, ast.Pass) for statement in node.body)


def node_problems(tree: ast.AST, here: str) -> Iterator[Problem]:
    """Yield functions that are too long, swallowed errors, prints and evals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX:
                yield Problem(node.lineno, f"{node.name}() longer than {FUNCTION_LINES_MAX} lines")
        elif isinstance(node, ast.ExceptHandler) and is_swallowed(node):
            yield Problem(node.lineno, "broad handler that swallows the error")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"eval", "exec"}:
            yield Problem(node.lineno, "eval or exec")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print" and here != "cli":
            yield Problem(node.lineno, "print() outside the command line")


def word_problems(text: str, tree: ast.Module) -> Iterator[Problem]:
    """Yield docstrings that begin with a relative clause, and banned words in docstrings and comments."""
    found = [(number, line.partition("# ")[2]) for number, line in enumerate(text.splitlines(), 1)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = ast.get_docstring(node)
            if words is None:
                continue
            found.append((node.body[0].lineno, words))
            if RIDDLE.match(words):
                yield Problem(node.body[0].lineno, "docstring begins with a relative clause; take a noun or a verb")
    for lineno, words in found:
        for word in _BANNED.findall(words):
            yield Problem(lineno, f"{word!r} is a private word; write {BANNED[word.lower()]}")


def file_problems(path: Path, text: str, tree: ast.Module, here: str) -> Iterator[Problem]:
    """Yield the rules that a single file breaks, whatever it belongs to."""
    if text.count("\n") > FILE_LINES_MAX:
        yield Problem(1, f"file longer than {FILE_LINES_MAX} lines")
    if path.name != "__init__.py" and ast.get_docstring(tree) is None:
        yield Problem(1, "no module docstring")
    for lineno, line in enumerate(text.splitlines(), 1):
        if ENVIRONMENT.search(line) and here != "config":
            yield Problem(lineno, "environment read outside config.py")
        if TODO.search(line):
            yield Problem(lineno, "TODO without an issue number")
    yield from word_problems(text, tree)
    yield from node_problems(tree, here)


def problems(path: Path, root: Path) -> Iterator[Problem]:
    """Yield every broken rule of one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    here = first_component(path, root)
    if root.name not in APART:
        if here not in RANK:
            yield Problem(1, f"{here} has no import rank; add it to tools/tidy.py and ARCHITECTURE.md")
            return
        yield from import_problems(tree, here, root.name)
        yield from door_problems(tree, path, root)
    yield from file_problems(path, text, tree, here)


def repeated_classes(modules: Iterable[tuple[Path, ast.Module]], root: Path) -> Iterator[tuple[Path, Problem]]:
    """Yield public classes whose name another module has too: one name is one thing."""
    first: dict[str, Path] = {}
    for path, tree in modules:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                other = first.setdefault(node.name, path)
                if other != path:
                    yield path, Problem(node.lineno, f"class {node.name} is in {other.relative_to(root)} already")


def base_names(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the names of a class's bases that are known, and of theirs."""
    for base in node.bases:
        head = base.value if isinstance(base, ast.Subscript) else base
        name = head.attr if isinstance(head, ast.Attribute) else getattr(head, "id", "")
        if name in classes and classes[name] is not node:
            yield name
            yield from base_names(classes[name], classes)


def silent_methods(
    modules: Sequence[tuple[Path, ast.Module]], classes: Mapping[str, ast.ClassDef]
) -> Iterator[tuple[Path, Problem]]:
    """Yield public methods without a docstring whose contract no base class of ours states either."""
    for path, tree in modules:
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in public:
            stated = {
                method.name
                for base in base_names(node, classes)
                for method in classes[base].body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
            }
            for method in node.body:
                if (
                    isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not method.name.startswith("_")
                    and method.name not in stated
                    and ast.get_docstring(method) is None
                ):
                    yield path, Problem(method.lineno, f"{node.name}.{method.name} has no docstring, nor has a base")


def circles(modules: Iterable[tuple[Path, ast.Module]], root: Path) -> Iterator[tuple[Path, Problem]]:
    """Yield the files that import each other, directly or by way of others; an import for types counts too."""
    names = {path: ".".join((root.name, *path.relative_to(root).with_suffix("").parts)) for path, _ in modules}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    imports: dict[str, set[str]] = {}
    for path, tree in modules:
        found = {name for _, name in imported_modules(tree)} & set(names.values())
        # `from a.b import c` names a.b too, which it is not about if c is a module.
        imports[names[path]] = {name for name in found if not any(each.startswith(f"{name}.") for each in found)}
    for path, name in names.items():
        seen, waiting = set[str](), list(imports[name])
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting += imports.get(each, ())
        if name in seen:
            yield path, Problem(1, f"{name} imports itself by way of others")


def classes_of(trees: Iterable[ast.Module]) -> dict[str, ast.ClassDef]:
    """Return the classes at the top of modules, by name."""
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def product_classes() -> dict[str, ast.ClassDef]:
    """Return the product's classes, of which others are subclasses."""
    return classes_of(ast.parse(path.read_text(encoding="utf-8")) for path in PRODUCT.rglob("*.py"))


def main(argument: str) -> int:
    """Print every problem under a package directory; return the exit status."""
    root = Path(argument).resolve()
    paths = sorted(root.rglob("*.py"))
    found = [(path, problem) for path in paths for problem in problems(path, root)]
    modules = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
    classes = {**product_classes(), **classes_of(tree for _, tree in modules)}
    found += repeated_classes(modules, root)
    found += silent_methods(modules, classes)
    found += circles(modules, root) if root.name not in APART else ()
    for path, problem in found:
        print(f"{path.relative_to(root.parent)}:{problem.lineno}: {problem.message}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
