"""Commands that look into a store, or empty it: stats, ls, rm."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from kvtide.cli.looking import (
    DEFAULT_STORE,
    HeadsOption,
    NamespaceOption,
    ObjectRow,
    StoreOption,
    changing,
    listed,
    looking_at,
    rows_of,
)
from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_age, format_bytes, narrow_table

# Whose headers `stats` reads unless it is told otherwise; what `ls` shows.
STATS_LIMIT = 10_000
LS_LIMIT = 50


class NamespaceRow(msgspec.Struct, frozen=True):
    """What a store holds of one namespace and codec."""

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
