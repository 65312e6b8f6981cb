"""The part of vLLM that a connector touches, read from Python sources that nobody imports, and kept as snapshots.

A use is a path: `vllm.config:VllmConfig.parallel_config.rank`, `….kv_cache_groups[].layer_names`, `….JobResult()`. A
line describes what it leads to, None says that it leads nowhere. One that ends in `?` may lead nowhere.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from kvtide.engines.plugin import TESTED_VLLM, untested_vllm
from kvtide.errors import UnsupportedModel

_STEP = re.compile(r"\.\w+|\[\]|\(\)")
# As many changes are named in a warning.
_TOLD_MAX = 8
# Imports and bases are followed so far.
_DEPTH_MAX = 32
# Around the type that is meant.
_WRAPPERS = {"Optional", "SkipValidation", "type"}
_UNKNOWN = ast.Constant(None)

Surface = Mapping[str, str | None]


class SurfaceChanges(NamedTuple):
    """The difference of a version from a snapshot: uses that lead nowhere any more, and texts of those that changed."""

    missing: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def between(cls, before: Surface, now: Surface) -> SurfaceChanges:
        """Compare two surfaces by the uses of the first."""
        missing = tuple(use for use in before if now.get(use) is None and not use.endswith("?"))
        others = [use for use, text in before.items() if now.get(use) not in (None, text)]
        return cls(missing, tuple(f"{use}: {now[use]}, was {before[use]}" for use in others))


def snapshots() -> Mapping[str, Surface]:
    """Return the snapshots by version (`0.32`), oldest first."""
    folder = resources.files("kvtide.engines").joinpath("surfaces")
    files = {each.name.removesuffix(".json"): each for each in folder.iterdir() if each.name.endswith(".json")}
    return {name: json.loads(files[name].read_text("utf-8")) for name in sorted(files, key=version_numbers)}


def version_numbers(version: str) -> tuple[int, int]:
    """Return major and minor number of a version, (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def vllm_warning(version: str, package: Path) -> str | None:
    """Return what to say of a vLLM, installed as the folder `package`, that tests don't run on; None if they do.

    UnsupportedModel, with the command that installs a tested version, if this one lacks something that is used.
    """
    command = untested_vllm(version)
    if command is None:
        return None
    known, numbers = snapshots(), version_numbers(version)
    name, tested = (".".join(map(str, each)) for each in (numbers, version_numbers(TESTED_VLLM[-1])))
    nearest = min(known, key=lambda each: [abs(a - b) for a, b in zip(version_numbers(each), numbers, strict=True)])
    before = known[tested if name in known else nearest]
    missing, changed = SurfaceChanges.between(before, known.get(name) or Sources(package.parent).surface(before))
    if missing:
        raise UnsupportedModel(f"vLLM {version} lacks {', '.join(missing[:_TOLD_MAX])}: {command}")
    if name in known:
        return f"vLLM {version} has all that kvtide uses of it, by its sources; tests run on {TESTED_VLLM[-1]}"
    found = "; ".join(changed[:_TOLD_MAX]) or "nothing that kvtide uses"
    tests = f"Tests run on {TESTED_VLLM[-1]}: {command}"
    return f"vLLM {version} is not known to kvtide. Beside {nearest} it changes {found}. {tests}"


class _Node(NamedTuple):
    """A definition or, `is_type`, an annotation of it, and the module in whose names it is written."""

    module: str
    tree: ast.AST
    is_type: bool = False


class Sources:
    """A folder of Python sources, parsed as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._module = cache(self._parse)

    def surface(self, uses: Iterable[str]) -> Surface:
        """Describe what uses lead to."""
        return {use: self._described(use) for use in sorted(uses)}

    def _described(self, use: str) -> str | None:
        node = self._follow(use.removesuffix("?").removesuffix("()"))
        if node is None:
            return None
        tree = node.tree
        if isinstance(tree, ast.FunctionDef):
            is_property = any("property" in _text(mark) for mark in tree.decorator_list)
            return f"property {_text(tree.returns)}" if is_property else f"({parameters(tree)})"
        if isinstance(tree, ast.ClassDef):
            return self._made_by(node) if use.endswith("()") else self._needs(node)
        return f"field {_text(tree)}" if node.is_type else "value"

    def _parse(self, name: str) -> ast.Module | None:
        base = self._folder.joinpath(*name.split("."))
        files = (base.with_suffix(".py"), base / "__init__.py")
        return next((ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file()), None)

    def _follow(self, use: str) -> _Node | None:
        module, _, path = use.partition(":")
        name = re.split(r"[.\[(]", path, maxsplit=1)[0]
        node = self._named(module, name)
        for step in _STEP.findall(path[len(name) :]):
            if node is None:
                return None
            if step == "()":
                node = node if isinstance(node.tree, ast.ClassDef) else _returned(node)
            else:
                node = _item(node) if step == "[]" else self._member(node, step[1:])
        return node

    def _named(self, module: str, name: str, depth: int = 0) -> _Node | None:
        """Return where a module's name is defined, through its imports."""
        tree = self._module(module)
        for each in () if tree is None or depth > _DEPTH_MAX else _statements(tree.body):
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name:
                return _Node(module, each)
            if isinstance(each, ast.ImportFrom):
                for alias in each.names:
                    if (alias.asname or alias.name) == name:
                        return self._named(self._imported(module, each), alias.name, depth + 1)
            elif _assigns(each, name):
                value = getattr(each, "value", None)
                other = self._named(module, value.id, depth + 1) if isinstance(value, ast.Name) else None
                return other or _Node(module, _UNKNOWN)
        return None

    def _imported(self, module: str, each: ast.ImportFrom) -> str:
        is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
        package = module if is_package else module.rpartition(".")[0]
        return resolve_name("." * each.level + (each.module or ""), package)

    def _family(self, node: _Node | None, depth: int = 0) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and those that it is made of, nearest first, each with its module."""
        if node is not None and isinstance(node.tree, ast.ClassDef) and depth <= _DEPTH_MAX:
            yield node.module, node.tree
            for base in node.tree.bases:
                name = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(name, ast.Name):
                    yield from self._family(self._named(node.module, name.id), depth + 1)

    def _member(self, node: _Node, name: str) -> _Node | None:
        """Return a member of a class, or of that of a value of this type."""
        owner: _Node | None = node
        if not isinstance(node.tree, ast.ClassDef):
            kind = _bare(node.tree if node.is_type else _returned(node).tree)
            owner = self._named(node.module, kind.id) if isinstance(kind, ast.Name) else None
        for module, tree in self._family(owner):
            types = list[ast.AST]()
            for each in _statements(tree.body):
                if isinstance(each, ast.FunctionDef):
                    if each.name == name:
                        return _Node(module, each)
                    types += _types_on_self(each, name)
                elif _assigns(each, name):
                    types.insert(0, getattr(each, "annotation", _UNKNOWN))
            if types:
                best = next((each for each in types if each is not _UNKNOWN), _UNKNOWN)
                return _Node(module, best, is_type=best is not _UNKNOWN)
        return None

    def _made_by(self, node: _Node) -> str:
        """Return the parameters that make an object of a class: of `__init__`, or its fields."""
        made = self._member(node, "__init__")
        if made is not None and isinstance(made.tree, ast.FunctionDef):
            return f"({parameters(made.tree)})"
        lines = [each for _, tree in reversed(list(self._family(node))) for each in tree.body]
        fields = {_text(each.target): each.value for each in lines if isinstance(each, ast.AnnAssign)}
        return f"({', '.join(name if value is None else f'{name}=' for name, value in fields.items())})"

    def _needs(self, node: _Node) -> str:
        """Return the methods that children of a class must have."""
        marks: dict[str, str] = {}
        for each in (each for _, tree in self._family(node) for each in tree.body):
            if isinstance(each, ast.FunctionDef):
                marks.setdefault(each.name, " ".join(map(_text, each.decorator_list)))
        wanted = sorted(name for name, mark in marks.items() if "abstractmethod" in mark)
        return f"class needs {', '.join(wanted)}" if wanted else "class"


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements, with those under `if` and `try`, of which any may be the one that runs."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            handlers = [inner for handler in getattr(each, "handlers", ()) for inner in handler.body]
            yield from _statements([*each.body, *each.orelse, *handlers])


def _assigns(each: ast.AST, text: str) -> bool:
    targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
    return isinstance(each, ast.Assign | ast.AnnAssign) and any(_text(target) == text for target in targets)


def _types_on_self(method: ast.FunctionDef, name: str) -> Iterator[ast.AST]:
    """Types, as far as they are written there, of what a method sets on `self`."""
    said = {arg.arg: arg.annotation for arg in method.args.args}
    for each in ast.walk(method):
        if _assigns(each, f"self.{name}"):
            yield getattr(each, "annotation", None) or said.get(_text(getattr(each, "value", None))) or _UNKNOWN


def _returned(node: _Node) -> _Node:
    return _Node(node.module, getattr(node.tree, "returns", None) or _UNKNOWN, is_type=True)


def _bare(tree: ast.AST) -> ast.AST:
    """Return a type without quotes, `| None` and what is around it."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return _bare(ast.parse(tree.value, mode="eval").body)
    if isinstance(tree, ast.BinOp):
        return _bare(tree.left)
    if isinstance(tree, ast.Subscript) and _text(tree.value) in _WRAPPERS:
        return _bare(tree.slice)
    return tree


def _item(node: _Node) -> _Node | None:
    """Return the type of what is in a container; of a mapping, of its values."""
    tree = _bare(node.tree if node.is_type else _returned(node).tree)
    if not isinstance(tree, ast.Subscript):
        return None
    parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
    return _Node(node.module, parts[-1 if _text(tree.value) in ("dict", "Mapping") else 0], is_type=True)


def parameters(tree: ast.FunctionDef) -> str:
    """Return a signature without types and values, and without `self`: `a, b=, *, c=, **more`."""
    args = ast.parse(f"def _({ast.unparse(tree.args)}): 0").body[0].args  # type: ignore[attr-defined]
    for each in ast.walk(args):
        if isinstance(each, ast.arg):
            each.annotation = None
    args.defaults = [ast.Name("_") for _ in args.defaults]
    args.kw_defaults = [None if each is None else ast.Name("_") for each in args.kw_defaults]
    args.args = args.args[args.args[:1] != [] and args.args[0].arg in ("self", "cls") :]
    return ast.unparse(args).replace("=_", "=")


def _text(tree: ast.AST | None) -> str:
    return "" if tree is None else "?" if tree is _UNKNOWN else ast.unparse(tree).strip("'\"")
