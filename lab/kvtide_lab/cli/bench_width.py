"""`kvtide-lab bench codec-width`: the cost of a layer's width to tide."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars


def bench_codec_width(
    width: Annotated[list[str] | None, typer.Option("--width", help="Widths that begin so; default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """tide's profile, bits and decoding at widths from 1 x 64 to 16 x 256 and of MLA's latents, beside `tide-light`."""
    from kvtide_lab.bench import codec_width

    with progress_bars() as show:
        result = codec_width.run(show, width or ())
    emit(result, codec_width.render, as_json)
