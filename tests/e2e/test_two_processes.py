"""Two engines at once on one store directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.stores import disk_bytes

ROOT = Path(__file__).parent.parent.parent
ENGINE = """
import json, sys, torch
from transformers import LlamaForCausalLM
from kvtide.engines.transformers import attach
torch.set_num_threads(1)
model = LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
prompts = torch.load(sys.argv[2])
answers = []
with attach(model, sys.argv[3], block_tokens=16) as cached:
    print("ready", flush=True)
    sys.stdin.readline()
    for prompt in prompts:
        answers.append(cached.generate(prompt[None], max_new_tokens=8, do_sample=False)[0].tolist())
    cached.cache.flush(30)
    print(json.dumps({"answers": answers, "misses": cached.cache.stats().misses}), flush=True)
"""


def test_two_engines_at_once_are_both_right_and_leave_no_torn_object(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    prompts = torch.randint(1, 256, (6, 90), generator=torch.Generator().manual_seed(2))
    prompts[3:, :64] = prompts[0, :64]
    torch.save(prompts, tmp_path / "prompts")
    store = tmp_path / "store"
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "model"), str(tmp_path / "prompts"), str(store)]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    for engine in engines:
        assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
    results = []
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    for engine in engines:
        output, _ = engine.communicate(timeout=120)
        results.append(json.loads(output))
    expected = [tiny_model.generate(p[None], max_new_tokens=8, do_sample=False)[0].tolist() for p in prompts]
    for result in results:
        assert result["answers"] == expected
        assert "corrupt" not in result["misses"]
    listing = subprocess.run(
        [sys.executable, "-m", "kvtide.cli", "ls", "--verify", "--json", "--store", str(store)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    rows = json.loads(listing.stdout)["rows"]
    assert len(rows) >= 3 * 6
    assert [row["problem"] for row in rows] == [""] * len(rows)
    # Nothing half-made is left, and no space that was reserved.
    assert list(store.glob("*.part")) == []
    assert disk_bytes(store) < 1 << 20
