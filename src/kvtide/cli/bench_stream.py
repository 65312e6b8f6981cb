"""`kvtide bench stream`: streaming policies over shaped links, with the real server, model and decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.progress import progress_bars
from kvtide.cli.report import emit
from kvtide.cli.store import JsonOption
from kvtide.sim.links import Link, read_link

__all__ = ["bench_stream"]

MBIT = 1e6 / 8


def bench_stream(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A link trace, scaled to --mean-mbit; default: none.")
    ] = None,
    mean_mbit: Annotated[float, typer.Option("--mean-mbit", help="Mean of the trace.")] = 100.0,
    quick: Annotated[bool, typer.Option("--quick", help="One short context, once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Misses, quality and TTFT of every policy for real, beside what the simulator says."""
    from kvtide.bench import stream, texts
    from kvtide.engines import profiles, smollm2, transformers

    if trace is not None and not trace.is_file():
        raise ValueError(f"no trace at {trace}")
    if not mean_mbit > 0:
        raise ValueError(f"--mean-mbit must be positive, got {mean_mbit}")
    # From 1 Gbit/s to 50 Mbit/s when a third of a long context's bases can have come, and 200 Mbit/s throughout.
    step = Link("step 1000 to 50 Mbit/s", [0, 0.05, 600], [0, 50 * MBIT, (50 + 50 * 599.95) * MBIT])
    constant = Link("constant 200 Mbit/s", [0, 600], [0, 200 * 600 * MBIT])
    links = [step, *([read_link(trace).scaled(mean_mbit * MBIT)] if trace else []), constant]
    folder = str(smollm2.converted_folder())
    tokenizer, model = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = transformers.model_layout(model, stream.BLOCK_TOKENS)
    profile = next(found for found in profiles.shipped_profiles() if found.kind == "cachegen" and found.fits(layout))
    size = stream.QUICK if quick else stream.FULL
    ids = tokenizer(texts.evaluation_texts()[2].content[:40_000]).input_ids
    with progress_bars() as show:
        result = stream.run(model, ids, layout, profile, links, size, show)
    emit(result, stream.render, as_json)
