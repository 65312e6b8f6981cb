"""Keeps what a version of vLLM has for the connector as a snapshot in the tree. Imports neither of both.

Usage: vllm_surface.py WHEEL_OR_FOLDER   (writes engines/surfaces/VERSION.json; exit status 1 if it can't work)

Uses are found by following values through the connector's functions, from the parameters in ROOTS on.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtide.engines.plugin import TESTED_VLLM
from kvtide.engines.surface import Sources, Surface, SurfaceChanges, parameters, snapshots, version_numbers

ENGINES = Path(__file__).resolve().parents[1] / "src" / "kvtide" / "engines"
CACHES = "vllm.v1.kv_cache_interface"
# The groups' specs are of one of these classes, each of which has attributes of its own.
SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
_SPEC = f"{CACHES}:*"
_CONFIG = "vllm.config:VllmConfig"
# What a name or an expression stands for, wherever nothing else says it.
ROOTS = {
    "vllm_config": _CONFIG,
    "engine_config": _CONFIG,
    "self._vllm_config": _CONFIG,
    "kv_cache_config": f"{CACHES}:KVCacheConfig",
    "spec": _SPEC,
    "layers.specs": f"{_SPEC}...",
    "request": "vllm.v1.request:Request",
    "blocks.get_block_ids": "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids",
    "scheduler_output": "vllm.v1.core.sched.output:SchedulerOutput",
    "block_state": "vllm.v1.core.sched.output:SchedulerOutput.kv_connector_block_state",
    "connector_output": "vllm.v1.outputs:KVConnectorOutput",
    "offloading_spec": "vllm.v1.kv_offload.base:OffloadingSpec",
    "config": "vllm.v1.kv_offload.config:OffloadingConfig",
    "self._block_pool": "vllm.v1.core.block_pool:BlockPool",
}
# Types that the sources leave open.
ALIASES = {
    f"{CACHES}:KVCacheConfig.kv_cache_groups[].kv_cache_spec": _SPEC,
    "vllm.config:get_layers_from_vllm_config()[]": "vllm.model_executor.layers.attention:Attention",
    f"{_SPEC}...[]": _SPEC,
}
# Values of others: what is behind them is no part of vLLM.
FOREIGN = {
    *("dtype", "dtypes", "shapes", "hf_config", "all_token_ids", "kv_quant_mode", "mamba_type", "cache_salt", "data"),
    *("chunk_ids", "keys", "kv_connector_worker_meta", "__version__"),
}
# Without these something is counted less well, and nothing else.
OPTIONAL = ("vllm.v1.metrics.cache_hit_source:", "KVConnectorBase_V1.get_external_cache_hit_sources")
# Looked at beforehand: what a connector for GPUs reads next.
AHEAD = {
    f"{_CONFIG}.{each}"
    for each in (
        *("attention_config", "attention_config.backend", "mamba_config", "mamba_config.backend"),
        *("cache_config.block_size", "cache_config.mamba_cache_dtype", "cache_config.mamba_ssm_cache_dtype"),
        *("cache_config.mamba_cache_mode", "parallel_config.rank", "scheduler_config.max_num_batched_tokens"),
    )
}
# Names of kvtide's own values, and of tensors, that have attributes of the same names.
OURS = {"self", "other", "layout", "layer", "model", "states", "tier"}
# Public in the connector's classes, and no hook of vLLM's.
OWN = {"scheduler", "worker"}

Path_ = str | tuple["Path_", ...] | None


class _Zipped(tuple[Path_, ...]):
    """Several things that are iterated over together."""


class Call(NamedTuple):
    """A call of something of vLLM's: so many arguments in order, and those with a name."""

    use: str
    given: int
    names: tuple[str, ...]


class Hook(NamedTuple):
    """A method that vLLM calls: of which bases it may be, and the parameters that it takes."""

    bases: tuple[str, ...]
    name: str
    takes: str


class Uses(NamedTuple):
    """All that the connector uses. unknown: attributes that may be vLLM's, of values whose type nobody has said."""

    paths: set[str]
    calls: list[Call]
    hooks: list[Hook]
    unknown: list[str]

    def wanted(self) -> Iterator[list[str]]:
        """Return uses of which a version must have one of each list; those that end in `?` it may lack."""
        for path in sorted(self.paths):
            yield [path.replace(":*", f":{each}") for each in SPECS] if ":*" in path else [_marked(path)]
        for hook in self.hooks:
            yield [_marked(f"{base}.{hook.name}") for base in hook.bases]


def connector_uses() -> Uses:
    """Read the connector's files."""
    found = Uses(set(), [], [], [])
    for file in [ENGINES / "plugin.py", *sorted((ENGINES / "vllm").glob("*.py"))]:
        _Reader(file, found).read()
    names = {path.rpartition(".")[2] for path in found.paths}
    found.unknown[:] = [each for each in found.unknown if each.rpartition(".")[2] in names]
    return found


def problems(uses: Uses, surface: Surface, tested: Surface) -> list[str]:
    """Return why the connector can't work with a version; nothing if it can."""
    wanted = list(uses.wanted())
    known = {*AHEAD, *(use for each in wanted for use in each)}
    found = [f"{use} is in the snapshot and not used" for use in surface if use not in known]
    found += [
        f"nothing has {' or '.join(each)}" for each in wanted if not any(map(surface.get, each)) and each[0][-1] != "?"
    ]
    found += [f"{use} is missing" for use in SurfaceChanges.between(tested, surface).missing]
    for call in uses.calls:
        text = surface.get(_marked(call.use)) or ""
        if text.startswith("(") and not _takes(text, call.given, call.names):
            found.append(f"{call.use}{text} does not take {call.given} arguments and {call.names}")
    for hook in uses.hooks:
        for text in (surface.get(_marked(f"{base}.{hook.name}")) or "" for base in hook.bases):
            if text.startswith("(") and not _takes(hook.takes, len(_arguments(text).args), ()):
                found.append(f"our {hook.name}{hook.takes} is called with {text}")
    for base in {base for hook in uses.hooks for base in hook.bases}:
        needs = (surface.get(base) or "").partition(" needs ")[2]
        ours = {hook.name for hook in uses.hooks if base in hook.bases}
        found += [f"{base} needs {each}, which we have not" for each in needs.split(", ") if each not in {*ours, ""}]
    return found


def _marked(path: str) -> str:
    return f"{path}?" if any(each in path for each in OPTIONAL) and not path.endswith("?") else path


def _arguments(text: str) -> ast.arguments:
    (tree,) = ast.parse(f"def _{text.replace('=', '=0')}: 0").body
    assert isinstance(tree, ast.FunctionDef)
    return tree.args


def _takes(text: str, count: int, names: Sequence[str]) -> bool:
    """Tell if parameters take so many arguments in order, and those with a name."""
    args = _arguments(text)
    words, others = [each.arg for each in args.args], [each.arg for each in args.kwonlyargs]
    wanted = {*words[: len(words) - len(args.defaults)]}
    wanted |= {each for each, value in zip(others, args.kw_defaults, strict=True) if value is None}
    given, is_open = {*words[:count], *names}, args.kwarg is not None
    fits = (count <= len(words) or args.vararg is not None) and len(given) == min(count, len(words)) + len(names)
    return fits and wanted <= given and (is_open or given <= {*words, *others})


class _Reader:
    """Follows values through one file."""

    def __init__(self, file: Path, found: Uses) -> None:
        self._file, self._found = file, found
        self._imports: dict[str, str] = {}
        self._bases: list[str] = []
        self._own: set[str] = set()

    def read(self) -> None:
        tree = ast.parse(self._file.read_text(encoding="utf-8"))
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom) and (each.module or "").split(".")[0] == "vllm":
                for alias in each.names:
                    inside = f"vllm.{alias.name}:" if each.module == "vllm" else f"{each.module}:{alias.name}"
                    self._imports[alias.asname or alias.name] = inside
            elif isinstance(each, ast.Import) and any(alias.name == "vllm" for alias in each.names):
                self._imports["vllm"] = "vllm:"
        self._body(tree.body, {})

    def _body(self, body: Iterable[ast.AST], names: dict[str, Path_]) -> None:
        for each in body:
            self._statement(each, names)

    def _statement(self, each: ast.AST, names: dict[str, Path_]) -> None:
        if isinstance(each, ast.ClassDef):
            self._class(each, names)
        elif isinstance(each, ast.FunctionDef):
            self._function(each, names)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            value = None if each.value is None else self._path(each.value, names)
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                self._path(target, names)
                _bind(target, value, names)
        elif isinstance(each, ast.For):
            _bind(each.target, _item(self._path(each.iter, names)), names)
            self._body([*each.body, *each.orelse], names)
        else:
            if isinstance(each, ast.Assert) and isinstance(each.test, ast.Call):
                # isinstance says which of our own classes it is.
                _bind(each.test.args[0], None, names)
            for inner in ast.iter_child_nodes(each):
                (self._path if isinstance(inner, ast.expr) else self._statement)(inner, names)

    def _class(self, each: ast.ClassDef, names: dict[str, Path_]) -> None:
        paths = [self._path(base, names) for base in each.bases]
        self._bases = [path for path in paths if isinstance(path, str)]
        made = [inner for inner in ast.walk(each) if isinstance(inner, ast.Attribute) and _is_self(inner.value)]
        self._own = {inner.attr for inner in made if isinstance(inner.ctx, ast.Store)}
        self._own |= {inner.name for inner in each.body if isinstance(inner, ast.FunctionDef)}
        self._own |= {ast.unparse(inner.target) for inner in each.body if isinstance(inner, ast.AnnAssign)}
        for inner in each.body if self._bases else ():
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and inner.name not in OWN:
                self._found.hooks.append(Hook(tuple(self._bases), inner.name, f"({parameters(inner)})"))
        self._body(each.body, dict(names))
        self._bases, self._own = [], set()

    def _function(self, each: ast.FunctionDef, names: dict[str, Path_]) -> None:
        args, inside = each.args, dict(names)
        for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
            said = None if arg.annotation is None else self._path(arg.annotation, names)
            inside[arg.arg] = said or ROOTS.get(arg.arg)
        self._body(each.body, inside)

    def _use(self, path: str) -> str:
        if not path.endswith((":", "*", "...", "[]", "()", ":__file__")):
            self._found.paths.add(path)
        return ALIASES.get(path, path)

    def _path(self, each: ast.AST, names: dict[str, Path_]) -> Path_:
        """Return what an expression leads to; None for what is not vLLM's."""
        if (text := ROOTS.get(ast.unparse(each))) is not None and not isinstance(each, ast.Name):
            return self._use(text)
        if isinstance(each, ast.Name):
            path = names.get(each.id) or self._imports.get(each.id) or ROOTS.get(each.id)
            return self._use(path) if isinstance(path, str) else path
        if isinstance(each, ast.Attribute):
            return self._attribute(each, names)
        if isinstance(each, ast.Call):
            return self._call(each, names)
        if isinstance(each, ast.Subscript):
            self._path(each.slice, names)
            base = self._path(each.value, names)
            return base if isinstance(each.slice, ast.Slice) else _item(base)
        if isinstance(each, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inside = dict(names)
            for loop in each.generators:
                _bind(loop.target, _item(self._path(loop.iter, inside)), inside)
                for test in loop.ifs:
                    self._path(test, inside)
            for part in (each.key, each.value) if isinstance(each, ast.DictComp) else (each.elt,):
                self._path(part, inside)
            return None
        parts = [self._path(inner, names) for inner in ast.iter_child_nodes(each) if isinstance(inner, ast.expr)]
        if isinstance(each, ast.Tuple):
            return tuple(parts)
        if isinstance(each, ast.IfExp | ast.BoolOp | ast.Starred | ast.NamedExpr):
            return next((part for part in parts if part is not None), None)
        return None

    def _attribute(self, each: ast.Attribute, names: dict[str, Path_]) -> Path_:
        base = self._path(each.value, names)
        if _is_self(each.value) and self._bases and each.attr not in self._own:
            base = self._bases[0]
        if isinstance(each.value, ast.Call) and getattr(each.value.func, "id", "") == "super" and self._bases:
            base = self._bases[0]
        if not isinstance(base, str):
            if base is None and getattr(each.value, "id", "self") not in OURS:
                self._found.unknown.append(f"{self._file.name}:{each.lineno} {ast.unparse(each)}")
            return None
        path = self._use(f"{base}{each.attr}" if base.endswith(":") else f"{base}.{each.attr}")
        return None if each.attr in FOREIGN else path

    def _call(self, each: ast.Call, names: dict[str, Path_]) -> Path_:
        given = [self._path(arg, names) for arg in (*each.args, *(word.value for word in each.keywords))]
        name = getattr(each.func, "id", "")
        if name == "getattr" and isinstance(given[0], str):
            self._found.paths.add(f"{given[0]}.{ast.literal_eval(each.args[1])}{'?' * (len(each.args) > 2)}")
        if name == "zip":
            return _Zipped(given[: len(each.args)])
        if isinstance(each.func, ast.Attribute) and each.func.attr in ("items", "values"):
            base = self._path(each.func.value, names)
            return _Zipped((None, base)) if each.func.attr == "items" else base
        path = self._path(each.func, names)
        if not isinstance(path, str):
            return None
        words = tuple(word.arg for word in each.keywords if word.arg)
        is_class = re.split(r"[:.]", path)[-1][:1].isupper()
        if is_class:
            self._found.paths.add(f"{path}()")
        if not any(isinstance(arg, ast.Starred) for arg in each.args):
            self._found.calls.append(Call(f"{path}()" if is_class else path, len(each.args), words))
        return self._use(f"{path}()")


def _is_self(each: ast.AST) -> bool:
    return isinstance(each, ast.Name) and each.id in ("self", "cls")


def _item(path: Path_) -> Path_:
    """Return an item of what is iterated over."""
    if isinstance(path, tuple):
        return tuple(map(_item, path)) if isinstance(path, _Zipped) else None
    return None if path is None else ALIASES.get(f"{path}[]", f"{path}[]")


def _bind(target: ast.AST, path: Path_, names: dict[str, Path_]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = path
    elif isinstance(target, ast.Tuple):
        is_plain = isinstance(path, tuple) and not isinstance(path, _Zipped) and len(path) == len(target.elts)
        for index, inner in enumerate(target.elts):
            _bind(inner, path[index] if isinstance(path, tuple) and is_plain else _item(path), names)


def main() -> int:
    """Write a snapshot; say what is other than in the one before it, and why the connector could not work."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        if folder.is_file():
            with zipfile.ZipFile(folder) as wheel:
                wheel.extractall(scratch, [each for each in wheel.namelist() if each.endswith(".py")])
            folder = Path(scratch)
        said = (folder / "vllm" / "_version.py").read_text(encoding="utf-8").partition("version = '")[2]
        version = ".".join(map(str, version_numbers(said)))
        uses, sources = connector_uses(), Sources(folder)
        paths = {*AHEAD, *(use for each in uses.wanted() for use in each)}
        surface = {use: text for use, text in sources.surface(paths).items() if text is not None}
    (ENGINES / "surfaces" / f"{version}.json").write_text(json.dumps(surface, indent=0) + "\n", encoding="utf-8")
    name = ".".join(map(str, version_numbers(TESTED_VLLM[-1])))
    tested = snapshots()[name]
    missing, changed = SurfaceChanges.between(tested, surface)
    print(f"{version} beside {name}:", *(f"{use} is gone" for use in missing), *changed, sep="\n  ")
    found = problems(uses, surface, tested)
    print(*found or ["the connector can work with it"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
