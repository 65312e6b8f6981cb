"""`kvtide profile`: which profiles the blocks of a store need, and which of them are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from kvtide.cli.looking import (
    DEFAULT_STORE,
    HeadsOption,
    NamespaceOption,
    ObjectRow,
    StoreOption,
    listed,
    looking_at,
    rows_of,
)
from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes, narrow_table
from kvtide.cli.store import STATS_LIMIT
from kvtide.engines import installed_profiles, read_profile


class ProfileRow(msgspec.Struct, frozen=True):
    """A profile by its digest: whose it is, where it is from ("" if it is not here), and what needs it."""

    profile: str
    model: str
    codec: str
    found: str
    objects: int
    stored_bytes: int


def profile(
    files: Annotated[list[Path] | None, typer.Argument(help="Profiles beside those that are installed.")] = None,
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Show which profiles a store's blocks need, and whether they are here: without it a block is a miss."""
    known = {each.digest.hex(): "installed" for each in installed_profiles()}
    known |= {read_profile(path).digest.hex(): str(path) for path in files or ()}
    with looking_at(url) as tier:
        rows = rows_of(tier, listed(tier, namespace)[: limit or None])
    groups: dict[tuple[str, str, str], list[ObjectRow]] = {}
    for row in rows:
        if row.profile:
            groups.setdefault((row.profile, row.model, row.codec), []).append(row)
    found = [
        ProfileRow(*name, known.get(name[0], ""), len(members), sum(row.stored_bytes for row in members))
        for name, members in sorted(groups.items())
    ]
    if as_json:
        emit_json({"store": url, "looked_into": len(rows), "rows": found})
        return
    table = narrow_table("profile", "model", "codec", "here", ">blocks", ">stored")
    for each in found:
        here = "yes" if each.found else "no"
        figures = (str(each.objects), format_bytes(each.stored_bytes))
        table.add_row(each.profile[:12], escape(each.model), escape(each.codec), here, *figures)
    CONSOLE.print(table if found else f"none of {len(rows)} blocks needs a profile")
    if any(not each.found for each in found):
        CONSOLE.print("What is not here is a miss: give the file to attach(profiles=[read_profile(FILE)]).")
