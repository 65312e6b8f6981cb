"""Options that several commands share, and texts and profiles as they take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from kvtide.cli.report import CONSOLE, envelope, say
from kvtide_lab.measuring import tables_of

if TYPE_CHECKING:
    from kvtide.codec import Profile
    from kvtide.engines.calibrate.texts import Text

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repeats and cases.")]
PartialOption = Annotated[
    Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
]
PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with vLLM and kvtide; default: this one.")
]
LmcacheOption = Annotated[
    Path | None, typer.Option("--lmcache-python", help="Interpreter with vLLM and LMCache, for that peer.")
]


def tell(result: msgspec.Struct, as_json: bool) -> None:
    """Print a result: as JSON, or as tables as wide as they are, with the command, commit and machine behind it."""
    say(result, as_json)
    if not as_json:
        tables, where = tables_of(result), envelope()
        # Columns for which a terminal has no room would be empty.
        Console(width=max(CONSOLE.width, Console(width=1000).measure(tables).maximum)).print(tables)
        CONSOLE.print(f"{where['command']} at {where['commit']} on {where['cpu']}, {where['machine']}", style="dim")


def texts_of(paths: list[Path] | None) -> list[Text]:
    """Return the user's texts, or those that are judged on."""
    from kvtide.engines.calibrate.texts import evaluation_texts, read_texts

    return list(read_texts(paths) if paths else evaluation_texts())


def profiles_of(paths: Sequence[Path] | None) -> Sequence[Profile]:
    """Return the user's profiles, or those that are installed."""
    from kvtide.engines import installed_profiles, read_profile

    return [read_profile(path) for path in paths] if paths else installed_profiles()
