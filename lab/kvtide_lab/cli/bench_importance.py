"""`kvtide-lab bench importance`: load only what matters of a prefix, the real model and a disk of a stated speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.block import KVDtype
from kvtide.cli.report import JsonOption, emit, progress_bars

if TYPE_CHECKING:
    from kvtide.engines.calibrate.texts import Text


def bench_importance(
    text: Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be repeated.")] = None,
    disk_mb_s: Annotated[float, typer.Option("--disk-mb-s", help="What the disk reads in a second.")] = 200.0,
    kv: Annotated[
        str,
        typer.Option("--kv", help="float32, float16 (rounded from it), or bfloat16 (the model runs in it, too)."),
    ] = "float32",
    context_tokens: Annotated[
        int | None, typer.Option("--context-tokens", min=512, help="Tokens of a prefix, a multiple of 256.")
    ] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where to draw quality against bytes.")] = Path("importance.png"),
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only selectors, engine, guards or needles; may be repeated.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="An interpreter with vLLM: load parts into that, behind two links.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short text, two questions, one ratio.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Quality, bytes and TTFT of every selector at every ratio, the guards, and what each part brings."""
    from kvtide.engines import installed_profiles
    from kvtide.engines.calibrate import texts
    from kvtide.engines.transformers import smollm2
    from kvtide_lab.bench import importance, importance_show

    if not disk_mb_s > 0:
        raise ValueError(f"--disk-mb-s must be positive, got {disk_mb_s}")
    if kv not in {"float16", "float32", "bfloat16"}:
        raise ValueError(f"--kv must be float32, float16 or bfloat16, got {kv!r}")
    if context_tokens is not None and context_tokens % 256:
        raise ValueError(f"--context-tokens must be a multiple of 256, got {context_tokens}")
    chosen = texts.read_texts(text) if text else texts.evaluation_texts()
    if python is not None:
        if table:
            raise ValueError("--table chooses tables of the transformers engine, which --python leaves out")
        _bench_vllm(python, chosen, kv, context_tokens or (1024 if quick else 4096), as_json)
        return
    folder = smollm2.converted_folder()
    tokenizer = smollm2.load_tokenizer(folder)
    model = smollm2.load_model(folder, "bfloat16" if kv == "bfloat16" else "float32")
    size = importance.QUICK if quick else importance.FULL
    size = size._replace(context_tokens=context_tokens or size.context_tokens)
    with progress_bars() as show:
        result = importance.run(
            model,
            folder.name,
            lambda content: tokenizer(content).input_ids,
            chosen,
            installed_profiles(),
            size,
            disk_mb_s * 1e6,
            show,
            KVDtype(kv),
            tables=table or importance.TABLES,
        )
    if result.curve:
        importance_show.plot(result, plot)
    emit(result, importance_show.render, as_json)


def _bench_vllm(python: Path, chosen: Sequence[Text], kv: str, tokens: int, as_json: bool) -> None:
    from kvtide.engines.transformers import model_layout, smollm2
    from kvtide_lab.bench import importance, importance_set, importance_vllm

    folder = smollm2.converted_folder()
    tokenizer = smollm2.load_tokenizer(folder)

    def tokenize(content: str) -> list[int]:
        ids: list[int] = tokenizer(content).input_ids
        return ids

    [task] = importance_set.make_tasks(chosen, 1, tokens + importance_vllm.WARM_TOKENS, tokenize)
    _, questions = importance_set.tokenized(task, tokenize, importance.FULL.questions)
    layout = model_layout(smollm2.load_model(folder, kv), importance_vllm.WARM_TOKENS)
    token_bytes = layout.raw_bytes // layout.tokens
    with progress_bars() as show:
        asked = [question.ids for question in questions]
        result = importance_vllm.run(python, folder, task.ids, asked, token_bytes, importance.HEADLINE_RATIO, kv, show)
    emit(result, importance_vllm.render, as_json)
