"""Agents in a closed loop on real vLLM with memory for a quarter of what they say, restarted in the middle.

Each contender answers alone, on an empty store of its own; all contenders take a row before the next.
Invariant: what was found of a row, a contender and a round is kept, so that a run goes on.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.cli.size import cache_shape, read_config
from kvtide_lab.bench.engine_peers import (
    PEERS,
    Contender,
    StoreRoom,
    contenders,
    drop_page_cache,
    kept_within,
    settle,
    side_server,
)
from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess, kvtide_transfer
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.bench.services import mooncake_servers
from kvtide_lab.measuring import Show, in_turns

PROMPT_TOKENS_MIN = 256
TURNS_MIN = 2
# Made-up sessions: what the user says first, what each tool says.
_TASK_CHARACTERS, _TOOL_CHARACTERS = 3000, 700
_MADE_UP_TURNS = 8

Tokenize = Callable[[str], Sequence[int]]


class AgentTurn(NamedTuple):
    """One request: the prompt's ids, and how many tokens were answered when it was recorded."""

    ids: list[int]
    answer_tokens: int


class AgentSession(NamedTuple):
    """Requests in the order in which they were made. `kind` is the folder's name, that of the agent."""

    name: str
    kind: str
    turns: list[AgentTurn]


class _Request(msgspec.Struct, frozen=True):
    input: str
    output: str
    timestamp: int = 0


def read_sessions(folder: Path, tokenize: Tokenize, context_tokens: int, turns_max: int) -> list[AgentSession]:
    """Read all sessions below `folder`, one of each kind in turn. ValueError if there are none, and for other files.

    A file `*.jsonl` or `*.jsonl.gz` is one session: a line a request with `timestamp`, `input` and `output`, as
    LMCache/lmcache-agent-trace has them. Requests shorter than PROMPT_TOKENS_MIN or longer than the context are left
    out, sessions with fewer than TURNS_MIN others too; of each session the first `turns_max` are taken.
    """
    paths = sorted(path for path in folder.rglob("*.jsonl*") if path.is_file())
    by_kind: dict[str, list[AgentSession]] = {}
    for path in paths:
        turns = _turns(_requests(path), tokenize, context_tokens, turns_max)
        if len(turns) >= TURNS_MIN:
            by_kind.setdefault(path.parent.name, []).append(AgentSession(path.name, path.parent.name, turns))
    if not by_kind:
        raise ValueError(f"no session in {folder} has {TURNS_MIN} requests of up to {context_tokens} tokens")
    return [session for each in zip_longest(*by_kind.values()) for session in each if session is not None]


def made_up_sessions(
    texts: Iterable[str], tokenize: Tokenize, context_tokens: int, turns_max: int
) -> list[AgentSession]:
    """Make a session of each text: a task, and in each turn a little more of the text, as tools would say it."""
    found = []
    for number, text in enumerate(texts):
        ends = [_TASK_CHARACTERS + _TOOL_CHARACTERS * turn for turn in range(_MADE_UP_TURNS)]
        requests = [_Request(text[:end], text[end : end + 200]) for end in ends if end < len(text)]
        turns = _turns(requests, tokenize, context_tokens, turns_max)
        if len(turns) >= TURNS_MIN:
            found.append(AgentSession(f"made-up {number}", "made-up", turns))
    return found


def _requests(path: Path) -> list[_Request]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        requests = [msgspec.json.decode(line, type=_Request) for line in content.splitlines() if line]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a session, a request a line: {error}") from error
    return sorted(requests, key=lambda request: request.timestamp)


def _turns(requests: Iterable[_Request], tokenize: Tokenize, context_tokens: int, turns_max: int) -> list[AgentTurn]:
    turns: list[AgentTurn] = []
    for request in requests:
        if len(turns) == turns_max:
            break
        # More characters are more tokens than fit in any case.
        ids = list(tokenize(request.input)) if len(request.input) < 20 * context_tokens else []
        if PROMPT_TOKENS_MIN <= len(ids) <= context_tokens:
            turns.append(AgentTurn(ids, max(1, len(tokenize(request.output)))))
    return turns


def working_set_pages(sessions: Sequence[AgentSession], page_tokens: int) -> int:
    """Return how many pages hold every prompt at once; what prompts share is there once."""
    pages: dict[tuple[int, tuple[int, ...]], int] = {}
    for turn in (turn for session in sessions for turn in session.turns):
        parent = -1
        for start in range(0, len(turn.ids), page_tokens):
            parent = pages.setdefault((parent, tuple(turn.ids[start : start + page_tokens])), len(pages))
    return len(pages)


NO_REUSE = "no reuse"
BEFORE, AFTER = "before", "after"
# Of two that are this close one is not better: a row of a few answers says no more.
TIE = 0.97
# The seconds of a shorter answer over its tokens are its wait over next to nothing: among few answers they are the p90.
ANSWER_TOKENS_MIN = 8
# Without a store; with pages for everything and no restart; with a store outside of the engine.
PLAIN, BOUND, MOONCAKE = "plain", "bound", "mooncake"
TIDE = "kvtide tide"
# kvtide's options. Exact codecs store what a prompt has behind its last page too, unless they are told not to.
KVTIDES: dict[str, dict[str, Any]] = {
    "kvtide": {},
    "kvtide whole blocks": {"tail_tokens": 0},
    "kvtide lossless": {"codec": "lossless"},
    "kvtide lossless whole blocks": {"codec": "lossless", "tail_tokens": 0},
    TIDE: {"codec": "tide:5e-3"},
}
FULL_NAMES = (PLAIN, BOUND, *KVTIDES, *PEERS, MOONCAKE)


class AgentAnswer(msgspec.Struct, frozen=True):
    """One answer. `seconds` from the request to its last token."""

    ids: list[int]
    ttft_s: float
    seconds: float
    cached_tokens: int
    finish: str
    # Of the most likely tokens at each place.
    logprobs: list[dict[int, float]] = []


class AgentPhase(msgspec.Struct, frozen=True):
    """A contender's answers before or after the restart. CPU seconds are of the engine's process and its server's.

    plain_s: where nothing is shared, seconds of a plain engine that was asked the same right before.
    """

    answers: list[AgentAnswer]
    prompt_tokens: int
    cpu_s: float
    plain_s: list[float] = []
    stored_bytes: int = 0


class AgentsRow(msgspec.Struct, frozen=True):
    """One contender, so many sessions at once, before or after the restart; `no reuse`: nothing shared, one at a time.

    p90_interactivity: 1 / p90 of (seconds of an answer / its tokens), as InferenceX has it, in tokens a second, over
    answers of ANSWER_TOKENS_MIN tokens and more; all other figures are over all answers.
    answers_changed: answers that differ from plain vLLM's to the same prompt in a token; `kl` is of the answers' first
    tokens from plain vLLM's, in nats, the mean: as far as the LOGPROBS most likely ones tell.
    of_bound, hits_of_bound: speed and hits as shares of the bound's; of_best: speed over the fastest one's that is
    neither kvtide nor the bound.
    """

    engine: str
    row: str
    phase: str
    requests: int
    p90_interactivity: float
    ttft_p50_s: float
    ttft_p90_s: float
    prompt_tokens: int
    hit_tokens: int
    cpu_s_per_1k_tokens: float
    stored_bytes: int
    answers_changed: int
    kl: float
    failed: int
    of_best: float
    of_bound: float | None
    hits_of_bound: float | None


class AgentsBench(msgspec.Struct, frozen=True):
    """All rows and what they say of the goals. `failures`: contenders that did not run, and why.

    least_of_best: kvtide's least `of_best`.
    """

    model: str
    sessions: int
    working_set_tokens: int
    room_tokens: int
    is_first_or_tied: bool
    least_of_best: float
    no_reuse_vs_plain: float | None
    answers_changed_exact: int
    failed_requests: int
    failures: dict[str, str]
    rows: list[AgentsRow]


def result_of(
    found: dict[tuple[str, str], list[list[AgentPhase]]],
    failures: dict[str, str],
    model: str,
    sessions: int,
    tokens: tuple[int, int],
) -> AgentsBench:
    """Return what the phases of all rounds say, by row and contender. `tokens`: working set and room."""
    rows = [_row(row, name, number, found) for (row, name), rounds in found.items() for number in range(len(rounds[0]))]
    pairs = [
        theirs_s / mine.seconds
        for (phase,) in found.get((NO_REUSE, "kvtide"), ())
        for theirs_s, mine in zip(phase.plain_s, phase.answers, strict=True)
    ]
    least = min(row.of_best for row in rows if row.engine == "kvtide")
    return AgentsBench(
        model=model,
        sessions=sessions,
        working_set_tokens=tokens[0],
        room_tokens=tokens[1],
        is_first_or_tied=least >= TIE,
        least_of_best=least,
        no_reuse_vs_plain=median(pairs) if pairs else None,
        answers_changed_exact=sum(row.answers_changed for row in rows if row.engine in KVTIDES.keys() - {TIDE}),
        failed_requests=sum(row.failed for row in rows if row.engine in KVTIDES),
        failures=failures,
        rows=rows,
    )


def _row(row: str, name: str, number: int, found: dict[tuple[str, str], list[list[AgentPhase]]]) -> AgentsRow:
    beside = {
        other: [answer for phases in rounds for answer in phases[number].answers]
        for (place, other), rounds in found.items()
        if place == row
    }
    speeds = {other: _p90_interactivity(answers) for other, answers in beside.items()}
    hits = {other: sum(answer.cached_tokens for answer in answers) for other, answers in beside.items()}
    answers, pairs = beside[name], list(zip(beside[PLAIN], beside[name], strict=True))
    phases = [each[number] for each in found[row, name]]
    tokens = sum(each.prompt_tokens for each in phases) + sum(len(answer.ids) for answer in answers)
    ttfts = [answer.ttft_s for answer in answers]
    return AgentsRow(
        engine=name,
        row=row,
        phase=(BEFORE, AFTER)[number],
        requests=len(answers),
        p90_interactivity=speeds[name],
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p90_s=float(np.percentile(ttfts, 90)),
        prompt_tokens=sum(each.prompt_tokens for each in phases),
        hit_tokens=hits[name],
        cpu_s_per_1k_tokens=1000 * sum(each.cpu_s for each in phases) / tokens,
        stored_bytes=max(each.stored_bytes for each in phases),
        answers_changed=sum(mine.ids != theirs.ids for theirs, mine in pairs),
        kl=fmean(_kl(theirs, mine) for theirs, mine in pairs),
        failed=sum(answer.finish != "length" for answer in answers),
        of_best=speeds[name] / max(speed for other, speed in speeds.items() if other not in (BOUND, *KVTIDES)),
        of_bound=speeds[name] / speeds[BOUND] if BOUND in speeds else None,
        hits_of_bound=hits[name] / max(1, hits[BOUND]) if BOUND in hits else None,
    )


def _p90_interactivity(answers: Sequence[AgentAnswer]) -> float:
    spoken = [answer for answer in answers if len(answer.ids) >= ANSWER_TOKENS_MIN] or answers
    return 1 / float(np.percentile([answer.seconds / max(1, len(answer.ids)) for answer in spoken], 90))


def _kl(theirs: AgentAnswer, mine: AgentAnswer) -> float:
    """Return the least KL of two first tokens: tokens that only one of them names count as one."""
    p, q = (each.logprobs[0] if each.logprobs else dict[int, float]() for each in (theirs, mine))
    pairs = [(exp(p[token]), exp(q[token])) for token in p.keys() & q.keys()]
    rest = [max(1e-9, 1 - sum(pair[side] for pair in pairs)) for side in (0, 1)]
    return sum(a * log(a / b) for a, b in [*pairs, rest])


PAGE_TOKENS = 128
# vLLM's own maximum.
LOGPROBS = 20
_WARM_UP_TOKENS = 300
_MOONCAKE_SETTLE_S = 3.0
_NAMED_ERROR = re.compile(r"\b\w+(Error|Exception): .+")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class AgentsSize(msgspec.Struct, frozen=True):
    """The amount of work. at_once: sessions that talk at the same time, a row each.

    store_shares: memory and disk of every store as shares of what is said in raw form, a row each; none: no such bound.
    """

    at_once: tuple[int, ...] = (1, 4, 8)
    sessions: int = 12
    turns: int = 5
    context_tokens: int = 8160
    answer_tokens_max: int = 32
    no_reuse: int = 24
    rounds: int = 1
    store_shares: tuple[float, ...] = ()


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
    room: StoreRoom = StoreRoom()


QUICK_NAMES = (PLAIN, "kvtide", "native")


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
    rows = _rows(sessions, size, _page_bytes(setup.model) if size.store_shares else 0)
    failures: dict[str, str] = {}
    total, done = size.rounds * len(rows) * len(setup.names), 0
    with EngineNursery(setup.python, setup.work / "engines.log") as nursery:
        for number in range(size.rounds):
            for row in rows:
                for name in in_turns(setup.names, number + rows.index(row)):
                    show(f"{row.name}: {name}", done, total)
                    done += 1
                    case = f"{row.name}, {name}"
                    if name in failures or results.get(case, number) is not None:
                        continue
                    try:
                        results.put(case, number, _talk(setup, name, row, options, nursery))
                    except (RuntimeError, ValueError) as error:
                        if name in (PLAIN, BOUND, *KVTIDES):
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


def _page_bytes(model: Path) -> int:
    """Return the bytes of a page in raw form, as the engines of benches have it: in float32."""
    return 4 * PAGE_TOKENS * cache_shape(read_config(model), "float32").elements_a_token


def _rows(sessions: Sequence[AgentSession], size: AgentsSize, page_bytes: int = 0) -> list[_Row]:
    chains: list[list[dict[str, Any]]] = [
        [
            {"ids": turn.ids, "answer_tokens": min(turn.answer_tokens, size.answer_tokens_max), "logprobs": LOGPROBS}
            for turn in session.turns
        ]
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
    if size.store_shares:
        all_bytes = page_bytes * working_set_pages(sessions, PAGE_TOKENS)
        # A tier of the peers' that has no room for one request stores nothing at all.
        longest_bytes = page_bytes * (1 + max(len(turn.ids) for each in sessions for turn in each.turns) // PAGE_TOKENS)
        rows = [
            row._replace(name=f"{row.name}, {share:g} stored", room=StoreRoom(max(room, longest_bytes), room))
            for row in rows
            for share in size.store_shares
            for room in [int(share * all_bytes)]
        ]
    return [*rows, *([_Row(NO_REUSE, 1, {BEFORE: [unlike[: size.no_reuse]]})] if size.no_reuse else [])]


def _talk(
    setup: AgentsSetup, name: str, row: _Row, options: dict[str, Any], nursery: EngineNursery
) -> list[AgentPhase]:
    work = setup.work / "stores"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: list[AgentPhase] = []
    log = setup.work / f"{name}.log"
    if name == BOUND:
        requests = sum(len(chain) for chains in row.phases.values() for chain in chains)
        options = {**options, "num_gpu_blocks_override": 4 * options["num_gpu_blocks_override"] + 2 * requests}
        with EngineProcess(setup.python, setup.model, log, options=options, nursery=nursery) as engine:
            _warm(engine, row.phases[BEFORE])
            alone = Contender(name, setup.python, None), None
            return [_phase(engine, *alone, chains, row.at_once) for chains in row.phases.values()]
    with (
        contender_named(setup, name, row.room, work) as contender,
        kept_within(None if contender.is_kvtide else contender.folder, row.room.disk_bytes),
    ):
        is_elsewhere = bool(contender.prefix) or name == "lmcache"
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
                if row.name != NO_REUSE or name == PLAIN:
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
    answers = msgspec.convert(result["answers"], list[AgentAnswer], str_keys=True)
    prompt_tokens = sum(len(prompt["ids"]) for chain in chains for prompt in chain)
    files = contender.folder.rglob("*") if contender.folder is not None else ()
    stored_bytes = sum(512 * path.stat().st_blocks for path in files if path.is_file())
    return AgentPhase(answers, prompt_tokens, cpu_s + _cpu_s(server) - before_s, stored_bytes=stored_bytes)


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
def contender_named(setup: AgentsSetup, name: str, room: StoreRoom, work: Path) -> Iterator[Contender]:
    """Yield a contender with a store below `work` and the servers that it needs. ValueError for another name."""
    if name == MOONCAKE:
        store_mb = 2048 if room.disk_bytes is None else (room.memory_bytes + room.disk_bytes) >> 20
        with mooncake_servers(1, store_mb) as servers:
            yield _mooncake(setup.python, servers.master.port, work)
    elif name in KVTIDES:
        transfer = kvtide_transfer(str(work / "kvtide"), **room.options(), **KVTIDES[name])
        yield Contender(name, setup.python, transfer, work / "kvtide")
    elif name == PLAIN:
        yield Contender(name, setup.python, None)
    else:
        yield contenders(setup.python, setup.lmcache_python, (name,), work, room.memory_bytes)[-1]


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
