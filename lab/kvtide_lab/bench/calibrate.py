"""Seconds and memory of `kvtide calibrate` for models whose caches have real sizes, in a process of its own.

Models are Llamas of random weights with all layers, heads and dims of a real one and a tiny hidden size: what is
measured is calibrating. A real model's own passes come on top: `tokens` over the tokens that it reads in a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engines.transformers import converted_folder, load_tokenizer

CODEC = "tide-layer"
HIDDEN, INTERMEDIATE = 288, 576
# The child may not have more memory than this: what fits is proven, not estimated.
MEMORY_BYTES_MAX = 4 << 30


class Shape(NamedTuple):
    """The cache of a real model: layers, query heads, heads of keys and values, dims of a head."""

    name: str
    layers: int
    query_heads: int
    heads: int
    dims: int


SHAPES = (
    Shape("135M", 30, 9, 3, 64),
    Shape("1B", 16, 32, 8, 64),
    Shape("8B", 32, 32, 8, 128),
)


class ShapeRow(msgspec.Struct, frozen=True):
    """One calibration. stages: seconds by the clock of moments, of shares of the loss (not of transforms in two
    stages) and of counts with the transform before each, of the curve.

    cpu_s is of all threads, peak_bytes the largest resident set, weight_bytes the model's own part of it.
    """

    name: str
    seconds: float
    cpu_s: float
    stages: dict[str, float]
    peak_bytes: int
    weight_bytes: int
    profile_bytes: int
    texts: int
    tokens: int


class ShapeResult(msgspec.Struct, frozen=True):
    """All shapes, with so many tokens of each text at most."""

    codec: str
    text_tokens: int
    rows: list[ShapeRow]


def run(names: Sequence[str], text_tokens: int, show: Callable[[str, int, int], None]) -> ShapeResult:
    """Calibrate each shape with these names, all without any. ValueError for an unknown one, or if a child fails."""
    foreign = sorted(set(names) - {shape.name for shape in SHAPES})
    if foreign:
        raise ValueError(f"unknown shapes {', '.join(foreign)}, expected some of {', '.join(s.name for s in SHAPES)}")
    rows = []
    chosen = [shape for shape in SHAPES if shape.name in names or not names]
    for number, shape in enumerate(chosen):
        show(shape.name, number, len(chosen))
        with TemporaryDirectory() as folder:
            rows.append(measure_shape(shape, Path(folder), ["--tokens", str(text_tokens)]))
    show("done", len(chosen), len(chosen))
    return ShapeResult(CODEC, text_tokens, rows)


def measure_shape(shape: Shape, folder: Path, words: Sequence[str]) -> ShapeRow:
    """Make a model of a shape in a folder and calibrate it by the command, with further words."""
    model, profile = folder / "model", folder / "profile"
    weight_bytes = _save_model(shape, model)
    command = [sys.executable, "-m", "kvtide.cli", "calibrate", str(model), "-o", str(profile), "--codec", CODEC]
    command += ["--memory-bytes", str(MEMORY_BYTES_MAX), *words, "--json"]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        stages = _Stages()
        reader = threading.Thread(target=stages.read, args=(child.stderr,))
        reader.start()
        assert child.stdout is not None
        said = child.stdout.read()
        reader.join()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise ValueError(f"calibrating {shape.name} failed: {stages.last_lines}")
    seconds = time.monotonic() - started_s
    found = msgspec.json.decode(said)
    return ShapeRow(
        name=shape.name,
        seconds=seconds,
        cpu_s=usage.ru_utime + usage.ru_stime,
        stages=stages.seconds,
        peak_bytes=usage.ru_maxrss << 10,
        weight_bytes=weight_bytes,
        profile_bytes=found["profile_bytes"],
        texts=found["texts"],
        tokens=found["tokens"],
    )


class _Stages:
    """Reads a calibration's progress, a line `NAME DONE/TOTAL` a text, and how long each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last_lines = ""

    def read(self, lines: Iterable[str]) -> None:
        before = time.monotonic()
        for line in lines:
            self.last_lines = (self.last_lines + line)[-500:]
            name, _, share = line.strip().partition(" ")
            done, _, total = share.partition("/")
            if not (done.isdigit() and total.isdigit()):
                continue
            now = time.monotonic()
            # A stage begins with its line 0; what was made since the last line of the one before is its work too.
            if name not in self.seconds:
                self.seconds[name] = 0.0
                if len(self.seconds) == 1:
                    before = now
            self.seconds[name] += now - before
            before = now


def _save_model(shape: Shape, folder: Path) -> int:
    torch.manual_seed(1)
    tokenizer = load_tokenizer(converted_folder())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.dims,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(each.numel() * each.element_size() for each in model.parameters())


def render(result: ShapeResult) -> str:
    """Return a line for each shape."""
    lines = [
        f"{result.codec}, texts of {result.text_tokens} tokens at most",
        f"{'shape':6} {'seconds':>8} {'CPU':>7}  {'stages':40} {'peak GiB':>9} {'weights':>8} {'profile MB':>11}",
    ]
    for row in result.rows:
        stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in row.stages.items())
        memory = f"{row.peak_bytes / 2**30:>9.2f} {row.weight_bytes / 2**30:>8.2f} {row.profile_bytes / 1e6:>11.1f}"
        lines.append(f"{row.name:6} {row.seconds:>8.0f} {row.cpu_s:>7.0f}  {stages:40} {memory}")
    return "\n".join(lines)
