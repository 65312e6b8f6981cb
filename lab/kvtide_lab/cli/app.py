"""The commands of `kvtide-lab`: what measures and simulates."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtide.cli import run, version_option
from kvtide_lab.cli import bench, sim

app = typer.Typer(
    name="kvtide-lab", help="Measure and simulate kvtide.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def options(version: Annotated[bool, version_option("kvtide-lab")] = False) -> None:
    """Options of the program itself; its help is the program's."""


app.add_typer(bench.app, name="bench")
app.add_typer(sim.app, name="sim")


def main() -> None:
    """Run the command line; a user's mistake ends in one line on stderr and exit status 2."""
    run(app)
