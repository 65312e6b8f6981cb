"""Trace the main paths on toy sizes: how many functions, files and changes of file one of them takes.

Usage: paths.py [--json]. Real disk, real threads; the paths run once before they are traced, so that imports and what
is made once do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import CodecRegistry
from kvtide.engines.transformers import attach
from kvtide.store import Cache, PendingBlock, cache_for
from kvtide.store.load import Whole
from kvtide.types import BlockKey, Namespace, ObjectId

SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "kvtide")
LAYOUT = BlockLayout(2, 16, 2, 8, KVDtype.FLOAT32)
NAMESPACE = Namespace(b"n" * 32)


class Walk(NamedTuple):
    """One traced path. switches: calls that land in another file than the thread's last one.

    named: functions less comprehensions and lambdas, which newer Pythons do not call.
    """

    path: str
    functions: int
    named: int
    files: int
    switches: int
    threads: int


class Tracer:
    """Counts calls into the package, of all threads."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.threads: set[int] = set()
        self.switches = 0
        self.is_on = False
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; see `sys.setprofile`."""
        file = frame.f_code.co_filename
        if not self.is_on or event != "call" or not file.startswith(SOURCE):
            return
        thread = threading.get_ident()
        self.functions.add((file, frame.f_code.co_qualname))
        self.threads.add(thread)
        self.switches += self._last.get(thread) not in {None, file}
        self._last[thread] = file

    def walk(self, name: str, action: Callable[[], object]) -> Walk:
        """Run an action and count what it calls."""
        self.functions, self.threads, self.switches, self._last = set(), set(), 0, {}
        self.is_on = True
        try:
            action()
        finally:
            self.is_on = False
        named = [function for _, function in self.functions if not function.endswith(">")]
        files = {file for file, _ in self.functions}
        return Walk(name, len(self.functions), len(named), len(files), self.switches, len(self.threads))


def meta_of(number: int) -> BlockMeta:
    """Return the identity of a prompt's only block."""
    return BlockMeta(ObjectId(NAMESPACE, BlockKey(bytes([number]) * 32)), BlockKey(NAMESPACE), 0, LAYOUT, "toy")


def pending(number: int) -> PendingBlock:
    """Return a block to be stored."""
    bits: BlockBits = np.full(LAYOUT.shape, number, dtype=LAYOUT.bits_dtype)
    return PendingBlock(meta_of(number), lambda: lambda: bits)


@contextmanager
def toy_cache(folder: str, codec: str) -> Iterator[Cache]:
    """Open a cache on a disk."""
    with cache_for(f"disk://{folder}/{codec}", CodecRegistry().make(codec)) as cache:
        yield cache


def store_walk(tracer: Tracer, folder: str) -> Walk:
    """Store one block, losslessly."""
    with toy_cache(folder, "lossless") as cache:
        cache.store([pending(1)])
        cache.flush(10)

        def store() -> None:
            cache.store([pending(2)])
            cache.flush(10)

        return tracer.walk("store one block to disk, lossless", store)


def load_walk(tracer: Tracer, folder: str) -> Walk:
    """Find and load one raw block of another process, from disk."""
    with toy_cache(folder, "raw") as cache:
        cache.store([pending(number) for number in range(3)])
        cache.flush(10)
    with toy_cache(folder, "raw") as cache:

        def load(number: int) -> None:
            assert cache.match([meta_of(number).id]) == 1
            assert cache.load([meta_of(number)], Whole(lambda position, bits: None)).blocks == 1

        load(1)
        return tracer.walk("match and load one block from disk, raw", lambda: load(2))


def generate_walk(tracer: Tracer, folder: str) -> Walk:
    """Answer a prompt of which two blocks are stored."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.arange(40)[None] % 64
    with attach(model, f"disk://{folder}/chat", block_tokens=16, codec="raw") as cached:
        # Often, so that two loads have overlapped, which makes a second scratch.
        for _ in range(12):
            cached.generate(prompt, max_new_tokens=2, do_sample=False)
            cached.flush(10)
        walk = tracer.walk(
            "transformers generate, two blocks restored",
            lambda: cached.generate(prompt, max_new_tokens=2, do_sample=False),
        )
        assert cached.last is not None
        assert cached.last.hit_tokens == 32
        return walk


def main() -> int:
    """Print the walks; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args().json
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    with tempfile.TemporaryDirectory() as folder:
        walks = [walk(tracer, folder) for walk in (store_walk, load_walk, generate_walk)]
    sys.setprofile(None)
    if as_json:
        print(json.dumps({"rows": [walk._asdict() for walk in walks]}))
    else:
        for each in walks:
            counts = f"{each.functions} functions ({each.named} named), {each.files} files, {each.switches} switches"
            print(f"{each.path}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
