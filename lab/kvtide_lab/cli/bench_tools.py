"""`kvtide-lab bench tools`: peers' own measuring tools against vLLM without and with kvtide."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.report import JsonOption, emit, progress_bars
from kvtide_lab.cli.bench_agents import SessionsOption, sessions_of
from kvtide_lab.cli.bench_engine import PythonOption

_CONTEXT_TOKENS = 2048


def bench_tools(
    sessions: SessionsOption = None,
    python: PythonOption = None,
    lmcache_python: Annotated[
        Path | None, typer.Option("--lmcache-python", help="Interpreter with LMCache; without: vLLM's tool alone.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Sessions in the timed trace.")] = 6,
    turns: Annotated[int, typer.Option("--turns", min=2, help="Of each session at most.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """LMCache's `bench engine`, all workloads, and vLLM's `bench serve` on a timed trace of agent sessions."""
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import peer_tools

    folder = smollm2.converted_folder()
    chosen = sessions_of(sessions, _CONTEXT_TOKENS, turns)[:count]
    contents = [text.content for text in texts.evaluation_texts()]
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work, progress_bars() as show:
        setup = peer_tools.ToolsSetup(python or Path(sys.executable), lmcache_python, folder, Path(work))
        result = peer_tools.run(setup, chosen, contents, show)
    emit(result, peer_tools.table, as_json)
