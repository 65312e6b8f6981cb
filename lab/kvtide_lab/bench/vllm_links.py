"""Real vLLM behind links: streamed loads by their deadlines, parts of a prefix, and what the model says on what came.

Invariant: what is compared are requests to engines of one kind; what an engine decided is what it did, never a sum.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from kvtide_lab.bench.engine_process import EngineNursery, EngineProcess, kvtide_transfer
from kvtide_lab.bench.importance import RATES
from kvtide_lab.bench.services import server_behind
from kvtide_lab.bench.shaped import ShapedProxy, as_fast_as_the_machine
from kvtide_lab.measuring import Show

CODEC = "tide:9e-4:3"
# The most likely tokens that answers are compared by, and how long answers are.
LOGPROBS, ANSWER_TOKENS = 20, 16
# Deadlines, as shares of computing.
SHARES = (0.35, 0.6)
# By so much of a deadline a first token may be late.
LATE = 1.1
# The end of the text is no part of the prompt and warms engines up; less than a block, nothing of it is stored.
WARM_TOKENS = 100
# No room for a block: each request reads what is stored.
MEMORY_BYTES = 64 << 10
TRIES = 3
# Of SmolLM2, for a prompt and its answer.
MODEL_TOKENS_MAX = 8192


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


class VllmImportanceRow(msgspec.Struct, frozen=True):
    """Prompts over one link, medians; each is asked three times: in part, whole, and as the engine then decides.

    front_share: bytes over the link of a part, of the whole's raw bytes. kl_model, top1: of the part's answers to all
    questions, against vLLM without a cache; top1 is the share of tokens that are the same up to where answers part.
    """

    place: str
    part_s: float
    whole_s: float
    part_over_whole: float
    decided: str
    ttft_s: float
    ratio: float
    front_share: float
    whole_share: float
    kl_model: float
    top1: float


class VllmImportanceBench(msgspec.Struct, frozen=True):
    """All rows, and computing for comparison."""

    dtype: str
    share: float
    prompt_tokens: int
    questions: int
    recompute_s: float
    rows: list[VllmImportanceRow]


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
def _world(python: Path, model: Path, options: Mapping[str, Any], dtype: str = "float32") -> Iterator[_World]:
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-") as folder,
        EngineNursery(python, Path(folder) / "log") as nursery,
        server_behind(as_fast_as_the_machine) as (server, link),
    ):

        def engine(store: str | None = None, **connector: Any) -> EngineProcess:
            transfer = kvtide_transfer(store, **connector) if store else None
            return EngineProcess(python, model, nursery.log, transfer, options, dtype, nursery=nursery)

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
                law = metrics.get("vllm:kvtide_streamed_kl", 0.0)
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


def run_importance(
    python: Path,
    model: Path,
    ids: Sequence[int],
    questions: Sequence[Sequence[int]],
    raw_token_bytes: int,
    share: float,
    dtype: str,
    show: Show,
) -> VllmImportanceBench:
    """Ask questions about a text over each link. raw_token_bytes: of a token's keys and values.

    The engines' own prefix cache and kvtide's memory are off.
    """
    text, warm = list(ids[:-WARM_TOKENS]), list(ids[-WARM_TOKENS:])
    room = {"max_model_len": MODEL_TOKENS_MAX, "max_num_batched_tokens": MODEL_TOKENS_MAX}
    steps, rows = 2 + len(RATES), list[VllmImportanceRow]()
    with _world(python, model, {**room, "enable_prefix_caching": False}, dtype) as world:
        show("computing", 0, steps)
        with world.engine() as plain:
            plain.ask(warm, 2, LOGPROBS)
            exact = [plain.ask([*text, *question], ANSWER_TOKENS, LOGPROBS) for question in questions]
        show("storing", 1, steps)
        with world.engine(world.url, importance=share) as storing:
            storing.ask([*text, *questions[0]], 2)
            storing.do("settle")
        for place, bytes_s in RATES.items():
            show(place, 2 + len(rows), steps)
            tried = list[_Tried]()
            for attempt in range(max(TRIES, len(questions))):
                asked = attempt % len(questions)
                with world.engine(world.link.url, importance=share, memory_bytes_max=MEMORY_BYTES) as loading:
                    world.warm(loading, warm, bytes_s.__mul__)
                    tried.append(_tried(loading, world.link, [*text, *questions[asked]], exact[asked]))
            rows.append(_importance_row(place, tried, raw_token_bytes * len(text)))
    recompute_s = median(each["ttft_s"] for each in exact)
    return VllmImportanceBench(dtype, share, len(text), len(questions), recompute_s, rows)


class _Tried(NamedTuple):
    """Seconds to the first token and bytes over the link: of a part, of the whole, and as the engine then decides."""

    seconds: tuple[float, ...]
    passed: tuple[int, ...]
    kl: float
    top1: float


def _tried(engine: EngineProcess, link: ShapedProxy, prompt: Sequence[int], exact: Mapping[str, Any]) -> _Tried:
    answers, passed = [], [link.passed_bytes]
    for _ in range(3):
        answers.append(engine.ask(prompt, ANSWER_TOKENS, LOGPROBS))
        passed.append(link.passed_bytes)
    part = answers[0]
    pairs = zip(exact["ids"], part["ids"], strict=True)
    same = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    # The token where answers part is one of those compared.
    top1 = 1.0 if same is None else same / (same + 1)
    sizes = (passed[1] - passed[0], passed[2] - passed[1], passed[3] - passed[2])
    return _Tried(tuple(each["ttft_s"] for each in answers), sizes, answer_kl(exact, part), top1)


def _importance_row(place: str, tried: Sequence[_Tried], raw_bytes: int) -> VllmImportanceRow:
    part_s, whole_s, ttft_s = (median(each.seconds[way] for each in tried) for way in range(3))
    # A part is less than half of the whole's bytes.
    parts = [each.passed[2] < (each.passed[0] + each.passed[1]) / 2 for each in tried]
    return VllmImportanceRow(
        place,
        part_s,
        whole_s,
        part_s / whole_s,
        "part" if 2 * sum(parts) > len(parts) else "whole",
        ttft_s,
        median(each.seconds[2] / each.seconds[1] for each in tried),
        median(each.passed[0] for each in tried) / raw_bytes,
        median(each.passed[1] for each in tried) / raw_bytes,
        fmean(each.kl for each in tried),
        fmean(each.top1 for each in tried),
    )
