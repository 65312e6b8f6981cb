"""Real vLLM behind links: streamed loads by their deadlines, and what the model says on what came.

Invariant: what is compared are requests to engines of one kind; what an engine decided is what it did, never a sum.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess, kvtide_transfer
from kvtide_lab.bench.services import server_behind
from kvtide_lab.bench.shaped import ShapedProxy, as_fast_as_the_machine
from kvtide_lab.judge.law import CURVE_OVER_MEAN
from kvtide_lab.measuring import Show

CODEC = "tide:9e-4:3"
# The most likely tokens that answers are compared by, and how long answers are.
LOGPROBS, ANSWER_TOKENS = 20, 16
# Deadlines, as shares of computing.
SHARES = (0.35, 0.6)
# By so much of a deadline a first token may be late.
LATE = 1.1


class VllmStreamRow(msgspec.Struct, frozen=True):
    """One first token. kl_model: of the answer's distributions, over each one's LOGPROBS tokens; kl_law: predicted."""

    link: str
    start_within_s: float
    ttft_s: float
    kl_model: float
    kl_law: float
    bytes: int
    cached_tokens: int
    is_within: bool


class VllmStreamBench(msgspec.Struct, frozen=True):
    """All rows. within: the share of first tokens in time."""

    prompt_tokens: int
    codec: str
    recompute_s: float
    within: float
    rows: list[VllmStreamRow]


class _World(NamedTuple):
    """Engines of one kind, for a store (None: without one) and options; the server without its link; the link."""

    engine: Callable[..., EngineProcess]
    url: str
    link: ShapedProxy

    def warm(self, engine: EngineProcess, ids: Sequence[int], carried: Callable[[float], float]) -> None:
        """Let an engine compile what ranks likelihoods, some two seconds, over a fast link; then slow the link."""
        self.link.restart(as_fast_as_the_machine)
        engine.ask(ids, 2, LOGPROBS)
        self.link.restart(carried)


@contextmanager
def _world(python: Path, model: Path, options: Mapping[str, Any]) -> Iterator[_World]:
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-") as folder,
        EngineNursery(python, Path(folder) / "log") as nursery,
        server_behind(as_fast_as_the_machine) as (server, link),
    ):

        def engine(store: str | None = None, **connector: Any) -> EngineProcess:
            transfer = kvtide_transfer(store, **connector) if store else None
            return EngineProcess(python, model, nursery.log, transfer, options, nursery=nursery)

        yield _World(engine, f"http://127.0.0.1:{server.port}", link)


def run_stream(
    python: Path, model: Path, ids: Sequence[int], tokens: int, links_mbit: Sequence[float], show: Show
) -> VllmStreamBench:
    """Answer one prompt of `tokens` ids over every link, by every deadline, each in an engine of its own."""
    prompt, other = list(ids[:tokens]), list(ids[tokens : tokens + 300])
    total, rows = 2 + len(links_mbit) * len(SHARES), list[VllmStreamRow]()
    with _world(python, model, {"max_num_batched_tokens": 4096, "disable_log_stats": False}) as world:
        show("engines", 0, total)
        with world.engine() as plain:
            plain.ask(other, 2, LOGPROBS)
            exact = plain.ask(prompt, ANSWER_TOKENS, LOGPROBS)
        show("engines", 1, total)
        with world.engine(world.url, codec=CODEC) as storing:
            storing.ask(prompt, 2)
            storing.do("settle")
        for mbit in links_mbit:
            for share in SHARES:
                show("engines", 2 + len(rows), total)
                within_s = share * exact["ttft_s"]
                with world.engine(world.link.url, codec=CODEC, start_within_s=within_s) as streaming:
                    world.warm(streaming, other, (mbit * 1e6 / 8).__mul__)
                    answer = streaming.ask(prompt, ANSWER_TOKENS, LOGPROBS)
                    streaming.do("settle")
                    metrics = streaming.do("check")["stats"]["metrics"]
                law = metrics.get("vllm:kvtide_streamed_kl", 0.0) / CURVE_OVER_MEAN
                read = int(metrics.get("vllm:kvtide_loaded_bytes", 0))
                figures = (answer["ttft_s"], answer_kl(exact, answer), law, read, answer["cached_tokens"])
                is_within = answer["ttft_s"] <= LATE * within_s
                rows.append(VllmStreamRow(f"{mbit:g} Mbit/s", within_s, *figures, is_within))
    within = sum(row.is_within for row in rows) / len(rows)
    return VllmStreamBench(tokens, CODEC, exact["ttft_s"], within, rows)


def answer_kl(exact: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """Return the mean KL divergence, in nats, of the distributions up to the first token that differs, that one too.

    Over the tokens that the exact model finds most likely; what the other does not name is as unlikely as its last.
    """
    losses = list[float]()
    for place, (mine, theirs) in enumerate(zip(exact["logprobs"], answer["logprobs"], strict=True)):
        least = min(theirs.values())
        losses.append(sum(math.exp(each) * (each - theirs.get(token, least)) for token, each in mine.items()))
        if exact["ids"][place] != answer["ids"][place]:
            break
    return max(0.0, sum(losses) / len(losses))
