"""`kvtide bench NAME` and `kvtide calibrate`: measurements and profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvtide.bench import codec_speed, disk, index, stack, valkey
from kvtide.cli.bench_engine import bench_engine, bench_offload
from kvtide.cli.report import CONSOLE, emit, emit_json, format_bytes
from kvtide.cli.store import JsonOption
from kvtide.codec.calibrate import PROFILE_KINDS, ProfileFitter
from kvtide.sim import read_trace

__all__ = ["app", "calibrate"]

app = typer.Typer(help="Measure; every figure comes with machine, commit and command.", no_args_is_help=True)
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repeats and cases, under 50 s.")]
app.command("engine")(bench_engine)
app.command("offload")(bench_offload)
TextOption = Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be given several times.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="A model folder; default: SmolLM2-135M.")]


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show bars on stderr, one for each step that is named."""
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done)

        yield show


@app.command("codec-speed")
def bench_codec_speed(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Entropy coders on one pinned core, beside memcpy."""
    emit(codec_speed.run(quick), codec_speed.render, as_json)


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


@app.command("valkey")
def bench_valkey(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The Valkey tier beside a raw socket and redis-py, on a server that it starts."""
    emit(valkey.run(quick), valkey.table, as_json)


@app.command("codec-quality")
def bench_codec_quality(
    text: TextOption = None,
    model: ModelOption = None,
    profile: Annotated[list[Path] | None, typer.Option("--profile", help="Profiles for that model.")] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw rate against distortion.")] = Path(
        "codec-quality.png"
    ),
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bits per element against what the model then says, for every codec."""
    from kvtide.bench import codec_quality, texts
    from kvtide.engines import profiles, smollm2, transformers

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    known = [profiles.read_profile(path) for path in profile] if profile else profiles.shipped_profiles()
    folder = model or str(smollm2.converted_folder())
    tokenizer, loaded = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = transformers.model_layout(loaded, transformers.BLOCK_TOKENS)
    size = codec_quality.QUICK if quick else codec_quality.FULL
    with _progress() as show:
        result = codec_quality.run(
            loaded, Path(folder).name, lambda content: tokenizer(content).input_ids, layout, chosen, known, size, show
        )
    codec_quality.plot(result, plot)
    emit(result, codec_quality.render, as_json)


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")],
    model: Annotated[str | None, typer.Argument(help="A model folder; default: SmolLM2-135M.")] = None,
    text: TextOption = None,
    codec: Annotated[str, typer.Option("--codec", help=f"One of {', '.join(PROFILE_KINDS)}.")] = "cachegen",
    tokens: Annotated[int, typer.Option("--tokens", min=256, help="Tokens of each text.")] = 1024,
    as_json: JsonOption = False,
) -> None:
    """Fit a profile: what a codec needs to know of one model, from texts, once."""
    from kvtide.bench import texts
    from kvtide.engines import judge, smollm2, transformers

    if codec not in PROFILE_KINDS:
        raise ValueError(f"profiles are made for {', '.join(PROFILE_KINDS)}, got {codec!r}")
    chosen = texts.read_texts(text) if text else texts.calibration_texts()
    folder = model or str(smollm2.converted_folder())
    tokenizer, loaded = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = transformers.model_layout(loaded, transformers.BLOCK_TOKENS)
    fitter = ProfileFitter(codec, Path(folder).name, layout)
    with _progress() as show:
        for number, item in enumerate(chosen):
            show("texts", number, len(chosen))
            ids = tokenizer(item.content[: 8 * tokens]).input_ids[:tokens]
            blocks = judge.capture_blocks(loaded, ids, layout)
            if not fitter.deviation.any():
                fitter.scale(blocks)
            for bits in blocks:
                fitter.add(bits)
        show("texts", len(chosen), len(chosen))
    profile = fitter.profile(len(chosen))
    data = profile.to_bytes()
    output.write_bytes(data)
    found = {"profile": str(output), "digest": profile.digest.hex(), "codec": codec, "model": profile.model}
    if as_json:
        emit_json({**found, "texts": profile.texts, "tokens": profile.tokens, "profile_bytes": len(data)})
    else:
        CONSOLE.print(
            f"{output}: {format_bytes(len(data))}, fitted on {profile.tokens} tokens of {profile.texts} texts"
        )
        CONSOLE.print(f"digest {profile.digest.hex()}")
