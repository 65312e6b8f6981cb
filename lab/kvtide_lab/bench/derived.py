"""tide on models made from SmolLM2's weights: calibrated on few texts, then held to its loss on texts it never saw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from kvtide.engines.calibrate import restored_kl
from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide.engines.transformers import attach, converted_folder, load_model, load_tokenizer
from kvtide_lab.judge.derived import DERIVED, derived_model

QUALITY = 5e-3
CODEC = f"tide:{QUALITY}"
# Of each of the texts that calibrating takes by default; texts that are judged on.
CALIBRATED_TOKENS, TEXTS = 700, 6
BLOCK_TOKENS = 256
PROMPT_BLOCKS, ANSWER_TOKENS = 2, 87
CALIBRATE_S_MAX = 3600.0
# Where texts have begun to be what they are.
_FROM_CHARACTER, _TO_CHARACTER = 2000, 6000


class DerivedVerdict(msgspec.Struct, frozen=True):
    """One model: how many blocks are tide's, how many the profile does not fit, and the KL of each text.

    bits_per_element: of all blocks, their headers among them.
    """

    kind: str
    blocks: int
    unfit_blocks: int
    bits_per_element: float
    kls: list[float]

    @property
    def kl(self) -> float:
        """Return the mean over texts."""
        return sum(self.kls) / len(self.kls)


def judge_derived(
    kind: str, folder: Path, tokens: int, texts: int, show: Callable[[str, int, int], None]
) -> DerivedVerdict:
    """Make a model, calibrate it by the command, and judge it. ValueError if the command fails."""
    model, store = folder / kind, str(folder / f"{kind}-store")
    plain, tokenizer = load_model(converted_folder()), load_tokenizer(converted_folder())
    contents = [text.content[_FROM_CHARACTER:_TO_CHARACTER] for text in evaluation_texts()[:texts]]
    prompts = [torch.tensor([tokenizer(content).input_ids]) for content in contents]
    derived_model(kind, plain, prompts[0][0, :BLOCK_TOKENS].tolist()).save_pretrained(model)
    tokenizer.save_pretrained(model)
    words = ["calibrate", str(model), "--store", store, "--tokens", str(tokens)]
    _run([sys.executable, "-m", "kvtide.cli", *words])
    made, kls, cut = load_model(model), [], PROMPT_BLOCKS * BLOCK_TOKENS + 1
    exact = attach(made, folder / f"{kind}-exact", block_tokens=BLOCK_TOKENS)
    with attach(made, store, codec=CODEC, block_tokens=BLOCK_TOKENS) as cached, exact:
        for number, ids in enumerate(prompts):
            show(kind, number, len(prompts))
            prompt, answer = ids[:, :cut], ids[0, cut : cut + ANSWER_TOKENS].tolist()
            for each in (cached, exact):
                each.generate(prompt, max_new_tokens=1, do_sample=False)
                if not each.flush(60):
                    raise ValueError("blocks were not stored in a minute")
            kls.append(restored_kl(cached, exact, prompt, answer))
        stats = cached.cache.stats()
    blocks, others = len(prompts) * PROMPT_BLOCKS, stats.blocks_unencodable + stats.blocks_without_profile
    # The model is float32.
    bits = 32 * stats.bytes_stored / stats.raw_bytes_stored
    return DerivedVerdict(kind, blocks - others, others, bits, kls)


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=CALIBRATE_S_MAX, check=False)
    if ran.returncode:
        raise ValueError(f"{' '.join(command[2:])} failed: {ran.stderr[-500:]}")


class DerivedResult(msgspec.Struct, frozen=True):
    """All models that were judged, against a quality."""

    codec: str
    quality: float
    verdicts: list[DerivedVerdict]


def run(kinds: Sequence[str], texts: int, show: Callable[[str, int, int], None]) -> DerivedResult:
    """Make, calibrate and judge models of these kinds, in a folder that is removed. ValueError for an unknown kind."""
    foreign = sorted(set(kinds) - set(DERIVED))
    if foreign:
        raise ValueError(f"unknown models {', '.join(foreign)}, expected some of {', '.join(DERIVED)}")
    with TemporaryDirectory() as folder:
        found = [judge_derived(kind, Path(folder), CALIBRATED_TOKENS, texts, show) for kind in kinds or DERIVED]
    return DerivedResult(CODEC, QUALITY, found)


def render(result: DerivedResult) -> str:
    """Return a line for each model: whether the promise was kept, and by how many blocks of tide."""
    lines = [f"{'model':10} {'tide blocks':>12} {'lossless':>9} {'bits':>6} {'KL':>8} {'worst':>8}  kept"]
    for each in result.verdicts:
        is_kept = "yes" if each.kl <= result.quality else "no"
        counts = f"{each.blocks:>12} {each.unfit_blocks:>9} {each.bits_per_element:>6.2f}"
        lines.append(f"{each.kind:10} {counts} {each.kl:>8.4f} {max(each.kls):>8.4f}  {is_kept}")
    return "\n".join(lines)
