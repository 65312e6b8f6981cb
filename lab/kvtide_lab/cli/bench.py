"""`kvtide-lab bench NAME`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.report import JsonOption
from kvtide_lab.bench import disk, fairness, index, server, siege, stack, valkey
from kvtide_lab.cli import engines, quality
from kvtide_lab.cli.options import QuickOption, tell
from kvtide_lab.cli.sim import ClientOption, client_mix
from kvtide_lab.sim.fairness import FairnessSetup
from kvtide_lab.sim.workload import read_trace

app = typer.Typer(help="Measure; every figure comes with machine, commit and command.", no_args_is_help=True)
app.command()(engines.engine)
app.command()(engines.llama)
app.command()(engines.agents)
app.command()(engines.offload)
app.command()(engines.prompts)
app.command()(engines.completion)
app.command()(quality.codec_quality)
app.command()(quality.codec_speed)
app.command()(quality.position)
app.command()(quality.importance)
app.command()(quality.stream)


@app.command("disk")
def bench_disk(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write; default: a temporary one.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The disk tier beside fio with the same pattern; it says so if fio is not installed."""
    tell(disk.run(quick, folder), as_json)


@app.command("stack")
def bench_stack(
    trace: Annotated[Path | None, typer.Option("--trace", help="In a format of `sim trace`; default: made up.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Hit ratio of each tier and bytes moved under each promotion policy, on a replayed trace."""
    if trace is not None and not trace.is_file():
        raise ValueError(f"no file at {trace}")
    requests = stack.trace_requests(read_trace(trace)) if trace else None
    tell(stack.run(quick, requests, trace_name=trace.name if trace else "made-up"), as_json)


@app.command("index")
def bench_index(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Match, insert and evict in steady state, by policy, with 10 k and 1 M blocks resident."""
    tell(index.run(quick), as_json)


@app.command("fairness")
def bench_fairness(
    client: ClientOption = None,
    pace: Annotated[
        float, typer.Option("--pace", help="Share of the link that the server fills; 0: unlimited.")
    ] = 0.93,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Clients that share a link of 1 Gbit/s through the server, under every send policy."""
    setup = FairnessSetup(mix=client_mix(client), slots=4, duration_s=5.0)
    tell(fairness.run(setup, pace, 1 if quick else 7), as_json)


@app.command("siege")
def bench_siege(
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help=f"One of {', '.join(siege.ATTACKS)}; several times.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a tenant's reads while others try to stop the server, and whether it ends when told to."""
    tell(siege.run(quick, attack or tuple(siege.ATTACKS)), as_json)


@app.command("server")
def bench_server(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The cache server beside nginx and a raw-socket floor: throughput and CPU."""
    tell(server.run(quick), as_json)


@app.command("valkey")
def bench_valkey(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The Valkey tier beside a raw socket and redis-py, on a server that it starts."""
    tell(valkey.run(quick), as_json)
