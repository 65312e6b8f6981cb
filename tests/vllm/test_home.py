"""kvtide's wheel in a vLLM server as a user runs it: found by name, seen in metrics, driven by requests."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
from tests.servers import disk_arguments, server_process
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS

from kvtide.engines.transformers import smollm2
from kvtide_lab.bench.agents import AgentSession, made_up_sessions
from kvtide_lab.bench.services import free_ports
from kvtide_lab.config import engine_environment
from wheel import install_wheel

pytestmark = pytest.mark.timeout(2700)

FULL_PAGES = (PROMPT_TOKENS - 1) // PAGE_TOKENS
START_S_MAX = 600.0
STORED, LOADED = "vllm:kvtide_stored_blocks_total", "vllm:kvtide_loaded_tokens_total"
BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
AGENTS, TURNS, SAID_TOKENS = 2, 3, 8


class Server:
    """A running `vllm serve`."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self._base}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def complete(self, ids: list[int], tokens: int = ANSWER_TOKENS, rank: int = 0, **fields: Any) -> Any:
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        sent = json.dumps({**body, "return_token_ids": True, **fields}).encode()
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(f"{self._base}/v1/completions", sent, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def answer(self, ids: list[int], tokens: int = ANSWER_TOKENS, rank: int = 0) -> list[int]:
        found: list[int] = self.complete(ids, tokens, rank)["choices"][0]["token_ids"]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's lines that have these labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
                total += float(found[2])
        return total

    def reaches(self, name: str, count: float, **labels: str) -> bool:
        """Have the engine make steps, with which counts travel, until a metric is as large."""
        until_s = time.monotonic() + 60.0
        while self.metric(name, **labels) < count and time.monotonic() < until_s:
            time.sleep(0.3)
            self.complete([5, 6, 7], 2)
        return self.metric(name, **labels) >= count


@contextmanager
def serving(python: Path, model: Path, store: str, log: Path, more: Sequence[str] = ()) -> Iterator[Server]:
    """Run vLLM's own server; kvtide is named by its short name alone. more: words of its command."""
    (port,) = free_ports(1)
    transfer = {"kv_connector": "KVTideConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"store": store, "codec": "lossless"}  # type: ignore[assignment]
    flags = {
        **{"--model": model, "--served-model-name": "m", "--dtype": "float32", "--max-model-len": 4096},
        **{"--max-num-seqs": 8, "--port": port, "--host": "127.0.0.1", "--kv-transfer-config": json.dumps(transfer)},
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *more]
    command += [str(word) for flag in flags.items() for word in flag]
    # What a user has is the wheel alone: no checkout, neither by a path nor by where it is started.
    environment = engine_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"})
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
    server = Server(port)
    try:
        _wait(server, process, log)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S_MAX
    while True:
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            tail = log.read_text(errors="replace")[-3000:]
            assert process.poll() is None and time.monotonic() < until_s, tail
            time.sleep(0.5)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with vLLM into which the wheel is installed, as a user does it."""
    _, found = install_wheel(tmp_path_factory.mktemp("wheel"))
    return found


LINE = re.compile(
    r"INFO .*kvtide, request (\S+): \d+ tokens asked, \d+ more in the engine's cache; "
    r"(?:none found|\d+ found in http://127\.0\.0\.1:\d+)"
    r"(?:; (\d+) loaded(?: \(\w+\))? in [\d.]+ s(?:, -?[\d.]+ s saved)?)?"
    r"(?:; \d+ computed: [^;]+)*; \d+ blocks to store$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def agents(model: Path) -> list[AgentSession]:
    """Agents whose prompts grow by what tools say, each with a task of its own on a beginning that all have."""
    tokenizer, names = smollm2.load_tokenizer(model), sorted(topics)
    # Their beginning is not that of the long prompt.
    tasks = ["\n".join(str(topics[name]) for name in names[1 + first :: AGENTS]) for first in range(AGENTS)]
    texts = [tasks[0][:1200] + task for task in tasks]
    return made_up_sessions(texts, lambda text: list(tokenizer(text).input_ids), 1600, TURNS)


@pytest.fixture(scope="module")
def expected(engine: Any, tokens: list[int], agents: list[AgentSession]) -> tuple[list[int], list[list[list[int]]]]:
    """What vLLM says by itself to the long prompt, and to each turn of the agents."""
    with engine() as process:
        turns = [[process.ask(turn.ids, SAID_TOKENS)["ids"] for turn in agent.turns] for agent in agents]
        return process.ask(tokens[:PROMPT_TOKENS], ANSWER_TOKENS)["ids"], turns


class Served(NamedTuple):
    """Answers by agent, the number of different pages stored, what the second engine loaded, logs; that engine."""

    agents: list[list[list[int]]]
    pages: int
    is_stored: bool
    loaded: float
    logs: list[Path]
    server: Server


@pytest.fixture(scope="module")
def served(
    python: Path, model: Path, tokens: list[int], agents: list[AgentSession], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Serve, kill the store's server under the engine, start it again, and serve by another engine."""
    folder, ids, answers = tmp_path_factory.mktemp("served"), tokens[:PROMPT_TOKENS], list[list[Any]]()
    place, logs = disk_arguments(folder / "store"), [folder / "first", folder / "second"]
    prompts = [ids, *(agent.turns[0].ids for agent in agents)]
    pages = {tuple(each[: PAGE_TOKENS * page]) for each in prompts for page in range(1, FULL_PAGES + 1)}

    def turn(server: Server) -> None:
        asked = [agent.turns[len(answers)].ids for agent in agents]
        answers.append(list(clients.map(lambda ids: server.answer(ids, SAID_TOKENS), asked)))

    with ThreadPoolExecutor(AGENTS) as clients:
        with server_process(*place) as store, serving(python, model, store.url, logs[0]) as server:
            server.answer(ids)
            turn(server)
            is_stored = server.reaches(STORED, len(pages))
            store.kill()
            turn(server)
        with server_process(*place, port=store.port) as store, serving(python, model, store.url, logs[1]) as server:
            turn(server)
            by_agent = [list(each) for each in zip(*answers, strict=True)]
            yield Served(by_agent, len(pages), is_stored, server.metric(LOADED), logs, server)


# Each of its nine processes imports vLLM.
@pytest.mark.nightly
def test_what_one_data_parallel_rank_stored_another_restores(
    python: Path, model: Path, expected: Any, tokens: list[int], tmp_path: Path
) -> None:
    ids, place, ranks = tokens[:PROMPT_TOKENS], disk_arguments(tmp_path / "store"), ["--data-parallel-size", "2"]
    with server_process(*place) as store, serving(python, model, store.url, tmp_path / "log", ranks) as server:
        assert server.answer(ids) == expected[0]
        assert server.reaches(STORED, FULL_PAGES, engine="0")
        assert server.answer(ids, rank=1) == expected[0]
        assert server.metric(LOADED, engine="1") == FULL_PAGES * PAGE_TOKENS


def test_agents_are_served_as_usual_over_restarts_of_the_engine_and_of_its_store(served: Served, expected: Any) -> None:
    assert served.agents == expected[1]
    assert served.is_stored and served.loaded == AGENTS * FULL_PAGES * PAGE_TOKENS
    # The first engine has ended, so that its log is whole.
    log = served.logs[0].read_text()
    lines = LINE.findall(log)
    assert len(lines) == log.count("kvtide, request") >= 1 + 2 * AGENTS
    assert not any(tokens for _, tokens in lines)
    restored = [int(tokens or 0) for _, tokens in LINE.findall(served.logs[1].read_text())]
    assert restored[:AGENTS] == [FULL_PAGES * PAGE_TOKENS] * AGENTS


@pytest.fixture
def server(served: Served) -> Server:
    return served.server


def test_second_process_restores_by_the_short_name_and_is_seen(
    served: Served, expected: Any, tokens: list[int]
) -> None:
    server = served.server
    names = ("loaded", "hit", "asked")
    before = [server.metric(f"vllm:kvtide_{name}_tokens_total") for name in names]
    assert server.answer(tokens[:PROMPT_TOKENS]) == expected[0]
    after = [server.metric(f"vllm:kvtide_{name}_tokens_total") for name in names]
    restored = FULL_PAGES * PAGE_TOKENS
    assert [new - old for new, old in zip(after, before, strict=True)] == [restored, restored, PROMPT_TOKENS]
    assert server.metric(BY_SOURCE, source="external_unspecified") == after[0]
    # What a cache counts travels with a later step.
    stored = server.metric(STORED)
    server.complete(tokens[6000:6400], 2)
    assert server.reaches(STORED, stored + 3)
    # Each came from the store's server, once at least: of tiers elsewhere no counts are asked for.
    assert server.reaches("vllm:kvtide_tier_misses_total", served.pages, tier="memory")
    assert server.reaches("vllm:kvtide_decided_tokens_total", 3 * PAGE_TOKENS, choice="recompute", why="absent")


def test_request_says_not_to_load_and_not_to_store(server: Server, tokens: list[int]) -> None:
    loaded = server.metric(LOADED)
    salted: dict[str, Any] = {
        "cache_salt": "tenant",
        "kv_transfer_params": {"kvtide_no_store": True, "quality": -1, "agent_hint": 3},
    }
    for _ in range(2):
        server.complete(tokens[:600], 2, **salted)
    server.complete(tokens[8000:8400], 2, kv_transfer_params={"kvtide_no_load": True})
    assert server.metric(LOADED) == loaded
    assert server.metric("vllm:kvtide_request_options_total", what="bad") == 4
    assert server.metric("vllm:kvtide_request_options_total", what="used") == 3


def test_agent_s_hint_reaches_the_tiers_and_bad_ones_fail_nothing(server: Server, tokens: list[int]) -> None:
    heard = server.metric("vllm:kvtide_hints_heard_total")
    bad = server.metric("vllm:kvtide_request_options_total", what="bad")
    good = {"session": "talk", "retain_s": 60, "priority": 1, "is_last": False}
    for hint in (good, {"retain_s": "soon"}, "nonsense"):
        answer = server.complete(tokens[9000:9200], 2, kv_transfer_params={"agent_hint": hint})
        assert answer["choices"][0]["finish_reason"] == "length"
    assert server.reaches("vllm:kvtide_hints_heard_total", heard + 1)
    assert server.metric("vllm:kvtide_request_options_total", what="hint") == 1
    assert server.metric("vllm:kvtide_request_options_total", what="bad") == bad + 1
