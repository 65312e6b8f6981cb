"""`kvtide-lab bench local-window`: tide of what the model does not predict from a window of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.calibrate import TextOption
from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_local_window(
    text: TextOption = None,
    fit: Annotated[list[Path] | None, typer.Option("--fit", help="A text to fit on; may be repeated.")] = None,
    fit_tokens: Annotated[int, typer.Option("--fit-tokens", min=256, help="Tokens of each text to fit on.")] = 1024,
    quick: Annotated[bool, typer.Option("--quick", help="One context of 256 tokens, two windows, two texts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bits of tide-deep on residuals: the cache less the model's own pass under a sliding window."""
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import BLOCK_TOKENS, converted_folder, load_model, load_tokenizer, model_layout
    from kvtide_lab.bench import local_window
    from kvtide_lab.bench.codec_quality import FULL, QUICK, subject_of

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    folder = converted_folder()
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    layout, size = model_layout(model, BLOCK_TOKENS), QUICK if quick else FULL._replace(greedy=1)
    subject = subject_of(model, folder.name, lambda content: tokenizer(content).input_ids, layout, chosen, size)
    fitting = (texts.read_texts(fit) if fit else texts.calibration_texts())[: 2 if quick else None]
    tokens = BLOCK_TOKENS if quick else fit_tokens
    fit_on = [tokenizer(each.content[: 8 * tokens]).input_ids[:tokens] for each in fitting]
    deep = next((each for each in installed_profiles() if each.kind == "tide-deep" and each.fits(layout)), None)
    if deep is None:
        raise ValueError("no profile of kind 'tide-deep' fits this model")
    windows = local_window.WINDOWS[:2] if quick else local_window.WINDOWS
    with progress_bars() as show:
        result = local_window.run(subject, deep, [ids for ids in fit_on if len(ids) == tokens], windows, show)
    emit(result, local_window.render, as_json)
