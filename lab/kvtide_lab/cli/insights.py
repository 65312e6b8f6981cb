"""`kvtide-lab insights`: what makes a model's KV cache compressible, as the CacheGen paper looks at it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit


def insights(
    model: Annotated[str | None, typer.Argument(help="A model folder; default: SmolLM2-135M.")] = None,
    text: Annotated[Path | None, typer.Option("--text", help="A text of your own.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=128, help="Of the text, a multiple of 64.")] = 1024,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Differences between tokens by distance, loss by layers, entropy by grouping."""
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import converted_folder, load_model, load_tokenizer
    from kvtide_lab.bench import insights as bench

    folder = model or str(converted_folder())
    content = (texts.read_texts([text]) if text else texts.evaluation_texts())[0].content
    ids = load_tokenizer(folder)(content[: 10 * (tokens + bench.ANSWER_TOKENS)]).input_ids
    result = bench.run(load_model(folder), Path(folder).name, ids, tokens)
    if plot is not None:
        bench.plot(result, plot)
    emit(result, bench.render, as_json)
