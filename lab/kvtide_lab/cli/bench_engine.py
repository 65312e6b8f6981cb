"""`kvtide-lab bench engine` and `kvtide-lab bench offload`: real engines in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console

from kvtide.cli.report import JsonOption, emit
from kvtide_lab.bench import engine
from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_process import EngineProcess

PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with vLLM and kvtide; default: this one.")
]
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
    plot: Annotated[Path | None, typer.Option("--plot", help="Where to draw the medians.")] = None,
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
    swaps_only: Annotated[bool, typer.Option("--swaps-only", help="Only the first table; needs no vLLM.")] = False,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Both tables of the offloading study: swap seconds by model, requests a second by answer length."""
    from kvtide_lab.bench import offload

    size = offload.QUICK if quick else offload.FULL
    if swaps_only:
        emit(offload.run(device, offload.MODELS, _show, size=size), offload.tables, as_json)
        return
    folder, tokens = _model_and_text()
    engines = python or Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work:
        log = Path(work) / "log"
        with EngineNursery(engines, log) as nursery:
            start = partial(EngineProcess, engines, folder, log, nursery=nursery)
            result = offload.run(device, offload.MODELS, _show, start, tokens, size, folder.name)
    emit(result, offload.tables, as_json)


def _model_and_text() -> tuple[Path, list[int]]:
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2

    folder = smollm2.converted_folder()
    tokenizer = smollm2.load_tokenizer(folder)
    return folder, [token for text in texts.evaluation_texts() for token in tokenizer(text.content[:40_000]).input_ids]


def _show(step: str, done: int, total: int) -> None:
    Console(stderr=True).print(f"{step} {done} of {total}")
