"""Agents in a closed loop on real vLLM with memory for a quarter of what they say, restarted in the middle.

Each contender answers alone, on a store of its own that is empty at first; all contenders take a row before the next.
Invariant: what was found of a row, a contender and a round is kept, so that a run goes on.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtide_lab.bench.agents_rows import (
    AFTER,
    BEFORE,
    EXACT,
    NO_REUSE,
    AgentAnswer,
    AgentPhase,
    AgentsBench,
    result_of,
)
from kvtide_lab.bench.agents_sessions import AgentSession, working_set_pages
from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_peers import Contender, contenders, drop_page_cache, further, settle, side_server
from kvtide_lab.bench.engine_process import EngineProcess
from kvtide_lab.bench.quality_state import Partial, ids_digest
from kvtide_lab.bench.services import mooncake_servers

PAGE_TOKENS = 128
TIDE = "kvtide tide"
MOONCAKE = "mooncake"
_WARM_UP_TOKENS = 300
_MOONCAKE_SETTLE_S = 3.0
_NAMED_ERROR = re.compile(r"\b\w+(Error|Exception): .+")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Show = Callable[[str, int, int], None]


class AgentsSize(msgspec.Struct, frozen=True):
    """The amount of work. `at_once`: sessions that talk at the same time, a row each."""

    at_once: tuple[int, ...] = (1, 4, 8)
    sessions: int = 12
    turns: int = 5
    context_tokens: int = 8160
    answer_tokens_max: int = 32
    no_reuse: int = 24
    rounds: int = 1


FULL = AgentsSize()
QUICK = AgentsSize(at_once=(1, 8), sessions=8, turns=4, context_tokens=1536, answer_tokens_max=8, no_reuse=6)


class AgentsInputs(msgspec.Struct, frozen=True):
    """All that decides what is found of a row, but for the programs. Digests in hex."""

    model: str
    answer_tokens_max: int
    no_reuse: int
    sessions: list[str]


class AgentsSetup(NamedTuple):
    """Interpreters of engines, the contenders, a folder for stores and the model's."""

    python: Path
    lmcache_python: Path | None
    names: tuple[str, ...]
    work: Path
    model: Path


class _Row(NamedTuple):
    name: str
    at_once: int
    phases: dict[str, list[list[dict[str, Any]]]]


# Those of kvtide that are exact store what a prompt has behind its last page, in pieces of so many tokens.
TAIL_TOKENS = 16
_TAILED = ("kvtide", "kvtide lossless")
QUICK_NAMES = ("plain", "kvtide", "native")
FULL_NAMES = ("plain", "kvtide", "kvtide lossless", TIDE, "native", "lmcache", MOONCAKE)


def partial_of(
    model: str, size: AgentsSize, sessions: Sequence[AgentSession], path: Path | None
) -> Partial[AgentsInputs, AgentPhase]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    digests = [ids_digest([token for turn in session.turns for token in turn.ids]) for session in sessions]
    return Partial(AgentsInputs(model, size.answer_tokens_max, size.no_reuse, digests), AgentPhase, path)


def run(
    setup: AgentsSetup,
    sessions: Sequence[AgentSession],
    size: AgentsSize,
    results: Partial[AgentsInputs, AgentPhase],
    show: Show,
) -> AgentsBench:
    """Measure what is not in `results` yet.

    RuntimeError if plain vLLM or kvtide fails; a peer that does is left out.
    """
    pages = working_set_pages(sessions, PAGE_TOKENS)
    longest = max(len(turn.ids) for session in sessions for turn in session.turns) + size.answer_tokens_max
    # One page is the engine's own placeholder.
    room = max(pages // 4, -(-longest // PAGE_TOKENS) + 1) + 1
    options = {"num_gpu_blocks_override": room, "max_model_len": longest, "max_num_batched_tokens": 2048}
    rows = _rows(sessions, size)
    failures: dict[str, str] = {}
    total, done = size.rounds * len(rows) * len(setup.names), 0
    with EngineNursery(setup.python, setup.work / "engines.log") as nursery:
        for number in range(size.rounds):
            for row in rows:
                # Another one first each time.
                first = (number + rows.index(row)) % len(setup.names)
                for name in setup.names[first:] + setup.names[:first]:
                    show(f"{row.name}: {name}", done, total)
                    done += 1
                    case = f"{row.name}, {name}"
                    if name in failures or results.get(case, number) is not None:
                        continue
                    try:
                        results.put(case, number, _talk(setup, name, row, options, nursery))
                    except (RuntimeError, ValueError) as error:
                        if name in ("plain", *EXACT, TIDE):
                            raise
                        failures[name] = _reason(setup.work / f"{name}.log", error)
    show("done", total, total)
    found = {
        (row.name, name): [
            phases for number in range(size.rounds) if (phases := results.get(f"{row.name}, {name}", number))
        ]
        for row in rows
        for name in setup.names
        if name not in failures
    }
    tokens = (pages * PAGE_TOKENS, (room - 1) * PAGE_TOKENS)
    return result_of(found, failures, setup.model.name, len(sessions), tokens)


def _reason(log: Path, error: Exception) -> str:
    """Return the last error that the log names; what came after it may be others' ends."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    named = [found[0] for line in lines if (found := _NAMED_ERROR.search(line))]
    return named[-1] if named else str(error).splitlines()[-1]


def _rows(sessions: Sequence[AgentSession], size: AgentsSize) -> list[_Row]:
    chains: list[list[dict[str, Any]]] = [
        [{"ids": turn.ids, "answer_tokens": min(turn.answer_tokens, size.answer_tokens_max)} for turn in session.turns]
        for session in sessions
    ]
    halves = {
        BEFORE: [chain[: -(-len(chain) // 2)] for chain in chains],
        AFTER: [chain[-(-len(chain) // 2) :] for chain in chains],
    }
    # Each begins with another token, so that none shares a page with any.
    alone: list[dict[str, Any]] = [
        prompt for turn in range(size.turns) for chain in chains for prompt in chain[turn : turn + 1]
    ]
    unlike = [{**prompt, "ids": [1000 + number, *prompt["ids"][1:]]} for number, prompt in enumerate(alone)]
    rows = [_Row(f"{at_once} at once", at_once, halves) for at_once in size.at_once]
    return [*rows, _Row(NO_REUSE, 1, {BEFORE: [unlike[: size.no_reuse]]})]


def _talk(
    setup: AgentsSetup, name: str, row: _Row, options: dict[str, Any], nursery: EngineNursery
) -> list[AgentPhase]:
    work = setup.work / "stores"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: list[AgentPhase] = []
    with contender_named(setup, name, work) as contender:
        is_elsewhere = bool(contender.prefix) or name == "lmcache"
        log = setup.work / f"{name}.log"
        for chains in row.phases.values():
            if contender.folder is not None and found:
                # kvtide reads past the page cache; others' files would come from memory.
                drop_page_cache(contender.folder)
            with ExitStack() as stack:
                server = stack.enter_context(side_server(contender, log))
                engine = EngineProcess(
                    contender.python,
                    setup.model,
                    log,
                    contender.transfer,
                    options,
                    prefix=contender.prefix,
                    nursery=None if is_elsewhere else nursery,
                )
                stack.enter_context(engine)
                _warm(engine, chains)
                if row.name != NO_REUSE or name == "plain":
                    found.append(_phase(engine, contender, server, chains, row.at_once))
                    continue
                plain = stack.enter_context(
                    EngineProcess(setup.python, setup.model, log, options=options, nursery=nursery)
                )
                _warm(plain, chains)
                found.append(_phase_beside(engine, plain, contender, server, chains))
    shutil.rmtree(work, ignore_errors=True)
    return found


def _phase(
    engine: EngineProcess, contender: Contender, server: int | None, chains: list[list[dict[str, Any]]], at_once: int
) -> AgentPhase:
    before_s = _cpu_s(server)
    result = engine.loop(chains, at_once)
    cpu_s = result["process_cpu_s"]
    if contender.is_kvtide:
        cpu_s += engine.do("settle")["process_cpu_s"]
    elif contender.name == MOONCAKE:
        # Nothing says what it still sends.
        time.sleep(_MOONCAKE_SETTLE_S)
    else:
        settle(contender.folder)
    answers = msgspec.convert(result["answers"], list[AgentAnswer])
    prompt_tokens = sum(len(prompt["ids"]) for chain in chains for prompt in chain)
    return AgentPhase(answers, prompt_tokens, cpu_s + _cpu_s(server) - before_s)


def _phase_beside(
    engine: EngineProcess,
    plain: EngineProcess,
    contender: Contender,
    server: int | None,
    chains: list[list[dict[str, Any]]],
) -> AgentPhase:
    """Ask prompt by prompt, plain vLLM right before: the machine's pace changes from one engine's turn to the next."""
    phases, plain_s = list[AgentPhase](), list[float]()
    for chain in chains:
        plain_s += [answer["seconds"] for answer in plain.loop([chain], 1)["answers"]]
        phases.append(_phase(engine, contender, server, [chain], 1))
    answers = [answer for phase in phases for answer in phase.answers]
    tokens, cpu_s = sum(phase.prompt_tokens for phase in phases), sum(phase.cpu_s for phase in phases)
    return AgentPhase(answers, tokens, cpu_s, plain_s)


def _warm(engine: EngineProcess, chains: list[list[dict[str, Any]]]) -> None:
    """Ask what is in no store under a name that anybody asks for."""
    longest = max((prompt["ids"] for chain in chains for prompt in chain), key=len)
    engine.ask([7, *reversed(longest[:_WARM_UP_TOKENS])], 2)


@contextmanager
def contender_named(setup: AgentsSetup, name: str, work: Path) -> Iterator[Contender]:
    """Yield a contender with a store below `work` and the servers that it needs. ValueError for another name."""
    if name == MOONCAKE:
        with mooncake_servers(1, 2048) as servers:
            yield _mooncake(setup.python, servers.master.port, work)
        return
    peers = (name,) if name in ("native", "lmcache") else ()
    found = contenders(setup.python, setup.lmcache_python, peers, (), work)
    found.append(further(TIDE, setup.python, "tide", str(work / "tide"))._replace(folder=work / "tide"))
    chosen = [each for each in found if each.name == name]
    if not chosen:
        raise ValueError(f"unknown contender {name!r}, expected some of {', '.join(FULL_NAMES)}")
    yield _with_tail(chosen[0]) if name in _TAILED else chosen[0]


def _with_tail(contender: Contender) -> Contender:
    """Return kvtide as who serves agents sets it: a turn goes on where the one before ended, not where a page did."""
    assert contender.transfer is not None
    options = {**contender.transfer["kv_connector_extra_config"], "tail_tokens": TAIL_TOKENS}
    return contender._replace(transfer={**contender.transfer, "kv_connector_extra_config": options})


def _mooncake(python: Path, port: int, work: Path) -> Contender:
    """Return vLLM's own connector for Mooncake's store, by TCP to a store outside of the engine."""
    config = work / "mooncake.json"
    place = {"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp"}
    sizes = {"mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "512MB"}
    config.write_bytes(msgspec.json.encode({**place, **sizes}))
    prefix = ("env", f"MOONCAKE_CONFIG_PATH={config}", "VLLM_HOST_IP=127.0.0.1")
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    return Contender(MOONCAKE, python, transfer, prefix=prefix)


def _cpu_s(pid: int | None) -> float:
    """Return the processor time of a server and of those that it started, so far."""
    if pid is None:
        return 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / _CLOCK_TICKS + sum(_cpu_s(int(child)) for child in children)
