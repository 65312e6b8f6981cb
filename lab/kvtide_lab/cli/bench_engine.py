"""`kvtide-lab bench engine | offload | prompts | completion | follow`: real engines in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace
from rich.console import Console

from kvtide.cli.report import JsonOption, emit
from kvtide_lab.bench import engine
from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_process import EngineProcess
from kvtide_lab.config import leave_a_core

PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with vLLM and kvtide; default: this one.")
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Where to draw the medians.")]
LINK_MBIT_S = 1000.0
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer rounds; engines take minutes to start.")]


def bench_engine(
    peers: Annotated[str, typer.Option("--peers", help="none, or some of native,lmcache.")] = "none",
    python: PythonOption = None,
    lmcache_python: Annotated[
        Path | None, typer.Option("--lmcache-python", help="Interpreter with vLLM and LMCache.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option("--store", help="A further store for kvtide, codec=URL; may be repeated.")
    ] = None,
    link: Annotated[
        float | None, typer.Option("--link", help="Mbit/s of a link to a server; 0: none. Default 1000, quick 0.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Restarts of each engine; 0: as many as usual.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 for exact comparisons.")] = "float32",
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Real vLLM: plain, with kvtide and with peers; restart, chat, questions on documents, all misses."""
    size = engine.QUICK if quick else engine.FULL
    chosen = () if peers == "none" else tuple(peers.split(","))
    folder, tokens = _model_and_text()
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work:
        result = engine.run(
            folder,
            tokens,
            python or Path(sys.executable),
            lmcache_python,
            chosen,
            tuple(store or ()),
            (0.0 if quick else LINK_MBIT_S) if link is None else link,
            replace(size, rounds=rounds or size.rounds),
            Path(work),
            _show,
            dtype,
        )
    emit(result, engine.table, as_json)
    if plot is not None:
        engine.plot(result, plot)


def bench_offload(
    python: PythonOption = None,
    device: Annotated[str, typer.Option("--device", help="Where the pages are: cpu or cuda.")] = "cpu",
    table: Annotated[
        Literal["swaps", "answers"] | None,
        typer.Option("--table", help="Only this one: swaps by model (needs no vLLM), or answers by length."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Only this model of the first table; may be repeated.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Both tables of the offloading study: prefill and swaps by model, requests a second by answer length."""
    # What swaps beside the computing has a core of its own.
    leave_a_core()
    from kvtide_lab.bench import offload
    from kvtide_lab.bench.offload_swaps import MODELS

    size = offload.QUICK if quick else offload.FULL
    models = [shape for shape in MODELS if model is None or shape.name in model]
    if len(models) < len(model or ()):
        raise ValueError(f"--model is one of {', '.join(shape.name for shape in MODELS)}, got {model}")
    if table == "answers":
        if model is not None:
            raise ValueError("--model chooses rows of the table of swaps, which --table answers leaves out")
        models = []
    if table == "swaps":
        emit(offload.run(device, models, _show, size=size), offload.tables, as_json)
        return
    folder, tokens = _model_and_text()
    with _engines_of(python, folder) as start:
        result = offload.run(device, models, _show, start, tokens, size, folder.name)
    emit(result, offload.tables, as_json)


def bench_prompts(
    python: PythonOption = None,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The prefix report's random prompts on real vLLM: hit rate and items per second against p."""
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import prompts

    folder = smollm2.converted_folder()
    with _engines_of(python, folder) as start:
        result = prompts.run(start, folder.name, prompts.QUICK if quick else prompts.FULL, _show)
    emit(result, prompts.table, as_json)
    if plot is not None:
        prompts.plot(result, plot)


def bench_completion(
    python: PythonOption = None,
    link: Annotated[float, typer.Option("--link", min=1.0, help="Mbit/s of the link to the server.")] = LINK_MBIT_S,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Completion with a remote store on hits and on misses, by codec: the CacheGen notes' two graphs."""
    from kvtide_lab.bench import completion

    folder, tokens = _model_and_text()
    with _engines_of(python, folder) as start:
        result = completion.run(start, folder.name, tokens, link, completion.QUICK if quick else completion.FULL, _show)
    emit(result, completion.table, as_json)
    if plot is not None:
        completion.plot(result, plot)


def bench_follow(
    python: PythonOption = None,
    link: Annotated[float, typer.Option("--link", min=1.0, help="Mbit/s of the link between the engines.")] = 100.0,
    codec: Annotated[list[str] | None, typer.Option("--codec", help="Default: raw, lossless, tide; repeats.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Pairs of prompts; 0: as many as usual.")] = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prefill elsewhere: one real vLLM computes, another one follows over a link; also one that is cut meanwhile."""
    from kvtide_lab.bench import follow

    folder, tokens = _model_and_text()
    size = follow.QUICK if quick else follow.FULL
    size = replace(size, rounds=rounds or size.rounds)
    with _engines_of(python, folder) as start:
        result = follow.run(start, folder.name, tokens, link, codec or follow.WAYS, size, _show)
    emit(result, follow.table, as_json)


@contextmanager
def _engines_of(python: Path | None, folder: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Yield what starts an engine of the model (transfer=, options=)."""
    interpreter = python or Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work:
        log = Path(work) / "log"
        with EngineNursery(interpreter, log) as nursery:
            yield partial(EngineProcess, interpreter, folder, log, nursery=nursery)


def _model_and_text() -> tuple[Path, list[int]]:
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2

    folder = smollm2.converted_folder()
    tokenizer = smollm2.load_tokenizer(folder)
    return folder, [token for text in texts.evaluation_texts() for token in tokenizer(text.content[:40_000]).input_ids]


def _show(step: str, done: int, total: int) -> None:
    Console(stderr=True).print(f"{step} {done} of {total}")
