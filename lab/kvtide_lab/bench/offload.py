"""The two tables of the published offloading study: what swapping costs by model, and what it brings by answer length.

The first moves made-up keys and values of the study's models; the second runs the small model in real vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from kvtide.block import BlockLayout, KVDtype
from kvtide.clock import SystemClock
from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.swap.pages import PageSwapper, made_up_pages

TOKENS = 8192
STEP_TOKENS = 1024
PAGE_TOKENS = 16


class _Shape(msgspec.Struct, frozen=True):
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype


# The study's models; weights of fewer bits keep a cache of the same kind.
MODELS = (
    _Shape("Qwen2.5-32B-Instruct-GPTQ-Int4", 64, 8, 128, KVDtype.FLOAT16),
    _Shape("Qwen2.5-7B-Instruct-bf16", 28, 4, 128, KVDtype.BFLOAT16),
    _Shape("Qwen2.5-7B-Instruct-fp8", 28, 4, 128, KVDtype.BFLOAT16),
    _Shape("Qwen2.5-3B-Instruct-bf16", 36, 2, 128, KVDtype.BFLOAT16),
    _Shape("glm-4-9b-chat-1m-bf16", 40, 4, 128, KVDtype.BFLOAT16),
    _Shape("glm-4-9b-chat-1m-fp8", 40, 4, 128, KVDtype.BFLOAT16),
    _Shape("Llama-3.1-8B-bf16", 32, 8, 128, KVDtype.BFLOAT16),
    _Shape("Llama-3.1-8B-fp8", 32, 8, 128, KVDtype.BFLOAT16),
)


# What each way passes to the engine, and whether it has its own prefix cache.
_WAYS: dict[str, tuple[Mapping[str, Any] | None, bool]] = {
    "naive": (None, False),
    "prefix_caching": (None, True),
    "offload_prefix": (kvtide_transfer("memory://"), True),
    "offload": (kvtide_transfer("memory://"), False),
}
STARTS_AT_ONCE = 2


class SwapRow(msgspec.Struct, frozen=True):
    """One model: seconds to move the cache of 8,192 tokens, 1,024 a step. Prefill is not run: it takes the model."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    swap_in_s: float
    swap_out_s: float
    gb: float


class ThroughputRow(msgspec.Struct, frozen=True):
    """One answer length: requests a second; `_1` is the first time that the prompts come, `_2` the second.

    `overhead_s`: what loading all prompts takes longer than finding them in the engine's own cache.
    """

    answer_tokens: int
    naive: float
    prefix_caching_1: float
    prefix_caching_2: float
    offload_prefix_1: float
    offload_prefix_2: float
    offload_1: float
    offload_2: float
    overhead_s: float


class OffloadBenchResult(msgspec.Struct, frozen=True):
    """Both tables; the second is empty if no engine was given."""

    device: str
    model: str
    prompts: int
    prompt_tokens: int
    swaps: list[SwapRow]
    throughput: list[ThroughputRow]


class OffloadSize(msgspec.Struct, frozen=True):
    """Repeats of the first table; of the second the distinct prompts for each answer length."""

    swap_repeats: int = 3
    prompts: int = 2
    prompt_tokens: int = 640
    answers: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)


FULL = OffloadSize()
QUICK = OffloadSize(swap_repeats=1, prompts=1, prompt_tokens=260, answers=(2, 8))


def run(
    device: str,
    models: Sequence[_Shape],
    show: Callable[[str, int, int], None],
    engine: Callable[..., EngineProcess] | None = None,
    tokens: Sequence[int] = (),
    size: OffloadSize = FULL,
    model_name: str = "",
) -> OffloadBenchResult:
    """Measure swaps on a torch device, and throughput if `engine` starts one (transfer=, options=)."""
    swaps = []
    for number, shape in enumerate(models):
        show("swaps", number, len(models))
        swaps.append(_swap(shape, device, size.swap_repeats))
    throughput = _throughput(engine, tokens, size, show) if engine else []
    return OffloadBenchResult(device, model_name, size.prompts, size.prompt_tokens, swaps, throughput)


def _swap(shape: _Shape, device: str, repeats: int) -> SwapRow:
    layout = BlockLayout(shape.layers, PAGE_TOKENS, shape.kv_heads, shape.head_dim, shape.dtype)
    pages = list(range(STEP_TOKENS // PAGE_TOKENS))
    clock, seconds = SystemClock(), {"in": [], "out": []}  # type: ignore[var-annotated]
    with PageSwapper(made_up_pages(layout, len(pages), device), len(pages)) as swapper:
        for _ in range(repeats + 1):
            for way, swap in (("out", swapper.swap_out), ("in", swapper.swap_in)):
                started_s = clock.monotonic_s()
                for _ in range(TOKENS // STEP_TOKENS):
                    swap(pages, pages).wait()
                seconds[way].append(clock.monotonic_s() - started_s)
        swapper.check()
    # The first round touches the memory.
    swap_in_s, swap_out_s = median(seconds["in"][1:]), median(seconds["out"][1:])
    gb = layout.raw_bytes * TOKENS / PAGE_TOKENS / 1e9
    sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype.value)
    return SwapRow(shape.name, *sizes, swap_in_s, swap_out_s, gb)


def _throughput(
    engine: Callable[..., EngineProcess],
    tokens: Sequence[int],
    size: OffloadSize,
    show: Callable[[str, int, int], None],
) -> list[ThroughputRow]:
    needed = len(size.answers) * size.prompts * size.prompt_tokens
    if len(tokens) < needed:
        raise ValueError(f"the text must have {needed} tokens, got {len(tokens)}")
    rows = []
    engines = {
        name: engine(transfer=transfer, options={"enable_prefix_caching": has_cache})
        for name, (transfer, has_cache) in _WAYS.items()
    }
    with ExitStack() as stack:
        stack.callback(_close_all, engines.values())
        show("engines", 0, len(engines))
        with ThreadPoolExecutor(STARTS_AT_ONCE) as starters:
            list(starters.map(EngineProcess.open, engines.values()))
        for process in engines.values():
            process.ask(tokens[-50:], 2)
        # All ways take turns at each length: the machine's pace changes from one to the next.
        for step, answer_tokens in enumerate(size.answers):
            show("answer lengths", step, len(size.answers))
            rates = {name: _rates(process, tokens, size, step, name) for name, process in engines.items()}
            rows.append(_throughput_row(answer_tokens, size, rates))
    return rows


def _close_all(engines: Iterable[EngineProcess]) -> None:
    """End engines at the same time: each takes seconds to end."""
    with ThreadPoolExecutor() as enders:
        list(enders.map(EngineProcess.close, engines))


def _rates(process: EngineProcess, tokens: Sequence[int], size: OffloadSize, step: int, way: str) -> list[float]:
    first = step * size.prompts * size.prompt_tokens
    starts = [first + number * size.prompt_tokens for number in range(size.prompts)]
    found = []
    for _ in range(1 if way == "naive" else 2):
        result = [process.ask_timed(tokens[s : s + size.prompt_tokens], size.answers[step]) for s in starts]
        found.append(size.prompts / sum(result))
        if _WAYS[way][0] is not None:
            process.do("settle")
    return found


def _throughput_row(answer_tokens: int, size: OffloadSize, rates: dict[str, list[float]]) -> ThroughputRow:
    own, loaded = rates["offload_prefix"][1], rates["offload"][1]
    return ThroughputRow(
        answer_tokens=answer_tokens,
        naive=rates["naive"][0],
        prefix_caching_1=rates["prefix_caching"][0],
        prefix_caching_2=rates["prefix_caching"][1],
        offload_prefix_1=rates["offload_prefix"][0],
        offload_prefix_2=own,
        offload_1=rates["offload"][0],
        offload_2=loaded,
        overhead_s=size.prompts / loaded - size.prompts / own,
    )


def tables(result: OffloadBenchResult) -> Group:
    """Return both tables as people read them."""
    columns = ("model", "layers", "KV heads", "head", "dtype", "swap in", "swap out", "GB/s in", "GB/s out")
    title = f"{TOKENS} tokens, {STEP_TOKENS} a step, made-up KV on {result.device}; prefill is not run"
    swaps = Table(*columns, title=title)
    for row in result.swaps:
        times = (f"{row.swap_in_s:.3f} s", f"{row.swap_out_s:.3f} s")
        speeds = (f"{row.gb / row.swap_in_s:.1f}", f"{row.gb / row.swap_out_s:.1f}")
        swaps.add_row(row.model, str(row.layers), str(row.kv_heads), str(row.head_dim), row.dtype, *times, *speeds)
    columns = ("answer", "naive", "prefix 1", "prefix 2", "offload+prefix 1", "2", "offload 1", "2", "overhead")
    title = f"{result.model}: requests/s, {result.prompts} prompts of {result.prompt_tokens} tokens"
    throughput = Table(*columns, title=title)
    for each in result.throughput:
        *rates, overhead_s = msgspec.structs.astuple(each)[1:]
        throughput.add_row(str(each.answer_tokens), *[f"{rate:.3f}" for rate in rates], f"{overhead_s:.2f} s")
    return Group(swaps, throughput) if result.throughput else Group(swaps)
