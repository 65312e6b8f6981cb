"""Stores that are read-only, full, missing or torn, and writers that are killed: always a miss, never an error."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faults.writers import FILLED, fill_and_remove, writing
from tests.store.test_cache import Collector, fill, metas_of

from kvtide.block import BlockBits, BlockLayout
from kvtide.engines.transformers import attach
from kvtide.store.cache import Cache
from kvtide.store.load import Whole
from kvtide.testing import smooth_bits

OpenCache = Callable[..., Cache]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
KILLS = 20
SEED = 20240317


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("size=512k")


def generate(
    model: Any, store: Path | str, prompt: torch.Tensor, damage: Callable[[], object] = lambda: None
) -> tuple[Any, Any]:
    """Generate on a store that is damaged after `attach`, which refuses one that is of no use from the start."""
    attached = attach(model, str(store), block_tokens=16)
    damage()
    with attached as cached:
        output = cached.generate(prompt, **GREEDY)
        assert cached.cache.flush(10)
        return output, cached


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("kvtide")]


def test_store_that_is_a_file_still_answers(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    output, _ = generate(tiny_model, path, prompt, lambda: path.write_text("not a directory"))
    assert torch.equal(output, tiny_model.generate(prompt, **GREEDY))
    assert len(messages(caplog)) == 1
    assert "can't be used" in messages(caplog)[0]


def test_read_only_store_is_read_and_never_written(
    tiny_model: Any, prompt: torch.Tensor, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = generate(tiny_model, disk, prompt[:, :50])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    _, cached = generate(tiny_model, disk, prompt)
    assert cached.last.hit_tokens == 48
    again, _ = generate(tiny_model, disk, prompt[:, :50])
    assert torch.equal(again, expected)
    assert len([message for message in messages(caplog) if "Read-only" in message]) == 1


def test_missing_store_on_a_read_only_disk_still_answers(
    tiny_model: Any, prompt: torch.Tensor, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remount = ["mount", "-o", "remount,ro", str(disk)]
    output, _ = generate(tiny_model, disk / "store", prompt, lambda: subprocess.run(remount, check=True))
    assert torch.equal(output, tiny_model.generate(prompt, **GREEDY))
    assert len(messages(caplog)) == 1


def test_full_disk_still_answers_and_reads_go_on(
    tiny_model: Any, prompt: torch.Tensor, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tiny_model, disk, prompt[:, :50])
    ballast = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(ballast, bytes(4096))
    os.close(ballast)
    output, cached = generate(tiny_model, disk, prompt)
    assert cached.last.hit_tokens == 48
    assert torch.equal(output, tiny_model.generate(prompt, **GREEDY))
    assert len([message for message in messages(caplog) if "No space" in message]) == 1
    assert list(disk.glob("*.part")) == []


def test_store_deleted_under_a_running_engine_still_answers(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    import shutil

    with attach(tiny_model, str(tmp_path / "store"), block_tokens=16) as cached:
        first = cached.generate(prompt, **GREEDY)
        assert cached.cache.flush(10)
        cached.cache.tiers._places[0].tier.close()
        shutil.rmtree(tmp_path / "store")
        assert torch.equal(cached.generate(prompt, **GREEDY), first)
        assert cached.last is not None and cached.last.hit_tokens == 0


def expected_blocks(layout: BlockLayout) -> list[BlockBits]:
    return [smooth_bits(layout, seed) for seed in range(4)]


def test_killed_writer_leaves_no_wrong_byte_and_no_lock(tmp_path: Path, open_cache: OpenCache) -> None:
    metas, contents, rng = metas_of(FILLED, 4), expected_blocks(FILLED), random.Random(SEED)
    served = wrong = 0
    for _ in range(KILLS):
        with writing(fill_and_remove, tmp_path):
            time.sleep(rng.uniform(0.0, 0.06))
        reader = open_cache(tmp_path)
        assert list(tmp_path.glob("*.part")) == []
        for position, meta in enumerate(metas):
            sink = Collector()
            if reader.load([meta], Whole(sink)).blocks:
                served += 1
                wrong += not np.array_equal(sink.blocks[0], contents[position])
        assert reader.stats().misses.get("corrupt", 0) == 0
        fill(reader, metas)
        reader.close()
    print(json.dumps({"faults": KILLS, "wrong_bytes": wrong, "served": served, "seed": SEED}))
    assert wrong == 0
