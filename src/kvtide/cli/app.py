"""All commands of `kvtide`, each a thin shell over the library."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Annotated, Any

import typer

from kvtide.cli import demo, doctor, explain, profile, serve, size, store
from kvtide.config import wait_passively

app = typer.Typer(
    name="kvtide",
    help="Prefill once, reuse anywhere: a KV-cache layer for LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def version_option(distribution: str) -> Any:
    """`--version` of a program: prints the distribution's name and version, and ends."""

    def show(is_wanted: bool) -> None:
        if is_wanted:
            print(distribution, importlib.metadata.version(distribution))
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Print the version and end.")


@app.callback()
def options(version: Annotated[bool, version_option("kvtide")] = False) -> None:
    """Options of the program itself; its help is the program's."""


for command in (
    *(demo.demo, doctor.doctor, store.stats, store.ls, store.rm, store.ping, size.size, explain.explain),
    *(serve.serve, serve.token, serve.invalidate, serve.record, profile.calibrate),
):
    app.command()(command)
app.add_typer(profile.app, name="profile")


def run(commands: typer.Typer) -> None:
    """Run commands; a user's mistake is one line on stderr and exit status 2."""
    wait_passively()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        commands()
    except ValueError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run the `kvtide` command."""
    run(app)
