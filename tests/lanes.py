"""Which test modules `make check` takes: those that import no torch and start no process or server, by their text."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PACKAGES = (ROOT, ROOT / "src", ROOT / "lab", ROOT / "gpu", ROOT / "gpu" / "tests", ROOT / "tools")
TORCH = {"torch", "transformers"}
# What starts processes or serves, where a test or the lab imports it: the sources wait to be called.
STARTERS = {
    "http.client",
    "http.server",
    "multiprocessing",
    "socket",
    "subprocess",
    "urllib.request",
    "kvtide_lab.bench",
}


@cache
def _file(module: str) -> Path | None:
    for base in _PACKAGES:
        path = base.joinpath(*module.split("."))
        for each in (path.with_suffix(".py"), path / "__init__.py"):
            if each.is_file():
                return each
    return None


@cache
def _imports(path: Path, is_deep: bool) -> frozenset[str]:
    """Every module that a file imports, with the packages around it; only at its top unless `is_deep`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree) if is_deep else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2))


def is_quick(module: Path) -> bool:
    """Tell whether a test module can run without torch, and starts nothing. Imports in its own functions count too."""
    seen, waiting = {module}, [module]
    while waiting:
        path = waiting.pop()
        is_source = (ROOT / "src") in path.parents
        for name in _imports(path, path == module):
            if name in TORCH or (name in STARTERS and not is_source):
                return False
            found = _file(name)
            if found and found not in seen:
                seen.add(found)
                waiting.append(found)
    return True
