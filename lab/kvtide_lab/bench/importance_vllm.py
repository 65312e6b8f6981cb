"""A share of a prefix exactly, in real vLLM: first tokens, bytes, and what the model says on such pages.

Invariant: part, whole and what is decided are requests to one engine, whose own prefix cache and whose memory are off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from rich.table import Table

from kvtide_lab.bench.engine_nursery import EngineNursery
from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.bench.importance_engine import RATES
from kvtide_lab.bench.services import kvtide_words, started
from kvtide_lab.bench.shaped import ShapedProxy
from kvtide_lab.bench.stream_vllm import ANSWER_TOKENS, LOGPROBS, answer_kl

# The end of the text is no part of the prompt and warms engines up; less than a block, nothing of it is stored.
WARM_TOKENS = 100
# No room for a block: each request reads what is stored.
MEMORY_BYTES = 64 << 10
TRIES = 3
# Of SmolLM2, for a prompt and its answer.
MODEL_TOKENS_MAX = 8192

Progress = Callable[[str, int, int], None]


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


def run(
    python: Path,
    model: Path,
    ids: Sequence[int],
    questions: Sequence[Sequence[int]],
    raw_token_bytes: int,
    share: float,
    dtype: str,
    progress: Progress,
) -> VllmImportanceBench:
    """Ask questions about a text over each link. raw_token_bytes: of a token's keys and values."""
    text, warm = list(ids[:-WARM_TOKENS]), list(ids[-WARM_TOKENS:])
    options = {
        "max_model_len": MODEL_TOKENS_MAX,
        "max_num_batched_tokens": MODEL_TOKENS_MAX,
        "enable_prefix_caching": False,
    }
    steps, rows = 2 + len(RATES), list[VllmImportanceRow]()
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-") as folder,
        EngineNursery(python, Path(folder) / "log") as nursery,
        started(kvtide_words) as server,
        ShapedProxy(("127.0.0.1", server.port), lambda seconds: 1e9 * seconds) as proxy,
    ):

        def engine(transfer: Mapping[str, Any] | None) -> EngineProcess:
            return EngineProcess(python, model, nursery.log, transfer, options, dtype, nursery=nursery)

        progress("computing", 0, steps)
        with engine(None) as plain:
            plain.ask(warm, 2, LOGPROBS)
            exact = [plain.ask([*text, *question], ANSWER_TOKENS, LOGPROBS) for question in questions]
        progress("storing", 1, steps)
        with engine(kvtide_transfer(f"http://127.0.0.1:{server.port}", importance=share)) as storing:
            storing.ask([*text, *questions[0]], 2)
            storing.do("settle")
        for place, bytes_s in RATES.items():
            progress(place, 2 + len(rows), steps)
            transfer = kvtide_transfer(
                f"http://127.0.0.1:{proxy.port}", importance=share, memory_bytes_max=MEMORY_BYTES
            )
            tried = list[_Tried]()
            for attempt in range(max(TRIES, len(questions))):
                asked = attempt % len(questions)
                with engine(transfer) as loading:
                    proxy.restart(lambda seconds: 1e9 * seconds)
                    loading.ask(warm, 2, LOGPROBS)
                    proxy.restart(bytes_s.__mul__)
                    tried.append(_tried(loading, proxy, [*text, *questions[asked]], exact[asked]))
            rows.append(_row(place, tried, raw_token_bytes * len(text)))
    recompute_s = median(each["ttft_s"] for each in exact)
    return VllmImportanceBench(dtype, share, len(text), len(questions), recompute_s, rows)


class _Tried(msgspec.Struct, frozen=True):
    part_s: float
    whole_s: float
    ttft_s: float
    # Over the link, by each of the three.
    passed: tuple[int, int, int]
    kl: float
    top1: float


def _tried(engine: EngineProcess, proxy: ShapedProxy, prompt: Sequence[int], exact: Mapping[str, Any]) -> _Tried:

    def asked() -> tuple[dict[str, Any], int]:
        before = proxy.passed_bytes
        return engine.ask(prompt, ANSWER_TOKENS, LOGPROBS), proxy.passed_bytes - before

    (part, *_), (whole, *_), (decided, *_) = asks = asked(), asked(), asked()
    pairs = zip(exact["ids"], part["ids"], strict=True)
    same = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    # The token where answers part is one of those compared.
    top1 = 1.0 if same is None else same / (same + 1)
    passed = (asks[0][1], asks[1][1], asks[2][1])
    return _Tried(part["ttft_s"], whole["ttft_s"], decided["ttft_s"], passed, answer_kl(exact, part), top1)


def _row(place: str, tried: Sequence[_Tried], raw_bytes: int) -> VllmImportanceRow:
    part_s, whole_s = median(each.part_s for each in tried), median(each.whole_s for each in tried)
    # A part is less than half of the whole's bytes.
    parts = [each.passed[2] < (each.passed[0] + each.passed[1]) / 2 for each in tried]
    return VllmImportanceRow(
        place,
        part_s,
        whole_s,
        part_s / whole_s,
        "part" if 2 * sum(parts) > len(parts) else "whole",
        median(each.ttft_s for each in tried),
        median(each.ttft_s / each.whole_s for each in tried),
        median(each.passed[0] for each in tried) / raw_bytes,
        median(each.passed[1] for each in tried) / raw_bytes,
        mean(each.kl for each in tried),
        mean(each.top1 for each in tried),
    )


def render(result: VllmImportanceBench) -> Table:
    """Return the rows as a table."""
    title = f"vLLM, {result.prompt_tokens} tokens, {result.dtype}, {result.share:.0%} exactly"
    table = Table(title=title, caption=f"computing: {result.recompute_s:.2f} s to the first token")
    columns = ("link", "part", "whole", "part/whole", "decided", "then", "bytes", "of the whole", "KL", "top-1")
    for column in columns:
        table.add_column(column, justify="left" if column == "link" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.place,
            f"{row.part_s:.2f} s",
            f"{row.whole_s:.2f} s",
            f"{row.part_over_whole:.2f}",
            row.decided,
            f"{row.ttft_s:.2f} s",
            f"{row.front_share:.3f}",
            f"{row.whole_share:.3f}",
            f"{row.kl_model:.2g}",
            f"{row.top1:.3f}",
        )
    return table
