"""`kvtide stats`, `ls` and `rm`, and stores of any URL as commands open them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_age, format_bytes, narrow_table
from kvtide.clock import SystemClock
from kvtide.config import Limits, cache_home
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.explain import read_header, read_object
from kvtide.store import NOTES
from kvtide.tier import ObjectInfo, Tier, disk_path, open_tier
from kvtide.tier.disk import DiskTier

DEFAULT_STORE = str(cache_home() / "demo-store")
# Objects that are read at the same time: what is far away takes its time for each.
READERS = 8

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", help="A path, disk://, http(s)://, pool://, valkey://, mooncake:// or s3:// URL, with options."
    ),
]
HeadsOption = Annotated[
    int, typer.Option("--limit", min=0, help="Objects whose headers are read, newest first; 0: all.")
]
NamespaceOption = Annotated[str, typer.Option("--namespace", help="Leading hex digits: of these namespaces alone.")]


# Whose headers `stats` reads unless it is told otherwise; what `ls` shows.
STATS_LIMIT = 10_000
LS_LIMIT = 50


def looking_at(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to look at it: nothing in it changes. ValueError if it is not there or does not answer."""
    tier = _tier_at(url)
    below = below_seal(tier)
    return opened(tier, below.open_read_only if isinstance(below, DiskTier) else tier.open)


def changing(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to change it. ValueError as in `looking_at`."""
    tier = _tier_at(url)
    return opened(tier, tier.open)


def below_seal(tier: Tier) -> Tier:
    """Return the tier that a sealed one wraps; another one as it is."""
    return getattr(tier, "tier", tier)


def _tier_at(url: str) -> Tier:
    """Return the tier of a store, not yet opened; nothing is made."""
    if url.startswith("memory://"):
        raise ValueError("memory:// is the memory of one process: ask the server that has it, http://host:port")
    path = disk_path(url)
    if path is not None and not path.is_dir():
        raise ValueError(f"no store at {path}: it is not a directory")
    if path is not None and not (path / "segments").is_dir():
        raise ValueError(f"no store at {path}: it has no folder named segments, nothing was ever stored there")
    return open_tier(url, Limits(), SystemClock(), lambda key: False)


@contextmanager
def opened(tier: Tier, action: Callable[[], None]) -> Iterator[Tier]:
    """Open a tier by `action` for the time of the `with`. ValueError if it can't be used."""
    try:
        action()
        yield tier
    except TierUnavailable as error:
        raise ValueError(str(error)) from error
    finally:
        tier.close()


class ObjectRow(msgspec.Struct, frozen=True):
    """One object in a listing; `problem` is empty for a good one. quality: the KL it was stored for, 0 for exact."""

    namespace: str
    key: str
    model: str
    codec: str
    start: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    age_s: float
    problem: str
    profile: str = ""
    quality: float = 0.0


def listed(tier: Tier, namespace: str = "", order: str = "use") -> list[ObjectInfo]:
    """Return what a store lists of namespaces that begin so: newest use, largest or smallest key first."""
    infos = [info for info in tier.objects() if info.id.namespace.hex().startswith(namespace.lower())]
    orders: dict[str, Callable[[ObjectInfo], tuple[object, ...]]] = {
        "use": lambda info: (-info.last_use_s, info.id),
        "size": lambda info: (-info.size, info.id),
        "key": lambda info: (info.id,),
    }
    return sorted(infos, key=orders[order])


def rows_of(tier: Tier, infos: Sequence[ObjectInfo], is_verified: bool = False) -> list[ObjectRow]:
    """Read headers, or all bytes, of objects; those that went away meanwhile are left out."""
    now_s = SystemClock().wall_s()
    with ThreadPoolExecutor(READERS, thread_name_prefix="kvtide-look") as readers:
        rows = readers.map(partial(_row, tier, now_s, is_verified), infos)
        return [row for row in rows if row is not None]


def _row(tier: Tier, now_s: float, is_verified: bool, info: ObjectInfo) -> ObjectRow | None:
    plain = partial(ObjectRow, info.id.namespace.hex(), info.id.key.hex())
    age_s = now_s - info.last_use_s
    try:
        stored = (read_object if is_verified else read_header)(tier, info.id)
    except CorruptPayload as error:
        return plain("", "", 0, 0, 0, info.size, age_s, str(error))
    if stored is None:
        is_here = below_seal(tier) is not tier and below_seal(tier).contains(info.id)
        why = "sealed by a key that is not here: kvtide doctor"
        return plain("", "", 0, 0, 0, info.size, age_s, why) if is_here else None
    if stored.codec_id in NOTES:
        # It holds no tokens of its own.
        return plain(NOTES[stored.codec_id], stored.codec_id, 0, 0, 0, info.size, age_s, "")
    meta, profile = stored.meta, stored.profile.hex() if stored.profile else ""
    layout = meta.layout
    sizes = (layout.tokens, layout.raw_bytes, info.size)
    return plain(meta.model, stored.codec_id, meta.start, *sizes, age_s, "", profile, stored.quality)


class NamespaceRow(msgspec.Struct, frozen=True):
    """Objects, blocks and bytes of one namespace and codec in a store."""

    namespace: str
    model: str
    codec: str
    objects: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float


def stats(
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Show how much a store holds, by namespace and codec."""
    with looking_at(url) as tier:
        infos = listed(tier, namespace)
        rows = rows_of(tier, infos[: limit or None])
    groups: dict[tuple[str, str, str], list[ObjectRow]] = {}
    for row in rows:
        if not row.problem:
            groups.setdefault((row.namespace, row.model, row.codec), []).append(row)
    summary = [_namespace_row(name, members) for name, members in sorted(groups.items())]
    problems = sum(1 for row in rows if row.problem)
    total = sum(info.size for info in infos)
    if as_json:
        counts = {"objects": len(infos), "looked_into": len(rows), "stored_bytes": total, "problems": problems}
        emit_json({"store": url, **counts, "rows": summary})
        return
    table = narrow_table("namespace", "model", "codec", ">blocks", ">tokens", ">stored", ">ratio")
    for item in summary:
        figures = (str(item.objects), str(item.tokens), format_bytes(item.stored_bytes), f"{item.ratio:.2f}")
        table.add_row(item.namespace[:12], escape(item.model), escape(item.codec), *figures)
    CONSOLE.print(table)
    CONSOLE.print(f"{len(infos)} objects, {format_bytes(total)}")
    if len(rows) < len(infos):
        CONSOLE.print(f"The table counts the {len(rows)} used last; --limit 0 for all.")
    if problems:
        CONSOLE.print(f"{problems} objects can't be read; `kvtide ls` names them.")


def _namespace_row(name: tuple[str, str, str], members: list[ObjectRow]) -> NamespaceRow:
    raw_bytes, stored_bytes = sum(row.raw_bytes for row in members), sum(row.stored_bytes for row in members)
    tokens = sum(row.tokens for row in members)
    return NamespaceRow(*name, len(members), tokens, raw_bytes, stored_bytes, raw_bytes / stored_bytes)


def ls(
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    order: Annotated[
        Literal["use", "size", "key"], typer.Option("--sort", help="Newest use, largest, or by key.")
    ] = "use",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Objects to show; 0: all.")] = LS_LIMIT,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of them and check it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the objects of a store, newest use first."""
    with looking_at(url) as tier:
        infos = listed(tier, namespace, order)
        rows = rows_of(tier, infos[: limit or None], verify)
    if as_json:
        emit_json({"store": url, "objects": len(infos), "rows": rows})
        return
    table = narrow_table("namespace", "key", "tokens", "codec", ">stored", ">used")
    for row in rows:
        span = f"[{row.start}, {row.start + row.tokens})" if row.tokens else ""
        kind = "broken" if row.problem else escape(row.codec)
        names = (row.namespace[:8], row.key[:16], escape(span), kind)
        table.add_row(*names, format_bytes(row.stored_bytes), format_age(row.age_s))
    CONSOLE.print(table)
    for row in rows:
        if row.problem:
            CONSOLE.print(f"{row.key[:16]}: {escape(row.problem)}")
    if len(rows) < len(infos):
        CONSOLE.print(f"{len(rows)} of {len(infos)} objects; --limit 0 for all, --sort for others first.")


def rm(
    prefixes: Annotated[list[str] | None, typer.Argument(help="Leading hex digits of keys or namespaces.")] = None,
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Remove every object.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="Don't ask before --all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove objects by leading hex digits (at least 4) of their key or namespace."""
    chosen = [prefix.lower() for prefix in prefixes or []]
    if bool(chosen) == everything:
        raise ValueError("name what to remove by hex digits of key or namespace, or give --all")
    for prefix in chosen:
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef"):
            raise ValueError(f"expected at least 4 hex digits, got {prefix!r}")
    with changing(url) as tier:
        infos = listed(tier, namespace)
        if everything and not is_sure and not _agreed(len(infos), sum(info.size for info in infos), url, as_json):
            CONSOLE.print("nothing removed")
            return
        removed = []
        for info in infos:
            names = (info.id.key.hex(), info.id.namespace.hex())
            matches = everything or any(name.startswith(prefix) for name in names for prefix in chosen)
            if matches and tier.delete(info.id, "removed"):
                removed.append(info.size)
    if as_json:
        emit_json({"store": url, "removed": len(removed), "removed_bytes": sum(removed)})
    else:
        CONSOLE.print(f"removed {len(removed)} objects, {format_bytes(sum(removed))}")


def _agreed(objects: int, size: int, url: str, as_json: bool) -> bool:
    """Ask whether all is to go. ValueError where nobody can be asked."""
    if as_json or not sys.stdin.isatty():
        raise ValueError(f"--all would remove {objects} objects and nobody can be asked: add --yes")
    return typer.confirm(f"Remove all {objects} objects, {format_bytes(size)}, of {url}?")
