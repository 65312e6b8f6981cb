"""`kvtide-lab bench calibrate`: the cost of calibrating a model's shape."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_calibrate(
    shape: Annotated[list[str] | None, typer.Option("--shape", help="135M, 1B or 8B; default: all.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=385, help="Tokens of each text.")] = 1664,
    as_json: JsonOption = False,
) -> None:
    """Calibrate models with caches of real sizes by the command, in 4 GiB: seconds by stage, peak memory."""
    from kvtide_lab.bench import calibrate

    with progress_bars() as show:
        result = calibrate.run(shape or (), tokens, show)
    emit(result, calibrate.render, as_json)
