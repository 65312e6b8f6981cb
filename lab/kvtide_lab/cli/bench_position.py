"""`kvtide-lab bench position`: what roughness costs by where it lies, and the loss law that profiles carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_position(
    codec: Annotated[str, typer.Option("--codec", help="A codec of tide: tide-light, tide-layer or tide-deep.")] = (
        "tide-layer"
    ),
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text to fit on; may be repeated.")] = None,
    held_out: Annotated[list[Path] | None, typer.Option("--held-out", help="A text to test on; may be repeated.")] = (
        None
    ),
    renew: Annotated[
        Path | None, typer.Option("--renew", help="Write the profile with the law that was found to this file.")
    ] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw the heat map.")] = Path("position.png"),
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
    ] = None,
    spend: Annotated[
        int | None,
        typer.Option("--spend", min=512, help="Only spend bytes by the profile's law, after so many tokens."),
    ] = None,
    texts_max: Annotated[int, typer.Option("--texts", min=1, help="Texts of --spend.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One text each way, 512 tokens; under 50 s.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The model's KL on caches that are rough in places, and the law of loss by position that fits it."""
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import BLOCK_TOKENS, converted_folder, load_model, load_tokenizer, model_layout
    from kvtide_lab.bench import position, position_show

    model = load_model(converted_folder())
    tokenizer, layout = load_tokenizer(converted_folder()), model_layout(model, BLOCK_TOKENS)
    size = position.QUICK if quick else position.FULL
    if spend is not None:
        size = position.spending_only(spend, texts_max)
    fitting = [each for each in installed_profiles() if each.kind == codec and each.fits(layout)]
    if not fitting or not codec.startswith("tide"):
        raise ValueError(f"no profile of kind {codec!r} fits this model")
    fit_on = texts.read_texts(text) if text else position.one_of_each_kind_first(texts.evaluation_texts())
    held = texts.read_texts(held_out) if held_out else fit_on[1::2]
    subject = position.subject_of(
        model,
        converted_folder().name,
        lambda content: tokenizer(content).input_ids,
        layout,
        size,
        fitting[0],
        (fit_on if held_out else fit_on[::2], held),
    )
    with progress_bars() as show:
        result = position.run(subject, position.partial_of(subject, partial), show)
    if renew is not None:
        renew.write_bytes(position.with_law(fitting[0], result.law).to_bytes())
    position_show.plot(result, plot)
    emit(result, position_show.render, as_json)
