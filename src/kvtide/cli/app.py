"""All commands of `kvtide`, each a thin shell over the library."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Annotated, Any

import typer

from kvtide.cli import demo, doctor, explain, llama, profile, serve, size, store
from kvtide.config import wait_passively
from kvtide.errors import KvtideError

_HELP = "Prefill once, reuse anywhere: a KV-cache layer for LLM serving."
app = typer.Typer(name="kvtide", help=_HELP, invoke_without_command=True, pretty_exceptions_enable=False)
_TO_TRY = """Prefill once, reuse anywhere. To try:

  kvtide doctor    what is installed, what is missing, and the command that mends it
  kvtide demo      a chat of ten requests, with a cache and without
  kvtide serve     a cache server on this machine, for engines that name it as their store
  kvtide stats     what a store holds; kvtide explain: why a prompt was not found there

kvtide --help lists all commands, docs/quickstart.md begins with an engine."""
# Where a position was given, and what it was meant for is an option.
_PLACES = ("--store", "--model", "--profile")
# Where more is said of a command's options than in docs/commands.md.
_PAGES = {"serve": "operations.md", "llama": "llamacpp.md", "size": "sizing.md"}
_PAGES |= dict.fromkeys(("invalidate", "record"), "regions.md")
# The class of all mistakes in options, whichever typer is installed.
_UsageError: Any = typer.BadParameter.__bases__[0]


def version_option(distribution: str) -> Any:
    """`--version` of a program: prints the distribution's name and version, and ends."""

    def show(is_wanted: bool) -> None:
        if is_wanted:
            print(distribution, importlib.metadata.version(distribution))
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Print the version and end.")


@app.callback()
def options(context: typer.Context, version: Annotated[bool, version_option("kvtide")] = False) -> None:
    """Options of the program itself; its help is the program's. Without a command: what to try."""
    if context.invoked_subcommand is None:
        print(_TO_TRY)


for command in (
    *(demo.demo, doctor.doctor, store.stats, store.ls, store.rm, store.ping, size.size, explain.explain),
    *(llama.llama, serve.serve, serve.token, serve.invalidate, serve.record, profile.calibrate),
):
    app.command()(command)
app.add_typer(profile.app, name="profile")


def run(commands: typer.Typer) -> None:
    """Run commands; a user's mistake is one line on stderr, with the next command, and exit status 2."""
    wait_passively()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    name = str(commands.info.name)
    try:
        sys.exit(commands(standalone_mode=False, prog_name=name) or 0)
    except typer.Abort:
        sys.exit(1)
    except _UsageError as error:
        mistake, command = _misused(error), error.ctx.command_path if error.ctx else name
    except (ValueError, KvtideError, OSError) as error:
        # The last: a file that can't be read or written.
        mistake, command = " ".join(str(error).split()), " ".join([name, *sys.argv[1:2]])
    except ModuleNotFoundError as error:
        if error.name not in doctor.OPTIONAL:
            raise
        mistake, command = f"{error.name} is not installed: {doctor.OPTIONAL[error.name][1]}", name
    if "kvtide " not in mistake and "pip install" not in mistake:
        page = _PAGES.get(command.split()[-1], "commands.md")
        mistake += f"; see {command} --help and docs/{page}"
    print(f"kvtide: {mistake}", file=sys.stderr)
    sys.exit(2)


def _misused(error: Any) -> str:
    message = str(error.format_message()).strip().rstrip(".?")
    if not message or "\n" in message:
        # A group without a command: it is its help.
        print(message, file=sys.stderr)
        sys.exit(2)
    if "extra argument" in message and error.ctx is not None:
        given = [option for param in error.ctx.command.params for option in param.opts if option in _PLACES]
        if given:
            message += f": this is said with {' or '.join(given)}"
    return message


def main() -> None:
    """Run the `kvtide` command."""
    run(app)
