"""`kvtide-lab bench agents`: real agent sessions on real vLLM, beside what a user would pick instead."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from kvtide.cli.report import JsonOption, emit, progress_bars
from kvtide_lab.bench.agents_sessions import AgentSession
from kvtide_lab.cli.bench_engine import PythonOption

SessionsOption = Annotated[
    Path | None,
    typer.Option("--sessions", help="A folder with sessions of LMCache/lmcache-agent-trace; default: made up."),
]


def bench_agents(
    sessions: SessionsOption = None,
    python: PythonOption = None,
    lmcache_python: Annotated[
        Path | None, typer.Option("--lmcache-python", help="Interpreter with vLLM and LMCache; the full run needs it.")
    ] = None,
    engines: Annotated[str | None, typer.Option("--engines", help="Contenders, with commas between them.")] = None,
    at_once: Annotated[str | None, typer.Option("--at-once", help="Sessions at the same time; default 1,4,8.")] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Sessions.")] = None,
    turns: Annotated[int | None, typer.Option("--turns", min=2, help="Of each session at most.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=256, help="Tokens of a prompt at most.")] = None,
    no_reuse: Annotated[
        int | None, typer.Option("--no-reuse", min=1, help="Prompts that share nothing, asked beside a plain engine.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is measured.")] = 1,
    partial: Annotated[
        Path | None, typer.Option("--partial", help="Keep what was found in this file, and go on from it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Plain, native and kvtide, short; under 10 minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Agents in a closed loop with memory for a quarter of what they say, and a restart in the middle."""
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import agents, agents_show

    size = agents.QUICK if quick else agents.FULL
    size = replace(
        size,
        at_once=tuple(map(int, at_once.split(","))) if at_once else size.at_once,
        sessions=count or size.sessions,
        turns=turns or size.turns,
        context_tokens=context or size.context_tokens,
        no_reuse=no_reuse or size.no_reuse,
        rounds=rounds,
    )
    names = tuple(engines.split(",")) if engines else agents.QUICK_NAMES if quick else agents.FULL_NAMES
    if not {"plain", "kvtide"} <= set(names) <= set(agents.FULL_NAMES):
        raise ValueError(f"--engines are plain, kvtide and some of {', '.join(agents.FULL_NAMES)}, got {engines}")
    if "lmcache" in names and lmcache_python is None:
        raise ValueError("LMCache runs in an environment of its own: give --lmcache-python, or --engines without it")
    folder = smollm2.converted_folder()
    chosen = sessions_of(sessions, size.context_tokens, size.turns)[: size.sessions]
    results = agents.partial_of(folder.name, size, chosen, partial)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work, progress_bars() as show:
        setup = agents.AgentsSetup(python or Path(sys.executable), lmcache_python, names, Path(work), folder)
        result = agents.run(setup, chosen, size, results, show)
    emit(result, agents_show.render, as_json)


def sessions_of(folder: Path | None, context_tokens: int, turns_max: int) -> list[AgentSession]:
    """Return the sessions of a folder, or made-up ones, in the demo model's tokens. ValueError if there are none."""
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import agents_sessions

    tokenizer = smollm2.load_tokenizer(smollm2.converted_folder())

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text).input_ids
        return ids

    if folder is not None:
        return agents_sessions.read_sessions(folder, tokenize, context_tokens, turns_max)
    contents = [text.content for text in texts.evaluation_texts()]
    return agents_sessions.made_up_sessions(contents, tokenize, context_tokens, turns_max)
