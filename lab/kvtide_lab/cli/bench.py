"""`kvtide-lab bench NAME`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.calibrate import TextOption
from kvtide.cli.report import JsonOption, emit, progress_bars
from kvtide_lab.bench import codec_speed, disk, fairness, index, server, siege, stack, stores, valkey
from kvtide_lab.cli.bench_agents import bench_agents
from kvtide_lab.cli.bench_bound import bench_codec_bound
from kvtide_lab.cli.bench_calibrate import bench_calibrate
from kvtide_lab.cli.bench_derived import bench_derived
from kvtide_lab.cli.bench_engine import bench_completion, bench_engine, bench_follow, bench_offload, bench_prompts
from kvtide_lab.cli.bench_importance import bench_importance
from kvtide_lab.cli.bench_levers import bench_codec_levers
from kvtide_lab.cli.bench_local import bench_local_window
from kvtide_lab.cli.bench_position import bench_position
from kvtide_lab.cli.bench_stream import bench_stream
from kvtide_lab.cli.bench_tools import bench_tools
from kvtide_lab.cli.bench_turns import bench_turns
from kvtide_lab.cli.bench_width import bench_codec_width
from kvtide_lab.cli.sim import ClientOption, client_mix
from kvtide_lab.sim import read_trace
from kvtide_lab.sim.fairness import FairnessSetup

app = typer.Typer(help="Measure; every figure comes with machine, commit and command.", no_args_is_help=True)
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repeats and cases, under 50 s.")]
app.command("agents")(bench_agents)
app.command("tools")(bench_tools)
app.command("engine")(bench_engine)
app.command("offload")(bench_offload)
app.command("prompts")(bench_prompts)
app.command("completion")(bench_completion)
app.command("follow")(bench_follow)
ModelOption = Annotated[str | None, typer.Option("--model", help="A model folder; default: SmolLM2-135M.")]

app.command("codec-bound")(bench_codec_bound)
app.command("codec-levers")(bench_codec_levers)
app.command("codec-width")(bench_codec_width)
app.command("calibrate")(bench_calibrate)
app.command("local-window")(bench_local_window)
app.command("derived")(bench_derived)
app.command("stream")(bench_stream)
app.command("importance")(bench_importance)
app.command("position")(bench_position)
app.command("turns")(bench_turns)


@app.command("codec-speed")
def bench_codec_speed(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Entropy coders on one pinned core, beside memcpy, and whole blocks of the real model through tide."""
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import cached as transformers
    from kvtide.engines.transformers import fingerprint, smollm2
    from kvtide_lab.bench import tide_speed

    result = codec_speed.run(quick)
    folder = smollm2.converted_folder()
    tokenizer, model = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = fingerprint.model_layout(model, transformers.BLOCK_TOKENS)
    ids = tokenizer(texts.evaluation_texts()[0].content).input_ids
    rows = tide_speed.run(model, ids, layout, installed_profiles(), quick)
    emit(codec_speed.with_tide(result, rows), codec_speed.render, as_json)


@app.command("disk")
def bench_disk(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write; default: a temporary one.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The disk tier beside fio with the same pattern; it says so if fio is not installed."""
    emit(disk.run(quick, folder), disk.table, as_json)


@app.command("stack")
def bench_stack(
    trace: Annotated[Path | None, typer.Option("--trace", help="In a format of `sim trace`; default: made up.")] = None,
    importance: Annotated[
        Path | None, typer.Option("--importance", help="JSON: important tokens by block number.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Hit ratio of each tier and bytes moved under each promotion policy, on a replayed trace."""
    for path in (trace, importance):
        if path is not None and not path.is_file():
            raise ValueError(f"no file at {path}")
    requests = stack.trace_requests(read_trace(trace)) if trace else None
    weights = stack.read_importance(importance) if importance else None
    result = stack.run(quick, requests, weights, trace.name if trace else "made-up")
    emit(result, stack.table, as_json)


@app.command("index")
def bench_index(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Match, insert and evict in steady state, by policy, with 10 k and 1 M blocks resident."""
    emit(index.run(quick), index.render, as_json)


@app.command("fairness")
def bench_fairness(
    client: ClientOption = None,
    slots: Annotated[int, typer.Option("--slots", help="Send slots of the server.")] = 4,
    pace: Annotated[
        float, typer.Option("--pace", help="Share of the link that the server fills; 0: unlimited.")
    ] = 0.93,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Clients that share a link of 1 Gbit/s through the server, under every send policy."""
    setup = FairnessSetup(mix=client_mix(client), slots=slots, duration_s=5.0)
    emit(fairness.run(setup, pace, 1 if quick else 7), fairness.render, as_json)


@app.command("siege")
def bench_siege(
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help=f"One of {', '.join(siege.ATTACKS)}; several times.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a tenant's reads while others try to stop the server, and whether it ends when told to."""
    emit(siege.run(quick, attack or tuple(siege.ATTACKS)), siege.render, as_json)


@app.command("server")
def bench_server(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The cache server beside nginx and a raw-socket floor: throughput, CPU, a crowd of connections."""
    emit(server.run(quick), server.table, as_json)


@app.command("valkey")
def bench_valkey(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The Valkey tier beside a raw socket and redis-py, on a server that it starts."""
    emit(valkey.run(quick), valkey.table, as_json)


@app.command("stores")
def bench_stores(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Mooncake, a Valkey cluster, a pool and a bucket side by side, and Mooncake's own client, on servers it starts."""
    emit(stores.run(quick), stores.table, as_json)


@app.command("codec-quality")
def bench_codec_quality(
    text: TextOption = None,
    model: ModelOption = None,
    profile: Annotated[list[Path] | None, typer.Option("--profile", help="Profiles for that model.")] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw rate against distortion.")] = Path(
        "codec-quality.png"
    ),
    codec: Annotated[
        list[str] | None, typer.Option("--codec", help="Judge this codec only, as tide-deep; may be repeated.")
    ] = None,
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bits per element against what the model then says, for every codec.

    With `--partial FILE` a run that was stopped goes on, and runs of some codecs each add to one table.
    """
    from kvtide.engines import installed_profiles, read_profile
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import cached as transformers
    from kvtide.engines.transformers import fingerprint, smollm2
    from kvtide_lab.bench import codec_quality, quality_report

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    known = [read_profile(path) for path in profile] if profile else installed_profiles()
    folder = model or str(smollm2.converted_folder())
    tokenizer, loaded = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = fingerprint.model_layout(loaded, transformers.BLOCK_TOKENS)
    size = codec_quality.QUICK if quick else codec_quality.FULL
    subject = codec_quality.subject_of(
        loaded, Path(folder).name, lambda content: tokenizer(content).input_ids, layout, chosen, size
    )
    results = codec_quality.partial_of(subject, known, partial)
    with progress_bars() as show:
        result = codec_quality.run(subject, known, codec or [], results, show)
    quality_report.plot(result, plot)
    emit(result, quality_report.render, as_json)
