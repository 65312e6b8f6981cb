"""All commands of `kvtide`, each a thin shell over the library."""

from __future__ import annotations

import logging

import typer

from kvtide.cli import calibrate, demo, doctor, explain, ping, serve, size, store
from kvtide.cli.report import fail
from kvtide.config import wait_passively

app = typer.Typer(
    name="kvtide",
    help="Prefill once, reuse anywhere: a KV-cache layer for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("stats")(store.stats)
app.command("ls")(store.ls)
app.command("rm")(store.rm)
app.command("profile")(calibrate.profile)
app.command("ping")(ping.ping)
app.command("size")(size.size)
app.command("explain")(explain.explain)
app.command("serve")(serve.serve)
app.command("token")(serve.token)
app.command("invalidate")(serve.invalidate)
app.command("record")(serve.record)
app.command("calibrate")(calibrate.calibrate)


def run(commands: typer.Typer) -> None:
    """Run commands; a user's mistake ends in one line on stderr and exit status 2."""
    wait_passively()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        commands()
    except ValueError as error:
        fail(str(error))


def main() -> None:
    """Run the `kvtide` command."""
    run(app)
