"""`kvtide-lab bench codec-bound`: tide's distance to an ideal quantiser of its transform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.calibrate import TextOption
from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_codec_bound(
    text: TextOption = None,
    profile: Annotated[list[Path] | None, typer.Option("--profile", help="Profiles of tide for SmolLM2-135M.")] = None,
    codec: Annotated[
        list[str] | None, typer.Option("--codec", help="Judge this codec only, as tide-deep; may be repeated.")
    ] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw bits, KL and the decoder's work.")] = Path(
        "codec-bound.png"
    ),
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One context of 256 tokens, three rates.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bits of tide beside those of an ideal quantiser of its transform, at equal KL of the model."""
    from kvtide.engines import installed_profiles, read_profile
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import BLOCK_TOKENS, converted_folder, load_model, load_tokenizer, model_layout
    from kvtide_lab.bench import codec_bound, codec_bound_show
    from kvtide_lab.bench.codec_quality import FULL, QUICK, subject_of

    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    known = [read_profile(path) for path in profile] if profile else installed_profiles()
    known = [each for each in known if each.kind.startswith("tide") and (not codec or each.kind in codec)]
    folder = converted_folder()
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    layout, size = model_layout(model, BLOCK_TOKENS), QUICK if quick else FULL._replace(greedy=1)
    subject = subject_of(model, folder.name, lambda content: tokenizer(content).input_ids, layout, chosen, size)
    with progress_bars() as show:
        result = codec_bound.run(subject, known, codec_bound.partial_of(subject, known, partial), show)
    codec_bound_show.plot(result, plot)
    emit(result, codec_bound_show.render, as_json)
