"""An engine in a process of its own that takes jobs as JSON lines: `python -m kvtide_lab.vllm.session`.

The first line says what to start (`Start`), each further one what to do (`SessionJob`); each is answered by one line.
Needs nothing of kvtide's besides the connector that the start names, so that every peer is driven alike.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

IDLE_S = 0.001


class Start(msgspec.Struct, frozen=True):
    """An engine to start. `transfer` are the fields of vLLM's KVTransferConfig, none for no connector."""

    model: str
    options: dict[str, Any]
    transfer: dict[str, Any] | None = None


class Prompt(msgspec.Struct, frozen=True):
    """One request: greedy, exactly `answer_tokens` tokens unless aborted after `abort_after` of them."""

    ids: list[int]
    answer_tokens: int
    abort_after: int | None = None
    # Of so many most likely tokens at each place of the answer; 0 for none.
    logprobs: int = 0


class SessionJob(msgspec.Struct, frozen=True):
    """A session's work: `generate` prompts at once, `reset` the engine's prefix cache, `reload` its weights.

    `settle` and `check` are for kvtide.
    `loop`: talk `chains`, `at_once` at a time; each prompt of a chain is asked when the one before it is answered.
    """

    verb: str
    prompts: list[Prompt] = []
    chains: list[list[Prompt]] = []
    at_once: int = 1
    # With `reset`: the connector's as well.
    is_deep: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a prompt. `finish`: `length`, `abort`, or what vLLM says of a failure. Times are since it came."""

    ids: list[int]
    ttft_s: float
    cached_tokens: int
    finish: str
    seconds: float = 0.0
    logprobs: list[dict[int, float]] = []


class Result(msgspec.Struct, frozen=True):
    """The outcome of a job. Answers of chains come chain by chain."""

    answers: list[Answer] = []
    seconds: float = 0.0
    # Of the thread that runs the engine and, with one OpenMP thread, its kernels: busy neighbours don't count.
    cpu_s: float = 0.0
    # Of all threads of the process, the connector's too.
    process_cpu_s: float = 0.0
    is_done: bool = True
    rss_bytes: int = 0
    stats: dict[str, Any] = {}


class _Running:
    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self.started_s = time.perf_counter()
        self.ttft_s = self.seconds = 0.0
        self.cached_tokens = 0
        self.finish = ""
        self.logprobs: list[dict[int, float]] = []

    def take(self, output: Any) -> bool:
        """Take an output; tell whether the request is to be aborted now."""
        fresh = list(output.outputs[0].token_ids)
        self.seconds = time.perf_counter() - self.started_s
        if fresh and not self.ids:
            self.ttft_s = self.seconds
        self.ids = fresh
        places = output.outputs[0].logprobs or []
        self.logprobs = [{token: each.logprob for token, each in place.items()} for place in places]
        self.cached_tokens = output.num_cached_tokens or 0
        if output.finished:
            self.finish = str(output.outputs[0].finish_reason)
        return not self.finish and self.prompt.abort_after is not None and len(fresh) >= self.prompt.abort_after


class _Session:
    def __init__(self, start: Start) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM

        _hide_llvmlite()
        transfer = {"kv_transfer_config": KVTransferConfig(**start.transfer)} if start.transfer else {}
        self._llm = LLM(model=start.model, **start.options, **transfer)
        self._engine = self._llm.llm_engine
        self._count = 0

    def do(self, job: SessionJob) -> Result:
        started_s, started_cpu_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
        answers: list[Answer] = []
        is_done, stats = True, dict[str, Any]()
        if job.verb == "generate":
            answers = self._talk([[prompt] for prompt in job.prompts], len(job.prompts))
        elif job.verb == "loop":
            answers = self._talk(job.chains, job.at_once)
        elif job.verb == "reset":
            is_done = bool(self._llm.reset_prefix_cache(reset_connector=job.is_deep))
        elif job.verb == "settle":
            is_done = self._halves()[1].worker.cache.flush(60.0)
        elif job.verb == "reload":
            # As after a training step: other weights may lie in place of these.
            self._llm.collective_rpc("reload_weights")
            is_done = bool(self._llm.reset_prefix_cache(reset_connector=True))
        elif job.verb == "check":
            stats = self._check()
        else:
            raise ValueError(f"unknown job {job.verb!r}")
        seconds, cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        process_cpu_s = time.process_time() - process_s
        return Result(answers, seconds, cpu_s, process_cpu_s, is_done, _rss_bytes(), stats)

    def _talk(self, chains: list[list[Prompt]], at_once: int) -> list[Answer]:
        said: list[list[_Running]] = [[] for _ in chains]
        waiting, talking = deque(range(len(chains))), dict[str, int]()
        while waiting or talking:
            while waiting and len(talking) < at_once:
                self._ask_next(chains, said, talking, waiting.popleft())
            outputs = self._engine.step()
            if not outputs:
                # As vLLM's own loop does where nothing is computed: those that load have the processor.
                time.sleep(IDLE_S)
            for output in outputs:
                chain = talking.get(output.request_id)
                if chain is None:
                    continue
                running = said[chain][-1]
                if running.take(output):
                    self._engine.abort_request([output.request_id])
                    running.finish = "abort"
                if running.finish:
                    del talking[output.request_id]
                    self._ask_next(chains, said, talking, chain)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        # Empty steps let the connector hear of requests that ended last.
        self._engine.step()
        return [
            Answer(each.ids, each.ttft_s, each.cached_tokens, each.finish, each.seconds, each.logprobs)
            for answers in said
            for each in answers
        ]

    def _ask_next(
        self, chains: list[list[Prompt]], said: list[list[_Running]], talking: dict[str, int], chain: int
    ) -> None:
        """Ask the chain's next prompt, if it has one."""
        from vllm.inputs import TokensPrompt

        from vllm import SamplingParams

        if len(said[chain]) == len(chains[chain]):
            return
        prompt = chains[chain][len(said[chain])]
        self._count += 1
        # Ids alone: small models of tests have no tokenizer.
        params = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.answer_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=prompt.logprobs or None,
        )
        said[chain].append(_Running(prompt))
        talking[str(self._count)] = chain
        self._engine.add_request(str(self._count), TokensPrompt(prompt_token_ids=prompt.ids), params)

    def _halves(self) -> tuple[Any, Any]:
        """Return the connector's two sides; both live in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        both = self._engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()
        # Beside others kvtide comes first.
        scheduler, worker = (getattr(each, "sub_connectors", [each])[0] for each in both)
        return scheduler, worker

    def _check(self) -> dict[str, Any]:
        scheduler, worker = self._halves()
        scheduler.scheduler.check()
        worker.worker.check()
        cache = worker.worker.cache
        cache.check()
        scheduler.scheduler.cache.check()
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        stats: dict[str, Any] = msgspec.to_builtins(cache.stats()._asdict())
        # One page is vLLM's own placeholder.
        pages = {"pages": pool.num_gpu_blocks - 1, "free_pages": pool.get_num_free_blocks()}
        pinned = {"pinned_blocks": cache.index.stats().pinned_blocks, "metrics": self._metrics()}
        return {**stats, **pinned, **pages}

    def _metrics(self) -> dict[str, float]:
        """Return vLLM's own count of preemptions, and those of the connector."""
        from prometheus_client import REGISTRY

        wanted = ("vllm:num_preemptions_total", "vllm:kvtide_")
        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return {
            each.name.removesuffix("_total"): each.value
            for each in samples
            if each.name.startswith(wanted) and each.name.endswith("_total")
        }

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _rss_bytes() -> int:
    """Return the memory that this process has now, not its peak."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _hide_llvmlite() -> None:
    """Let vLLM register kernels although numba is imported, as LMCache does.

    vLLM reads every object's `__dict__`; llvmlite's library takes that for the name of a C function (AttributeError).
    """
    if importlib.util.find_spec("llvmlite") is not None:
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}


def import_engine() -> None:
    """Do what most of an engine's start goes into; starts no threads, which a fork would lose."""
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    # vLLM imports itself in a child too, eight seconds, to look at each model's class with no trace of CUDA left here.
    registry._run_in_subprocess = lambda look: look()


def serve(jobs: BinaryIO, replies: BinaryIO) -> None:
    """Start the engine that the first line of `jobs` asks for and do the others until they end."""
    session = _Session(msgspec.json.decode(jobs.readline(), type=Start))
    _reply(replies, Result(stats={"pid": os.getpid()}))
    for line in jobs:
        _reply(replies, session.do(msgspec.json.decode(line, type=SessionJob)))
    session.close()


def _reply(replies: BinaryIO, result: Result) -> None:
    replies.write(msgspec.json.encode(result) + b"\n")
    replies.flush()


def main() -> None:
    """Serve jobs from standard input until it ends. What the engine prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
