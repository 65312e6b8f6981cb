from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import LAYOUT, fitted, fitted_on

from kvtide.codec.tide.model import TideModel
from kvtide.codec.tide.section import KeyRotation, StoredLayers, load_values
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide.testing import block_meta, smooth_bits
from kvtide_lab.bench import codec_bound, codec_bound_show
from kvtide_lab.bench.codec_bound import JudgedPoint
from kvtide_lab.bench.codec_bound_channel import TestChannel, rate_of, shannon_bound, store_values
from kvtide_lab.bench.codec_quality import QualitySize, Subject

# In the middle of a prompt: no token is kept apart.
META = block_meta(LAYOUT, 0, 2)


def added(cost: str, blocks: int = 24) -> tuple[TideModel, TestChannel]:
    model = TideModel(fitted(LAYOUT, cost))
    channel = TestChannel(model, loud_units=-20)
    for seed in range(blocks):
        channel.add(META, smooth_bits(LAYOUT, seed))
    return model, channel


@pytest.mark.parametrize("cost", ["light", "layer"])
def test_channel_has_the_error_that_its_rate_is_of(cost: str) -> None:
    model, channel = added(cost)
    error = float(np.median(channel.powers)) / 50
    pairs = [(META, smooth_bits(LAYOUT, seed)) for seed in range(24)]
    found = channel.through(pairs, [error], np.random.default_rng(1))[0]
    turns, weights = model.turns(META, is_back=True), model.weight.reshape(LAYOUT.layers, 2, 1, 1, -1)
    squares = [
        np.square((_values(turns, bits) - _values(turns, pair[1])) * weights).mean()
        for bits, pair in zip(found.blocks, pairs, strict=True)
    ]
    assert np.mean(squares) == pytest.approx(np.minimum(channel.powers, error).mean(), rel=0.03)
    assert found.bound_bits <= channel.ideal_bits(error) * 1.01


def _values(turns: KeyRotation, bits: Any) -> Any:
    return load_values(StoredLayers(bits, LAYOUT.dtype, 0, turns))


def test_more_bits_for_less_error_and_none_for_what_has_less_power() -> None:
    _, channel = added("layer")
    rates = [channel.ideal_bits(error) for error in (1e-4, 1e-3, 1e-2)]
    assert sorted(rates, reverse=True) == rates
    assert channel.ideal_bits(1e9) == 0
    assert rate_of(np.array([4.0, 0.5]), 1.0).tolist() == [1.0, 0.0]


def test_shannons_bound_is_the_channels_rate_for_normal_values_and_less_for_others() -> None:
    powers, normal = np.array([4.0, 2.0, 0.5]), np.full(3, np.log2(2 * np.pi * np.e) / 2)
    assert shannon_bound(powers, 1.0, normal) == pytest.approx(rate_of(powers, 1.0))
    laplace = np.full(3, np.log2(np.e * np.sqrt(2)))
    assert (shannon_bound(powers, 1.0, laplace) <= rate_of(powers, 1.0)).all()


def test_values_are_stored_as_they_were_loaded() -> None:
    bits, model = smooth_bits(LAYOUT, 3), TideModel(fitted(LAYOUT))
    back, out = model.turns(META, is_back=True), np.empty_like(bits)
    store_values(_values(back, bits), StoredLayers(out, LAYOUT.dtype, 0, model.turns(META, is_back=False)))
    assert out.view(np.float32) == pytest.approx(bits.view(np.float32), abs=1e-5)


class Stopped(Exception):
    pass


def test_bench_goes_on_from_its_file_and_draws(tiny_model: Any, tmp_path: Path) -> None:
    rng, layout = np.random.default_rng(1), model_layout(tiny_model, 16)
    ids = [rng.permutation(np.arange(69)).tolist() for _ in range(2)]
    size = QualitySize(contexts=2, context_tokens=48, continuation=20, greedy=1)
    subject = Subject(tiny_model, "tiny", layout, size, ids, ["noise", "noise"], ["a", "b"])
    profile = fitted_on(tiny_model, layout, torch.tensor([ids[0]]))

    def judged(path: Path, contexts_max: int) -> codec_bound.CodecBound:
        def stop(what: str, done: int, total: int) -> None:
            if what == "contexts" and contexts_max <= done < total:
                raise Stopped

        partial = codec_bound.partial_of(subject, [profile], path)
        return codec_bound.run(subject, [profile], partial, stop)

    with pytest.raises(Stopped):
        judged(tmp_path / "partial", contexts_max=1)
    found = judged(tmp_path / "partial", contexts_max=2)
    assert found == judged(tmp_path / "whole", contexts_max=2)
    ideal = [row for row in found.rows if row.coder == "ideal"]
    assert [row.bits for row in ideal] == sorted((row.bits for row in ideal), reverse=True)
    assert [point.name for point in found.surface[:2]] == ["recomputed", "lossless"]
    assert (found.surface[0].bits, found.surface[0].of_prefill) == (0, 1)
    codec_bound_show.plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_distance_is_taken_at_equal_kl() -> None:
    """Ideal bits are 2 log10(1 / KL) - 2, tide's a tenth more."""
    found = {
        codec_bound.BoundCase("deep", kl, 0, of): [JudgedPoint(bits * (1 if of is None else 1.1), bits, kl)] * 3
        for of in (None, 0)
        for kl, bits in ((1e-4, 6.0), (1e-1, 0.01))
    }
    distances = list(codec_bound.distances_of("deep", found))
    assert [each.kl for each in distances] == list(codec_bound.KLS)
    assert all(each.over_ideal == pytest.approx(0.1) and each.over_ideal_stderr == 0 for each in distances)
