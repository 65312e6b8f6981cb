"""Tide for models with windows: a profile for each of their caches, judged by llama.cpp's answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.codec.tide_profiles import CURVE, fitted_to, rotary_by
from tests.llama.conftest import ask
from tests.suites import block_meta

from kvtide.cli.app import app
from kvtide.codec import Profile
from kvtide.codec.rotary import Rotary
from kvtide.engines.llamacpp import CachedLlama, attach
from kvtide.engines.llamacpp.state import LlamaContext


def rotary_of(layers: Sequence[int]) -> Rotary:
    """How layers turn: the sixth sees everything, the others a window."""
    return rotary_by(1e6 if layers[0] == 5 else 1e4, 32)


def blocks_after(cached: CachedLlama, prompt: list[int]) -> list[list[Any]]:
    """Return the first three blocks of a prompt by group, each with its identity."""
    ask(cached.llm, prompt, 1)
    found = []
    for each, part in zip(cached.served.groups, LlamaContext(cached.llm).read()[1], strict=True):
        layout, rows = each.group.layout, np.stack(part.rows)
        blocks = (rows[:, start : start + layout.tokens].reshape(layout.shape) for start in range(0, 384, 128))
        found.append([(block_meta(layout, 0, n), np.ascontiguousarray(bits)) for n, bits in enumerate(blocks)])
    return found


def prompts(seed: int, count: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(seed).integers(3, 259, (count, 400)).tolist()
    return found


def fitted(cached: CachedLlama) -> list[Profile]:
    """Fit a profile to each cache, as `kvtide calibrate` does, but for the curve, whose losses are as measured here."""
    found, profiles = [blocks_after(cached, prompt) for prompt in prompts(1, 10)], list[Profile]()
    curve = CURVE * np.array([1, 1, 5], np.float32)
    for number, shape in enumerate(cached.served.profile_shapes):
        rotary = rotary_of(cached.served.groups[number].group.layers)
        made = fitted_to(shape.layout, "layer", rotary, [pair for own in found for pair in own[number]])
        name = np.frombuffer(shape.group.encode(), dtype=np.uint8)
        profiles.append(made.with_arrays({"group": name, "curve": curve, "trellis_curve": curve}))
    return profiles


def test_tide_keeps_its_promise_of_each_cache(opened: Any, models: Any, tmp_path: Path) -> None:
    store, file = tmp_path / "store", tmp_path / "profile"
    with opened("gemma3") as llm, attach(llm, store) as cached:
        profiles = fitted(cached)
    for each in profiles:
        file.write_bytes(each.to_bytes())
        words = ["profile", "put", str(file), "--model", str(models("gemma3")), "--store", str(store)]
        app(words, standalone_mode=False)
    for swa_full, logs in ((True, list[Any]()), (False, [])):
        for hit_tokens in (0, 384):
            with opened("gemma3", swa_full=swa_full) as llm, attach(llm, store, codec="tide:5e-3") as cached:
                logits = np.array([ask(llm, prompt, 1).logits[0] for prompt in prompts(3, 24)], np.float64)
                assert cached.flush(60) and cached.last is not None and cached.last.hit_tokens == hit_tokens
                stats = cached.cache.stats()
            assert stats.blocks_unencodable == stats.blocks_without_profile == 0
            assert stats.bytes_stored <= stats.raw_bytes_stored / 5
            logs.append(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        # Of the token behind each of 24 prompts.
        assert 0 < (np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean() < 1.5 * 5e-3
    with opened("gemma3") as llm, pytest.raises(ValueError, match="one each of attention 2x32, attention 2x32 window"):
        attach(llm, store, codec="tide", profiles=profiles[:1])


def test_each_cache_has_the_layers_and_the_rotation_of_its_profile(opened: Any) -> None:
    with opened("gemma3") as llm, attach(llm, "memory://") as cached:
        groups, blocks = [each.group.layers for each in cached.served.groups], blocks_after(cached, [100] * 400)
    assert groups == [(5,), (0, 1, 2, 3, 4, 6)]
    # Of one token again and again each layer's keys are the same wherever it stands, once turned back.
    for layers, (*_, (meta, bits)) in zip(groups, blocks, strict=True):
        turned = np.ptp(bits[0, 0].view(np.float16).astype(np.float32), axis=0).max()
        for asked in groups:
            rotary = rotary_of(asked)
            back = rotary.load(bits[0, 0], meta.layout.dtype, rotary.inverse_tables(meta.start, meta.layout.tokens))
            assert (np.ptp(back, axis=0).max() < turned / 20) == (asked is layers)


def test_windows_of_unknown_layers_are_refused(opened: Any, tmp_path: Path) -> None:
    with opened("gemma2", swa_full=False) as llm, attach(llm, "memory://", codec="tide") as cached:
        assert [each.group.layers for each in cached.served.groups] == [(1, 3, 5), (0, 2, 4, 6)]
    other = {"gemma3.attention.sliding_window_pattern": 3}
    with opened("gemma3", kv_overrides=other) as llm, pytest.raises(ValueError, match="which layers of gemma3 have"):
        attach(llm, tmp_path, codec="tide")
    with opened("gemma3") as llm:
        llm.metadata["gemma3.attention.sliding_window_pattern"] = "[true, false]"
        with pytest.raises(ValueError, match="which layers of gemma3 have"):
            attach(llm, tmp_path, codec="tide")
        assert len(attach(llm, tmp_path).served.groups) == 2
