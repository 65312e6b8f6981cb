"""`kvtide-lab bench codec-quality | codec-speed | position | importance | stream`: what needs a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer

from kvtide.block import KVDtype
from kvtide.cli.profile import TextOption
from kvtide.cli.report import JsonOption, progress_bars
from kvtide_lab.cli.options import PartialOption, QuickOption, profiles_of, tell, texts_of
from kvtide_lab.config import leave_a_core
from kvtide_lab.sim.links import LINK_MODELS, Link, link_named, read_link
from kvtide_lab.subjects import subject, tokenizer

if TYPE_CHECKING:
    from kvtide_lab.bench.stream import LinkRoute

ModelOption = Annotated[
    str | None, typer.Option("--model", help="A model folder, or gemma-3-270m; default: SmolLM2-135M.")
]
VllmOption = Annotated[
    Path | None, typer.Option("--python", help="An interpreter with vLLM: measure in that, behind links.")
]
MBIT = 1e6 / 8
# The mean of a model of a link.
MODEL_MBIT = 17.0
# From 200 to 5 Mbit/s when some of a context has come.
STEP_S = 0.05
LINKS, LINKS_QUICK = ("200", "20", "5", "step", "lte"), ("20",)
VLLM_LINKS, VLLM_TOKENS = ("200", "20", "5"), 2068
# What a slow disk reads in a second.
DISK_BYTES_S = 200e6
LINK_HELP = (
    f"Mbit/s, `step` (200 to 5 Mbit/s), a model ({', '.join(LINK_MODELS)}) or the file of a trace; repeats. "
    f"Default: {', '.join(LINKS)}."
)


def codec_quality(
    text: TextOption = None,
    model: ModelOption = None,
    profile: Annotated[list[Path] | None, typer.Option("--profile", help="Profiles for that model.")] = None,
    codec: Annotated[
        list[str] | None, typer.Option("--codec", help="Judge this codec only, as tide-deep; may be repeated.")
    ] = None,
    beginnings: Annotated[
        bool, typer.Option("--beginnings", help="Judge tide at 5e-3 on many beginnings of texts.")
    ] = False,
    partial: PartialOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bits per element against what the model then says, for every codec.

    With `--partial FILE` a run that was stopped goes on, and runs of some codecs each add to one table.
    """
    from kvtide_lab.bench import beginnings as of_beginnings
    from kvtide_lab.bench import codec_quality as bench

    known, of = profiles_of(profile), subject(model)
    if beginnings:
        if codec:
            raise ValueError("--beginnings judges all forms of tide: leave out --codec")
        with progress_bars() as show:
            tell(of_beginnings.run(of, known, of_beginnings.texts(text, quick), partial, show), as_json)
        return
    size = bench.QUICK if quick else bench.FULL
    judged = bench.subject_of(of, texts_of(text), size)
    results = bench.partial_of(judged, known, partial)
    with progress_bars() as show:
        result = bench.run(judged, known, codec or [], results, show)
    tell(result, as_json)


def codec_speed(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Entropy coders on one pinned core, beside memcpy, and whole blocks of the real model through tide."""
    from kvtide_lab.bench import codec_speed as bench

    result, of = bench.run(quick), subject()
    rows = bench.tide_speeds(of.model, of.tokenize(texts_of(None)[0].content), of.layout(), profiles_of(None), quick)
    tell(bench.with_tide(result, rows), as_json)


def position(
    codec: Annotated[str, typer.Option("--codec", help="A codec of tide: tide-light, tide-layer or tide-deep.")] = (
        "tide-layer"
    ),
    text: TextOption = None,
    partial: PartialOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The model's KL on caches that are rough in places, beside what the profile's law of loss by position says."""
    from kvtide_lab.bench import position as bench

    of = subject()
    size = bench.QUICK if quick else bench.FULL
    layout = of.layout()
    fitting = [each for each in profiles_of(None) if each.kind == codec and each.fits(layout)]
    if not fitting or not codec.startswith("tide"):
        raise ValueError(f"no profile of kind {codec!r} fits this model")
    judged = bench.subject_of(of, size, fitting[0], texts_of(text))
    with progress_bars() as show:
        result = bench.run(judged, bench.partial_of(judged, partial), show)
    tell(result, as_json)


def importance(
    text: TextOption = None,
    kv: Annotated[
        Literal["float32", "float16", "bfloat16"],
        typer.Option("--kv", help="float16 is rounded from float32; in bfloat16 the model runs, too."),
    ] = "float32",
    context_tokens: Annotated[
        int | None, typer.Option("--context-tokens", min=512, help="Tokens of a prefix, a multiple of 256.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only selectors, engine or needles; may be repeated.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quality, bytes and TTFT of every selector at every ratio, and needles."""
    from kvtide_lab.bench import importance as bench

    if context_tokens is not None and context_tokens % 256:
        raise ValueError(f"--context-tokens must be a multiple of 256, got {context_tokens}")
    chosen, of = texts_of(text), subject(dtype="bfloat16" if kv == "bfloat16" else "float32")
    size = bench.QUICK if quick else bench.FULL
    size = size._replace(context_tokens=context_tokens or size.context_tokens)
    asked = (of.model, of.folder.name, of.tokenize, chosen, profiles_of(None), size, DISK_BYTES_S)
    with progress_bars() as show:
        result = bench.run(*asked, show, KVDtype(kv), tables=table or bench.TABLES)
    tell(result, as_json)


def stream(
    link: Annotated[list[str] | None, typer.Option("--link", help=LINK_HELP)] = None,
    codec: Annotated[str | None, typer.Option("--codec", help="A codec of tide with refinements.")] = None,
    text: TextOption = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=512, help="Of a context, a multiple of 512.")] = None,
    count: Annotated[int | None, typer.Option("--texts", min=1, help="Texts that each row is the mean of.")] = None,
    python: VllmOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time to the first token, bytes and the model's own KL, for every policy and link; with --python in vLLM."""
    if python is not None:
        _stream_in_vllm(python, [float(each) for each in link or VLLM_LINKS], tokens or VLLM_TOKENS, as_json)
        return
    # Server, link and fetching run on this machine too; where they would be, the engine's cores are its own.
    leave_a_core()
    from kvtide_lab.bench import stream

    size = stream.QUICK if quick else stream.FULL
    if tokens is not None and tokens % 512:
        raise ValueError(f"--tokens must be a multiple of 512, got {tokens}")
    size = size._replace(context_tokens=tokens or size.context_tokens, texts=count or size.texts)
    routes, of = [_route(name) for name in link or (LINKS_QUICK if quick else LINKS)], subject()
    ids = [of.tokenize(each.content[: 8 * size.tokens]) for each in texts_of(text)]
    doors = stream.all_doors(codec or stream.TIDE)
    with progress_bars() as show:
        result = stream.run(of.model, ids, profiles_of(None), routes, doors, size, show)
    tell(result, as_json)


def _stream_in_vllm(python: Path, links_mbit: list[float], tokens: int, as_json: bool) -> None:
    from kvtide.engines.transformers import converted_folder
    from kvtide_lab.bench import vllm_links

    folder = converted_folder()
    content = "\n".join(each.content for each in texts_of(None))
    ids = tokenizer(folder)(content[: 8 * (tokens + 300)])
    with progress_bars() as show:
        result = vllm_links.run_stream(python, folder, ids, tokens, links_mbit, show)
    tell(result, as_json)


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
