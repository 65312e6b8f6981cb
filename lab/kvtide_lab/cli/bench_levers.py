"""`kvtide-lab bench codec-levers`: what each lever would bring to tide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.calibrate import TextOption
from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_codec_levers(
    text: TextOption = None,
    codec: Annotated[str, typer.Option("--codec", help="The profile whose coefficients are coded.")] = "tide-deep",
    lever: Annotated[
        list[str] | None, typer.Option("--lever", help="Levers whose names begin so; may be repeated; default: all.")
    ] = None,
    contexts: Annotated[int, typer.Option("--contexts", min=1, help="Texts to judge on.")] = 12,
    pieces: Annotated[int, typer.Option("--snippets", min=1, help="Texts to fit on, pieces of files.")] = 48,
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One context of 256 tokens, levels alone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bits at equal KL by other ways to choose levels, code lengths and transforms, each beside tide's own."""
    from kvtide.codec.tide.model import TideModel
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import BLOCK_TOKENS, converted_folder, load_model, load_tokenizer, model_layout
    from kvtide_lab.bench import codec_levers, codec_levers_show
    from kvtide_lab.bench.codec_quality import FULL, QUICK, subject_of

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    folder = converted_folder()
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    layout, size = model_layout(model, BLOCK_TOKENS), QUICK if quick else FULL._replace(contexts=contexts, greedy=1)
    subject = subject_of(model, folder.name, lambda content: tokenizer(content).input_ids, layout, chosen, size)
    profile = next((each for each in installed_profiles() if each.kind == codec and each.fits(layout)), None)
    if profile is None:
        raise ValueError(f"no profile of kind {codec!r} fits this model")
    tokens = BLOCK_TOKENS if quick else codec_levers.FIT_TOKENS
    fit_on = [tokenizer(each.content).input_ids[:tokens] for each in texts.snippets(4 if quick else pieces)]
    names = ("rounded", "levels") if quick else tuple(lever or ())
    every = codec_levers.levers(TideModel(profile))
    levers = [each for each in every if each.name.startswith(names) or each.name == codec_levers.TODAY]
    with progress_bars() as show:
        result = codec_levers.run(
            subject,
            profile,
            [ids for ids in fit_on if len(ids) == tokens],
            levers if names else every,
            codec_levers.partial_of(subject, profile, partial),
            show,
        )
    emit(result, codec_levers_show.render, as_json)
