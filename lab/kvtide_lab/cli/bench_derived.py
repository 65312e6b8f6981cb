"""`kvtide-lab bench derived`: tide on models that say what SmolLM2 says of another cache."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_derived(
    kind: Annotated[list[str] | None, typer.Option("--kind", help="A model; may be repeated. Default: all.")] = None,
    texts: Annotated[int, typer.Option("--texts", min=1, max=12, help="Texts to judge each on.")] = 6,
    as_json: JsonOption = False,
) -> None:
    """Make models of SmolLM2's weights by exact changes, calibrate each by the command, hold it to its promise."""
    from kvtide_lab.bench import derived

    with progress_bars() as show:
        result = derived.run(kind or (), texts, show)
    emit(result, derived.render, as_json)
