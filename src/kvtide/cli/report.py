"""Output that all commands share: results as JSON or for people, tables, sizes, errors."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvtide

# Tables and progress are for people and go to stderr when stdout carries JSON.
CONSOLE = Console()
# What columns beside a model's name take at most.
_OTHERS_WIDTH = 63
_JSON_BYTES_MAX = 256 << 20
_Value = TypeVar("_Value")
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show bars on stderr, one for each step that is named."""
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done)

        yield show


class DoctorFinding(msgspec.Struct, frozen=True):
    """A line of `kvtide doctor`. `status` is ok, off (optional and absent) or bad; `hint`: a command that mends it."""

    subject: str
    status: str
    detail: str
    hint: str = ""


def envelope() -> dict[str, str]:
    """Machine, processor, commit and command that a result comes from."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "cpu": cpu_name(),
        "commit": _commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def cpu_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    names = (line.partition(":")[2].strip() for line in cpu_text().splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_text() -> str:
    """All that the system tells of its processors, nothing where it does not."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ""


def _commit() -> str:
    source = Path(kvtide.__file__).parent
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    return f"version {kvtide.__version__}"


def say(result: Any, as_json: bool, *shown: Any) -> None:
    """Print a result: as one JSON object on stdout, or as people see it, each a line of markup or a table."""
    if as_json:
        print(json.dumps({**envelope(), **msgspec.to_builtins(result)}))
        return
    for each in shown:
        CONSOLE.print(each)


def read_json(path: Path, kind: type[_Value], mistake: str) -> _Value:
    """The value in a user's file, which may be one without an end. ValueError, which begins with `mistake`, if none."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_JSON_BYTES_MAX), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{mistake} {error}") from error


def narrow_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table that fits 80 columns: only the model's name gives way. Columns that begin with > are figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        width_max = max(12, CONSOLE.width - _OTHERS_WIDTH) if column == "model" else None
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=side, no_wrap=True, overflow="ellipsis", max_width=width_max)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def format_age(age_s: float) -> str:
    """A duration as people read it: `3 d`, `5 h`."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{max(age_s, 0.0):.0f} s"


def format_bytes(count: float) -> str:
    """A size as people read it, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
