"""`kvtide-lab bench llama` on a tiny model."""

from pathlib import Path
from typing import Any

from kvtide_lab.bench import llama


def test_bench_compares_ways_to_keep_prompts(models: Any, tmp_path: Path) -> None:
    shown: list[str] = []
    size = llama.LlamaSize(rounds=1, stored=512, shared=300, own=100, alone=200)
    result = llama.run(models(), tmp_path, size, lambda what, done, total: shown.append(what))
    assert [row.contender for row in result.rows] == shown and "kvtide tide" not in shown
    assert result.answers_changed == 0 and result.restart_vs_plain > 0
    # Ten states of 400 tokens, and three blocks of each prompt, two of which are shared.
    assert result.shared_raw_vs_disk_cache < 0.5
