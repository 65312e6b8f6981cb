"""The two tables of the published offloading study: what swapping costs by model, and what it brings by answer length.

The first computes and moves made-up layers of the study's models; the second runs the small model in real vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.bench.offload_swaps import STEP_TOKENS, TOKENS, ModelShape, SwapRow, swap_row
from kvtide_lab.bench.spread import Spread, spread_of

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
        swaps.append(swap_row(shape, device, size.swap_repeats))
    throughput = _throughput(engine, tokens, size, show) if engine else []
    return OffloadBenchResult(device, model_name, size.prompts, size.prompt_tokens, swaps, throughput)


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


def tables(result: OffloadBenchResult) -> Group:
    """Return both tables as people read them."""
    columns = ("model", "layers", "KV heads", "head", "prefill s", "swap in s", "swap out s", "hidden in", "out")
    title = (
        f"{TOKENS} tokens, {STEP_TOKENS} a step, pages apart, on {result.device}; prefill: a layer's time times layers"
    )
    swaps = Table(*columns, title=title, caption="hidden: share of the swap that does not delay a prefill beside it")
    for row in result.swaps:
        times = (row.prefill_s.shown(1), row.swap_in_s.shown(3), row.swap_out_s.shown(3))
        hidden = (f"{row.hidden_in:.0%}", f"{row.hidden_out:.0%}")
        swaps.add_row(row.model, str(row.layers), str(row.kv_heads), str(row.head_dim), *times, *hidden)
    columns = ("answer", "naive", "prefix 1", "prefix 2", "offload+prefix 1", "2", "offload 1", "2", "overhead")
    title = f"{result.model}: requests/s, {result.prompts} prompts of {result.prompt_tokens} tokens"
    throughput = Table(*columns, title=title)
    for each in result.throughput:
        *rates, overhead_s = msgspec.structs.astuple(each)[1:]
        throughput.add_row(str(each.answer_tokens), *[rate.shown() for rate in rates], f"{overhead_s.shown()} s")
    return Group(*[shown for shown, rows in ((swaps, result.swaps), (throughput, result.throughput)) if rows])
