"""Streaming in real vLLM: first tokens by their deadlines over links, and what the model says on what came by then."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.bench.services import kvtide_words, started
from kvtide_lab.bench.shaped import ShapedProxy

CODEC = "tide:9e-4:3"
# The most likely tokens that answers are compared by, and how long answers are.
LOGPROBS, ANSWER_TOKENS = 20, 16
# Deadlines, as shares of computing.
SHARES = (0.35, 0.6)
# By so much of a deadline a first token may be late.
LATE = 1.1

Progress = Callable[[str, int, int], None]


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


def run(
    python: Path, model: Path, ids: Sequence[int], tokens: int, links_mbit: Sequence[float], progress: Progress
) -> VllmStreamBench:
    """Answer one prompt of `tokens` ids over every link, by every deadline, each in an engine of its own."""
    prompt, other = list(ids[:tokens]), list(ids[tokens : tokens + 300])
    total, rows = 2 + len(links_mbit) * len(SHARES), list[VllmStreamRow]()
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-") as folder,
        EngineNursery(python, Path(folder) / "log") as nursery,
        started(kvtide_words) as server,
        ShapedProxy(("127.0.0.1", server.port), lambda seconds: 1e9 * seconds) as proxy,
    ):

        def engine(transfer: Mapping[str, Any] | None) -> EngineProcess:
            options = {"max_num_batched_tokens": 4096, "disable_log_stats": False}
            return EngineProcess(python, model, nursery.log, transfer, options, nursery=nursery)

        progress("engines", 0, total)
        with engine(None) as plain:
            # The first answer with likelihoods compiles what ranks them, in about two seconds.
            plain.ask(other, 2, LOGPROBS)
            exact = plain.ask(prompt, ANSWER_TOKENS, LOGPROBS)
        progress("engines", 1, total)
        with engine(kvtide_transfer(f"http://127.0.0.1:{server.port}", codec=CODEC)) as storing:
            storing.ask(prompt, 2)
            storing.do("settle")
        for mbit in links_mbit:
            for share in SHARES:
                progress("engines", 2 + len(rows), total)
                within_s = share * exact["ttft_s"]
                transfer = kvtide_transfer(f"http://127.0.0.1:{proxy.port}", codec=CODEC, start_within_s=within_s)
                with engine(transfer) as streaming:
                    proxy.restart(lambda seconds: 1e9 * seconds)
                    streaming.ask(other, 2, LOGPROBS)
                    proxy.restart((mbit * 1e6 / 8).__mul__)
                    answer = streaming.ask(prompt, ANSWER_TOKENS, LOGPROBS)
                    streaming.do("settle")
                    metrics = streaming.do("check")["stats"]["metrics"]
                rows.append(_row(f"{mbit:g} Mbit/s", within_s, exact, answer, metrics))
    within = sum(row.is_within for row in rows) / len(rows)
    return VllmStreamBench(tokens, CODEC, exact["ttft_s"], within, rows)


def _row(
    link: str, within_s: float, exact: Mapping[str, Any], answer: Mapping[str, Any], metrics: Any
) -> VllmStreamRow:
    kl_law, read = metrics.get("vllm:kvtide_streamed_kl", 0.0), int(metrics.get("vllm:kvtide_loaded_bytes", 0))
    is_within = answer["ttft_s"] <= LATE * within_s
    kl_model, cached = answer_kl(exact, answer), answer["cached_tokens"]
    return VllmStreamRow(link, within_s, answer["ttft_s"], kl_model, kl_law, read, cached, is_within)


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


def render(result: VllmStreamBench) -> Table:
    """Return the rows as a table."""
    title = f"vLLM, {result.prompt_tokens} tokens, {result.codec}: computing {result.recompute_s:.2f} s"
    table = Table(title=title, caption=f"in time: {result.within:.0%}")
    for column in ("link", "deadline", "first token", "KL", "law", "MB", "restored", "in time"):
        table.add_column(column, justify="left" if column == "link" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.link,
            f"{row.start_within_s:.2f} s",
            f"{row.ttft_s:.2f} s",
            f"{row.kl_model:.2g}",
            f"{row.kl_law:.2g}",
            f"{row.bytes / 1e6:.2f}",
            str(row.cached_tokens),
            "yes" if row.is_within else "no",
        )
    return table
