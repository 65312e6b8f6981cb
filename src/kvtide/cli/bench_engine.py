"""`kvtide bench engine`: real engines in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtide.bench import engine
from kvtide.cli.report import emit
from kvtide.cli.store import JsonOption

__all__ = ["bench_engine"]

PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with vLLM and kvtide; default: this one.")
]


def bench_engine(
    peers: Annotated[str, typer.Option("--peers", help="none, or some of native,lmcache.")] = "none",
    python: PythonOption = None,
    lmcache_python: Annotated[
        Path | None, typer.Option("--lmcache-python", help="Interpreter with vLLM and LMCache.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 for exact comparisons.")] = "float32",
    plot: Annotated[Path | None, typer.Option("--plot", help="Where to draw the medians.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds; engines take minutes to start.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Real vLLM: plain, with kvtide and with peers; restart, chat, questions on documents, all misses."""
    from kvtide.bench import texts
    from kvtide.engines import smollm2

    chosen = () if peers == "none" else tuple(peers.split(","))
    folder = smollm2.converted_folder()
    tokenizer = smollm2.load_tokenizer(folder)
    tokens = [token for text in texts.evaluation_texts() for token in tokenizer(text.content[:40_000]).input_ids]
    note = Console(stderr=True).print
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work:
        result = engine.run(
            folder,
            tokens,
            python or Path(sys.executable),
            lmcache_python,
            chosen,
            engine.QUICK if quick else engine.EngineBenchSize(),
            Path(work),
            lambda step, done, total: note(f"{step} {done} of {total}"),
            dtype,
        )
    if plot is not None:
        engine.plot(result, plot)
    emit(result, engine.table, as_json)
