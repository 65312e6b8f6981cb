"""`kvtide-lab bench turns`: chats on what a cache kept, with the real model and real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_turns(
    text: Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be repeated.")] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw KL over turns.")] = Path("turns.png"),
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep what was found of each text in this file, and go on from it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One text, short turns, two codecs; under 50 s.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ten turns of a chat, each computed on what the cache kept of those before: does a codec's loss add up?"""
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import turns, turns_show

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    folder = smollm2.converted_folder()
    tokenizer, model = smollm2.load_tokenizer(folder), smollm2.load_model(folder)
    known = installed_profiles()
    size = turns.QUICK if quick else turns.FULL
    subject = turns.subject_of(model, folder.name, lambda content: tokenizer(content).input_ids, chosen, size)
    results = turns.partial_of(subject, known, partial)
    with progress_bars() as show:
        result = turns.run(subject, known, results, show)
    turns_show.plot(result, plot)
    emit(result, turns_show.render, as_json)
