"""`kvtide-lab bench stream`: streaming policies over shaped links, with the real server, model and decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvtide.cli.report import JsonOption, emit, progress_bars
from kvtide_lab.config import leave_a_core
from kvtide_lab.sim.links import Link, link_named, read_link

MBIT = 1e6 / 8
# The mean of mahimahi's T-Mobile trace.
LTE_MBIT = 17.0


def bench_stream(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace of a cellular link; default: a model of one.")
    ] = None,
    mean_mbit: Annotated[float, typer.Option("--mean-mbit", help="Mean of it; 0: a trace as it is.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="One short context, once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Misses, quality and TTFT of every policy for real, beside what the simulator says."""
    # Server, link and fetching run on this machine too; where they would be, the engine's cores are its own.
    leave_a_core()
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import fingerprint, smollm2
    from kvtide_lab.bench import stream

    if trace is not None and not trace.is_file():
        raise ValueError(f"no trace at {trace}")
    if not mean_mbit >= 0:
        raise ValueError(f"--mean-mbit must not be negative, got {mean_mbit}")
    # When about half of a full context's bytes have come.
    step_s = 0.005 if quick else 0.02
    carried = 1000 * step_s
    step = Link("step 1000 to 50 Mbit/s", [0, step_s, 600], [0, carried * MBIT, (carried + 50 * (600 - step_s)) * MBIT])
    constant = Link("constant 200 Mbit/s", [0, 600], [0, 200 * 600 * MBIT])
    links = [step, _cellular(trace, mean_mbit * MBIT), constant]
    folder = str(smollm2.converted_folder())
    tokenizer, model = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    layout = fingerprint.model_layout(model, stream.BLOCK_TOKENS)
    fitting = [profile for profile in installed_profiles() if profile.fits(layout)]
    size = stream.QUICK if quick else stream.FULL
    ids = tokenizer(texts.evaluation_texts()[2].content[:40_000]).input_ids
    with progress_bars() as show:
        result = stream.run(model, ids, layout, fitting, links, size, show)
    emit(result, stream.render, as_json)


def _cellular(trace: Path | None, bytes_per_s: float) -> Link:
    if trace is None:
        return link_named("ar1", np.random.default_rng(0), bytes_per_s or LTE_MBIT * MBIT)
    link = read_link(trace)
    return link.scaled(bytes_per_s) if bytes_per_s else link
