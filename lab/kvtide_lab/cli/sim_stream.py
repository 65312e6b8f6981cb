"""`kvtide-lab sim stream`: streaming policies on links whose throughput changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from kvtide.cli.report import JsonOption, emit
from kvtide.plan.speeds import ESTIMATORS
from kvtide_lab.sim.links import GBIT, LINK_MODELS, Link, link_named, read_link
from kvtide_lab.sim.stream_report import plot_stream, render_stream, stream_report
from kvtide_lab.sim.stream_sweep import STREAM_POLICIES, StreamSetup, sweep

_DEFAULT = StreamSetup()
TRIALS_QUICK = 30
LINK_HELP = f"A model ({', '.join(LINK_MODELS)}), a trace or a folder of traces; repeats. Default: all models."


def stream(
    link: Annotated[list[str] | None, typer.Option("--link", help=LINK_HELP)] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"all, or some of {', '.join(STREAM_POLICIES)}; repeats.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Tokens; repeats.")] = None,
    slo: Annotated[list[float] | None, typer.Option("--slo", help="Seconds to the first token; repeats.")] = None,
    mean_gbit: Annotated[float, typer.Option("--mean-gbit", help="Mean of traces and models; 0: as traces are.")] = 3.0,
    prefill: Annotated[float, typer.Option("--prefill", help="Tokens/s at the start.")] = _DEFAULT.prefill_tokens_per_s,
    chunk: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk.")] = _DEFAULT.chunk_tokens,
    decode_cores: Annotated[
        int, typer.Option("--decode-cores", help="Cores that decode; 0: decoding takes no time.")
    ] = _DEFAULT.decode_cores,
    kl_goal: Annotated[float, typer.Option("--kl-goal", help="Loss at which nothing is waited for any more.")] = 0.0,
    estimator: Annotated[str, typer.Option("--estimator", help=f"One of {', '.join(ESTIMATORS)}.")] = "last",
    trials: Annotated[int | None, typer.Option("--trials", help="Requests for each row.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of links and starting moments.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this PNG file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests for each row, within 50 s.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Misses, TTFT and quality of every policy on every link, beside the oracle's."""
    if not mean_gbit >= 0:
        raise ValueError(f"--mean-gbit must not be negative, got {mean_gbit}")
    setup = msgspec.structs.replace(
        _DEFAULT,
        context_tokens=tuple(context or _DEFAULT.context_tokens),
        slo_s=tuple(slo or _DEFAULT.slo_s),
        trials=trials or (TRIALS_QUICK if quick else _DEFAULT.trials),
        prefill_tokens_per_s=prefill,
        chunk_tokens=chunk,
        decode_cores=decode_cores,
        kl_goal=kl_goal,
        estimator=estimator,
        seed=seed,
    )
    links = [found for name in link or list(LINK_MODELS) for found in _links(name, mean_gbit * GBIT, seed)]
    names = list(STREAM_POLICIES) if policy in (None, ["all"]) else list(dict.fromkeys(policy or ()))
    report = stream_report(setup, sweep(setup, links, names))
    if plot is not None:
        plot_stream(report, plot)
    emit(report, render_stream, as_json)


def _links(name: str, mean_bytes_per_s: float, seed: int) -> Sequence[Link]:
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ValueError(f"no traces in {name}")
    elif path.is_file():
        files = [path]
    else:
        return [link_named(name, np.random.default_rng(seed), mean_bytes_per_s or 3 * GBIT)]
    traces = [read_link(file) for file in files]
    return [trace.scaled(mean_bytes_per_s) for trace in traces] if mean_bytes_per_s else traces
