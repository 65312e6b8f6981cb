"""`kvtide-lab bench stream`: every policy of `attach` over shaped links, judged by the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from kvtide.cli.report import JsonOption, emit, progress_bars
from kvtide_lab.config import leave_a_core
from kvtide_lab.sim.links import LINK_MODELS, Link, link_named, read_link

if TYPE_CHECKING:
    from kvtide_lab.bench.stream import LinkRoute

MBIT = 1e6 / 8
# The mean of a model of a link.
MODEL_MBIT = 17.0
# From 200 to 5 Mbit/s when some of a context has come.
STEP_S = 0.05
LINKS, LINKS_QUICK = ("200", "20", "5", "step", "lte"), ("20",)
VLLM_LINKS, VLLM_TOKENS = ("200", "20", "5"), 2068
LINK_HELP = (
    f"Mbit/s, `step` (200 to 5 Mbit/s), a model ({', '.join(LINK_MODELS)}) or the file of a trace; repeats. "
    f"Default: {', '.join(LINKS)}."
)


def bench_stream(
    link: Annotated[list[str] | None, typer.Option("--link", help=LINK_HELP)] = None,
    codec: Annotated[str | None, typer.Option("--codec", help="A codec of tide with refinements.")] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text of your own; repeats.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=512, help="Of a context, a multiple of 512.")] = None,
    count: Annotated[int | None, typer.Option("--texts", min=1, help="Texts that each row is the mean of.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this PNG file.")] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="An interpreter with vLLM: stream into that, by deadlines.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short text, one link; under 60 s.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time to the first token, bytes and the model's own KL, for every policy over every link."""
    if python is not None:
        _bench_vllm(python, [float(each) for each in link or VLLM_LINKS], tokens or VLLM_TOKENS, as_json)
        return
    # Server, link and fetching run on this machine too; where they would be, the engine's cores are its own.
    leave_a_core()
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import converted_folder, load_model, load_tokenizer
    from kvtide_lab.bench import position, stream

    size = stream.QUICK if quick else stream.FULL
    if tokens is not None and tokens % 512:
        raise ValueError(f"--tokens must be a multiple of 512, got {tokens}")
    size = size._replace(context_tokens=tokens or size.context_tokens, texts=count or size.texts)
    routes = [_route(name) for name in link or (LINKS_QUICK if quick else LINKS)]
    tokenizer, model = load_tokenizer(converted_folder()), load_model(converted_folder())
    # Those that `bench position` holds out; no profile was calibrated on any.
    chosen = texts.read_texts(text) if text else position.one_of_each_kind_first(texts.evaluation_texts())[1::2]
    ids = [tokenizer(each.content[: 8 * size.tokens]).input_ids for each in chosen]
    doors = stream.all_doors(codec or stream.TIDE)
    with progress_bars() as show:
        result = stream.run(model, ids, installed_profiles(), routes, doors, size, show)
    if plot is not None:
        stream.plot(result, plot)
    emit(result, stream.render, as_json)


def _bench_vllm(python: Path, links_mbit: list[float], tokens: int, as_json: bool) -> None:
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import converted_folder, load_tokenizer
    from kvtide_lab.bench import stream_vllm

    folder = converted_folder()
    content = "\n".join(each.content for each in texts.evaluation_texts())
    ids = load_tokenizer(folder)(content[: 8 * (tokens + 300)]).input_ids
    with progress_bars() as show:
        result = stream_vllm.run(python, folder, ids, tokens, links_mbit, show)
    emit(result, stream_vllm.render, as_json)


def _route(name: str) -> LinkRoute:
    from kvtide_lab.bench.stream import LinkRoute

    if name == "step":
        times = [0.0, STEP_S, 600.0]
        carried = [0.0, 200 * STEP_S * MBIT, (200 * STEP_S + 5 * 600) * MBIT]
        return LinkRoute(Link("step 200 to 5 Mbit/s", times, carried))
    if Path(name).is_file():
        return LinkRoute(read_link(Path(name)), is_trace=True)
    if name in LINK_MODELS:
        return LinkRoute(link_named(name, np.random.default_rng(0), MODEL_MBIT * MBIT), is_trace=True)
    try:
        rate = float(name)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise ValueError(f"a link is Mbit/s, step, a file or one of {', '.join(LINK_MODELS)}, got {name!r}")
    return LinkRoute(Link(f"{rate:g} Mbit/s", [0.0, 600.0], [0.0, 600 * rate * MBIT]))
