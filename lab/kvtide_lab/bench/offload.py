"""The two tables of the published offloading study: what swapping costs by model, and what it brings by answer length.

The first computes and moves made-up layers of the study's models; the second runs the small model in real vLLM.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch.nn import functional

from kvtide.block import BlockLayout, KVDtype
from kvtide.clock import SystemClock
from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.measuring import Show, Spread, spread_of
from kvtide_lab.swap import PageSwapper, made_up_pages

TOKENS = 8192
STEP_TOKENS = 1024
PAGE_TOKENS = 16
_STEPS = TOKENS // STEP_TOKENS
# The mean over all steps: attention's work grows by the token.
_PREFIX_TOKENS = (TOKENS - STEP_TOKENS) // 2
# Pages that a step's are taken from, so that they lie apart.
_ROOM = 4


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a model that decide what a layer costs. All have a gated MLP of three matrices."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype
    heads: int
    hidden: int
    mlp: int


# The study's models; weights of fewer bits keep a cache of the same kind.
_QWEN_7B = (28, 4, 128, KVDtype.BFLOAT16, 28, 3584, 18944)
_GLM_9B = (40, 4, 128, KVDtype.BFLOAT16, 32, 4096, 13696)
_LLAMA_8B = (32, 8, 128, KVDtype.BFLOAT16, 32, 4096, 14336)
MODELS = (
    ModelShape("Qwen2.5-32B-Instruct-GPTQ-Int4", 64, 8, 128, KVDtype.FLOAT16, 40, 5120, 27648),
    ModelShape("Qwen2.5-7B-Instruct-bf16", *_QWEN_7B),
    ModelShape("Qwen2.5-7B-Instruct-fp8", *_QWEN_7B),
    ModelShape("Qwen2.5-3B-Instruct-bf16", 36, 2, 128, KVDtype.BFLOAT16, 16, 2048, 11008),
    ModelShape("glm-4-9b-chat-1m-bf16", *_GLM_9B),
    ModelShape("glm-4-9b-chat-1m-fp8", *_GLM_9B),
    ModelShape("Llama-3.1-8B-bf16", *_LLAMA_8B),
    ModelShape("Llama-3.1-8B-fp8", *_LLAMA_8B),
)


class SwapRow(msgspec.Struct, frozen=True):
    """One model: seconds for 8,192 tokens, 1,024 a step, of pages that lie apart, each in a place of its own.

    hidden_out, hidden_in: the share of a swap's time that does not delay the prefill that runs beside it.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    prefill_s: Spread
    swap_in_s: Spread
    swap_out_s: Spread
    hidden_out: float
    hidden_in: float
    gb: float


class _Layer:
    """One decoder layer's matrices and a prefix's keys and values."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        self._shape = shape
        query, cache = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._into = self._matrix(query + 2 * cache, shape.hidden, device)
        self._out = self._matrix(shape.hidden, query, device)
        self._gates = self._matrix(2 * shape.mlp, shape.hidden, device)
        self._down = self._matrix(shape.hidden, shape.mlp, device)
        self._x = self._matrix(STEP_TOKENS, shape.hidden, device)
        prefix = self._matrix(2 * shape.kv_heads * _PREFIX_TOKENS, shape.head_dim, device)
        self._prefix = prefix.view(2, shape.kv_heads, _PREFIX_TOKENS, shape.head_dim)
        rows, columns = (
            torch.arange(STEP_TOKENS, device=device),
            torch.arange(_PREFIX_TOKENS + STEP_TOKENS, device=device),
        )
        self._mask = columns[None, :] <= rows[:, None] + _PREFIX_TOKENS
        self._is_cuda = device != "cpu"

    @staticmethod
    def _matrix(rows: int, columns: int, device: str) -> torch.Tensor:
        # Random numbers for a whole model's layer would take longer than the layer.
        values = torch.randn(4099, generator=torch.Generator().manual_seed(0)) / columns**0.5
        repeats = -(-rows * columns // len(values))
        return values.to(torch.bfloat16).repeat(repeats)[: rows * columns].view(rows, columns).to(device)

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not typed for us
    def step(self) -> None:
        """Compute a step's tokens behind the prefix."""
        shape, cache = self._shape, self._shape.kv_heads * self._shape.head_dim
        q, k, v = functional.linear(self._x, self._into).split([shape.heads * shape.head_dim, cache, cache], dim=1)
        heads = [each.view(STEP_TOKENS, -1, shape.head_dim).transpose(0, 1) for each in (q, k, v)]
        keys, values = (torch.cat(pair, dim=1)[None] for pair in zip(self._prefix, heads[1:], strict=True))
        seen = functional.scaled_dot_product_attention(
            heads[0][None], keys, values, attn_mask=self._mask, enable_gqa=True
        )
        y = self._x + functional.linear(seen[0].transpose(0, 1).reshape(STEP_TOKENS, -1), self._out)
        gate, up = functional.linear(y, self._gates).chunk(2, dim=1)
        self._y = y + functional.linear(functional.silu(gate) * up, self._down)
        if self._is_cuda:
            torch.cuda.synchronize()


def swap_row(shape: ModelShape, device: str, repeats: int) -> SwapRow:
    """Measure one model on a torch device."""
    layout = BlockLayout(shape.layers, PAGE_TOKENS, shape.kv_heads, shape.head_dim, shape.dtype)
    count, rng, clock = STEP_TOKENS // PAGE_TOKENS, random.Random(0), SystemClock()
    layer = _Layer(shape, device)

    def timed(act: Callable[[], None]) -> float:
        started_s = clock.monotonic_s()
        act()
        return clock.monotonic_s() - started_s

    with PageSwapper(made_up_pages(layout, _ROOM * count, device), count) as swapper:

        def swap(is_out: bool) -> None:
            pages, slots = rng.sample(range(_ROOM * count), count), rng.sample(range(count), count)
            (swapper.swap_out(pages, slots) if is_out else swapper.swap_in(slots, pages)).wait()

        ways = {is_out: partial(swap, is_out) for is_out in (True, False)}
        # The first round touches the memory.
        for act in (layer.step, *ways.values()):
            act()
        swapped = {
            is_out: [sum(timed(act) for _ in range(_STEPS)) for _ in range(repeats)] for is_out, act in ways.items()
        }
        computed, hidden = list[float](), dict[bool, list[float]]({True: [], False: []})
        for number in range(repeats):
            computed.append(timed(layer.step))
            for is_out, act in ways.items():
                swaps = max(1, int(computed[-1] * _STEPS / swapped[is_out][number]))
                late_s = _beside(layer, act, swaps, timed) - computed[-1]
                hidden[is_out].append(1 - late_s * _STEPS / (swaps * swapped[is_out][number]))
    sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype.value)
    prefill = spread_of([each * shape.layers * _STEPS for each in computed])
    gb = layout.raw_bytes * TOKENS / PAGE_TOKENS / 1e9
    out, into = spread_of(swapped[True]), spread_of(swapped[False])
    return SwapRow(shape.name, *sizes, prefill, into, out, median(hidden[True]), median(hidden[False]), gb)


def _beside(layer: _Layer, swap: Callable[[], None], swaps: int, timed: Callable[[Callable[[], None]], float]) -> float:
    """Return the seconds of a layer's step while a thread swaps, about as long as the step takes alone."""

    def swap_all() -> None:
        for _ in range(swaps):
            swap()

    thread = threading.Thread(target=swap_all)
    thread.start()
    seconds = timed(layer.step)
    thread.join()
    return seconds


# What each way passes to the engine, and whether it has its own prefix cache.
_WAYS: dict[str, tuple[Mapping[str, Any] | None, bool]] = {
    "naive": (None, False),
    "prefix_caching": (None, True),
    "offload_prefix": (kvtide_transfer("memory://"), True),
    "offload": (kvtide_transfer("memory://"), False),
}
STARTS_AT_ONCE = 2


class ThroughputRow(msgspec.Struct, frozen=True):
    """One answer length: requests a second; `_1` is the first time that the prompts come, `_2` the second.

    `overhead_s`: what loading a prompt takes longer than finding it in the engine's own cache.
    """

    answer_tokens: int
    naive: Spread
    prefix_caching_1: Spread
    prefix_caching_2: Spread
    offload_prefix_1: Spread
    offload_prefix_2: Spread
    offload_1: Spread
    offload_2: Spread
    overhead_s: Spread


class OffloadBenchResult(msgspec.Struct, frozen=True):
    """Both tables; the first is empty if no model was given, the second if no engine was."""

    device: str
    model: str
    prompts: int
    prompt_tokens: int
    swaps: list[SwapRow]
    throughput: list[ThroughputRow]


class OffloadSize(msgspec.Struct, frozen=True):
    """Repeats of the first table; of the second the distinct prompts for each answer length."""

    swap_repeats: int = 3
    prompts: int = 5
    prompt_tokens: int = 640
    answers: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)


FULL = OffloadSize()
QUICK = OffloadSize(swap_repeats=1, prompts=1, prompt_tokens=260, answers=(2, 8))


def run(
    device: str,
    models: Sequence[ModelShape],
    show: Show,
    engine: Callable[..., EngineProcess] | None = None,
    tokens: Sequence[int] = (),
    size: OffloadSize = FULL,
    model_name: str = "",
) -> OffloadBenchResult:
    """Measure swaps on a torch device, and throughput if `engine` starts one (transfer=, options=)."""
    swaps = []
    for number, shape in enumerate(models):
        show("swaps", number, len(models))
        swaps.append(swap_row(shape, device, size.swap_repeats))
    throughput = _throughput(engine, tokens, size, show) if engine else []
    return OffloadBenchResult(device, model_name, size.prompts, size.prompt_tokens, swaps, throughput)


def _throughput(
    engine: Callable[..., EngineProcess], tokens: Sequence[int], size: OffloadSize, show: Show
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
            seconds = {name: _seconds(process, tokens, size, step, name) for name, process in engines.items()}
            rows.append(_throughput_row(answer_tokens, seconds))
    return rows


def _close_all(engines: Iterable[EngineProcess]) -> None:
    """End engines at the same time: each takes seconds to end."""
    with ThreadPoolExecutor() as enders:
        list(enders.map(EngineProcess.close, engines))


def _seconds(
    process: EngineProcess, tokens: Sequence[int], size: OffloadSize, step: int, way: str
) -> list[list[float]]:
    """Return the seconds of each prompt, the first time and the second."""
    first = step * size.prompts * size.prompt_tokens
    starts = [first + number * size.prompt_tokens for number in range(size.prompts)]
    found = []
    for _ in range(1 if way == "naive" else 2):
        found.append([process.ask_timed(tokens[s : s + size.prompt_tokens], size.answers[step]) for s in starts])
        if _WAYS[way][0] is not None:
            process.do("settle")
    return found


def _throughput_row(answer_tokens: int, seconds: dict[str, list[list[float]]]) -> ThroughputRow:
    rates = {way: [spread_of([1 / each for each in times]) for times in found] for way, found in seconds.items()}
    pairs = zip(seconds["offload"][1], seconds["offload_prefix"][1], strict=True)
    overhead_s = spread_of([loaded - own for loaded, own in pairs])
    (naive,), own, both, alone = (rates[way] for way in _WAYS)
    return ThroughputRow(answer_tokens, naive, own[0], own[1], both[0], both[1], alone[0], alone[1], overhead_s)
