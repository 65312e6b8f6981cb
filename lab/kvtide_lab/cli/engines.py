"""`kvtide-lab bench engine | llama | agents | offload | prompts | completion`: real vLLM in processes of its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial as partially
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec.structs import replace

from kvtide.cli.report import JsonOption, progress_bars
from kvtide_lab.cli.options import LmcacheOption, PartialOption, PythonOption, QuickOption, tell, texts_of
from kvtide_lab.config import leave_a_core
from kvtide_lab.subjects import gemma_file, tokenizer

if TYPE_CHECKING:
    from kvtide_lab.bench.agents import AgentSession
    from kvtide_lab.bench.engine_process import EngineProcess

LINK_MBIT_S = 1000.0


def engine(
    peers: Annotated[str, typer.Option("--peers", help="none, or some of native,lmcache.")] = "none",
    python: PythonOption = None,
    lmcache_python: LmcacheOption = None,
    link: Annotated[
        float | None, typer.Option("--link", help="Mbit/s of a link to a server; 0: none. Default 1000, quick 0.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Restarts of each engine; 0: as many as usual.")] = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Real vLLM: plain, with kvtide and with peers; restart, memory, all misses."""
    from kvtide_lab.bench import engine as bench

    size = bench.QUICK if quick else bench.FULL
    chosen = () if peers == "none" else tuple(peers.split(","))
    folder, tokens = _model_and_text()
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work, progress_bars() as show:
        result = bench.run(
            folder,
            tokens,
            python or Path(sys.executable),
            lmcache_python,
            chosen,
            (0.0 if quick else LINK_MBIT_S) if link is None else link,
            replace(size, rounds=rounds or size.rounds),
            Path(work),
            show,
        )
    tell(result, as_json)


def llama(
    model: Annotated[
        list[Path] | None, typer.Option("--model", help="GGUF files; default: SmolLM2-135M and Gemma 3 270M.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """llama.cpp beside its own ways to keep prompts: restart, chats, ten prompts that share, others that do not."""
    from kvtide_lab.bench import llama as bench

    models, sizes = model or [bench.packaged_model(), gemma_file()], bench.QUICK if quick else bench.FULL
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work, progress_bars() as show:
        tell(bench.run(models, Path(work), sizes, show), as_json)


def agents(
    sessions: Annotated[
        Path | None,
        typer.Option("--sessions", help="A folder with sessions of LMCache/lmcache-agent-trace; default: made up."),
    ] = None,
    python: PythonOption = None,
    lmcache_python: LmcacheOption = None,
    engines: Annotated[str | None, typer.Option("--engines", help="Contenders, with commas between them.")] = None,
    at_once: Annotated[str | None, typer.Option("--at-once", help="Sessions at the same time; default 1,4,8.")] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Sessions.")] = None,
    turns: Annotated[int | None, typer.Option("--turns", min=2, help="Of each session at most.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=256, help="Tokens of a prompt at most.")] = None,
    store_share: Annotated[
        str | None,
        typer.Option("--store-share", help="Memory and disk of each store, as shares of all that is said: .5,.25,.1."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is measured.")] = 1,
    partial: PartialOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Agents in a closed loop with memory for a quarter of what they say, and a restart in the middle."""
    from kvtide.engines.transformers import converted_folder
    from kvtide_lab.bench import agents as bench

    size = bench.QUICK if quick else bench.FULL
    shares = tuple(map(float, store_share.split(","))) if store_share is not None else ()
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"--store-share are shares, more than 0 and at most 1, as in .5,.25: got {store_share}")
    size = replace(
        size,
        at_once=tuple(map(int, at_once.split(","))) if at_once else size.at_once,
        sessions=count or size.sessions,
        turns=turns or size.turns,
        context_tokens=context or size.context_tokens,
        no_reuse=0 if shares else size.no_reuse,
        store_shares=shares,
        rounds=rounds,
    )
    names = tuple(engines.split(",")) if engines else bench.QUICK_NAMES if quick else bench.FULL_NAMES
    if not {"plain", "kvtide"} <= set(names) <= set(bench.FULL_NAMES):
        raise ValueError(f"--engines are plain, kvtide and some of {', '.join(bench.FULL_NAMES)}, got {engines}")
    if "lmcache" in names and lmcache_python is None:
        raise ValueError("LMCache runs in an environment of its own: give --lmcache-python, or --engines without it")
    folder = converted_folder()
    chosen = _sessions(sessions, tokenizer(folder), size.context_tokens, size.turns)[: size.sessions]
    results = bench.partial_of(folder.name, size, chosen, partial)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work, progress_bars() as show:
        setup = bench.AgentsSetup(python or Path(sys.executable), lmcache_python, names, Path(work), folder)
        result = bench.run(setup, chosen, size, results, show)
    tell(result, as_json)


def _sessions(
    folder: Path | None, tokenize: Callable[[str], list[int]], context_tokens: int, turns_max: int
) -> list[AgentSession]:
    """Return the sessions of a folder, or made-up ones. ValueError if there are none."""
    from kvtide_lab.bench.agents import made_up_sessions, read_sessions

    if folder is not None:
        return read_sessions(folder, tokenize, context_tokens, turns_max)
    contents = [text.content for text in texts_of(None)]
    return made_up_sessions(contents, tokenize, context_tokens, turns_max)


def offload(
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
    from kvtide_lab.bench import offload as bench

    size = bench.QUICK if quick else bench.FULL
    models = [shape for shape in bench.MODELS if model is None or shape.name in model]
    if len(models) < len(model or ()):
        raise ValueError(f"--model is one of {', '.join(shape.name for shape in bench.MODELS)}, got {model}")
    if table == "answers":
        if model is not None:
            raise ValueError("--model chooses rows of the table of swaps, which --table answers leaves out")
        models = []
    with progress_bars() as show:
        if table == "swaps":
            result = bench.run(device, models, show, size=size)
        else:
            folder, tokens = _model_and_text()
            with _engines_of(python, folder) as start:
                result = bench.run(device, models, show, start, tokens, size, folder.name)
    tell(result, as_json)


def prompts(python: PythonOption = None, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """The prefix report's random prompts on real vLLM: hit rate and items per second against p."""
    from kvtide.engines.transformers import converted_folder
    from kvtide_lab.bench import prompts as bench

    folder = converted_folder()
    with _engines_of(python, folder) as start, progress_bars() as show:
        result = bench.run(start, folder.name, bench.QUICK if quick else bench.FULL, show)
    tell(result, as_json)


def completion(
    python: PythonOption = None,
    link: Annotated[float, typer.Option("--link", min=1.0, help="Mbit/s of the link to the server.")] = LINK_MBIT_S,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Completion with a remote store on hits and on misses, by codec: the CacheGen notes' two graphs."""
    from kvtide_lab.bench import completion as bench

    folder, tokens = _model_and_text()
    with _engines_of(python, folder) as start, progress_bars() as show:
        result = bench.run(start, folder.name, tokens, link, bench.QUICK if quick else bench.FULL, show)
    tell(result, as_json)


@contextmanager
def _engines_of(python: Path | None, folder: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Yield what starts an engine of the model (transfer=, options=)."""
    from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess

    interpreter = python or Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as work:
        log = Path(work) / "log"
        with EngineNursery(interpreter, log) as nursery:
            yield partially(EngineProcess, interpreter, folder, log, nursery=nursery)


def _model_and_text() -> tuple[Path, list[int]]:
    from kvtide.engines.transformers import converted_folder

    folder = converted_folder()
    tokenize = tokenizer(folder)
    return folder, [token for text in texts_of(None) for token in tokenize(text.content[:40_000])]
