"""`kvtide-lab bench llama` on a tiny model."""

from pathlib import Path
from typing import Any

from kvtide_lab.bench import llama


def test_bench_compares_ways_to_keep_prompts(models: Any, tmp_path: Path) -> None:
    shown: list[str] = []
    size = llama.LlamaSize(1, stored=256, shared=300, own=100, alone=100, turns=2)
    models = [models(), models("gemma3")]
    sizes = (size, size._replace(shared=0, alone=0, turns=0))
    result = llama.run(models, tmp_path, sizes, lambda what, done, total: shown.append(what))
    assert len(result.rows) == 14 and "kvtide tide" not in str(shown)
    assert result.answers_changed == 0 and result.restart_vs_plain > 0
    assert result.served_vs_plain > 0 and result.turns_vs_plain > 0
    # Ten states of 400 tokens, and three blocks of each prompt, two of which are shared.
    assert result.shared_raw_vs_disk_cache < 0.5
