from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import LAYOUT, fitted, fitted_on

from kvtide.codec.tide.grid import UNITS
from kvtide.codec.tide.model import TideModel
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide_lab.bench import codec_levers, codec_levers_show
from kvtide_lab.bench.codec_levers import JudgedLever, Lever
from kvtide_lab.bench.codec_quality import QualitySize, Subject
from kvtide_lab.bench.levers_classes import LoudClasses
from kvtide_lab.bench.levers_levels import BlockCoefficients, LevelChoice
from kvtide_lab.bench.levers_transform import Mixed, Predicted, TokenBlock, Transform
from kvtide_lab.bench.levers_trellis import STATES, TrellisLevels
from kvtide_lab.bench.levers_weights import Reweighed

GROUPS, COMPONENTS, TOKENS = 3, 24, 64
# Steps of the middle scale to about three times it.
UNITS_TRIED = (0, UNITS, 3 * UNITS // 2)


def normal_blocks(count: int, seed: int = 1, is_loud: bool = False) -> list[BlockCoefficients]:
    """Normally distributed, the strongest component four times the weakest; tokens loud or soft, or all alike."""
    rng = np.random.default_rng(seed)
    scales = np.tile(np.linspace(UNITS, -UNITS, COMPONENTS).astype(np.int64), (GROUPS, 1))
    found = []
    for _ in range(count):
        values = rng.standard_normal((GROUPS, COMPONENTS, TOKENS)) * 2.0 ** (scales[:, :, None] / UNITS)
        if is_loud:
            values *= np.exp(rng.standard_normal(TOKENS) / 2)
        whole = (values.astype(np.float32), scales, np.zeros(4, dtype=np.int64))
        found.append(BlockCoefficients(*whole, rng.permutation(TOKENS), np.zeros(TOKENS, dtype=bool)))
    return found


def bits_at_error(choice: LevelChoice | TrellisLevels, error: float) -> float:
    """Fit on blocks, code others, and return bits a coefficient at a squared error."""
    choice.fit(normal_blocks(6), UNITS_TRIED)
    judged, points = normal_blocks(4, seed=2), []
    for units in UNITS_TRIED:
        coded = [choice.code(block, units) for block in judged]
        errors = [np.square(c.values - block.values).mean() for c, block in zip(coded, judged, strict=True)]
        points.append((float(np.mean(errors)), sum(c.bits for c in coded) / sum(b.values.size for b in judged)))
    rising = np.array(sorted(points))
    return float(np.interp(np.log(error), np.log(rising[:, 0]), rising[:, 1]))


def test_priced_levels_take_fewer_bits_at_equal_error_and_a_trellis_fewer_again() -> None:
    rounded, priced, trellis = (
        bits_at_error(each, 0.4) for each in (LevelChoice(0), LevelChoice(0.12), TrellisLevels(8))
    )
    assert priced < 0.98 * rounded
    assert trellis < 0.93 * rounded


@pytest.mark.parametrize("states", [4, 8])
def test_a_decoder_knows_each_state_by_the_levels_so_far(states: int) -> None:
    trellis = TrellisLevels(states).fit(normal_blocks(4), [0], rounds=2)
    nexts, quantisers = STATES[states]
    exact = np.random.default_rng(3).standard_normal((5, 40)).astype(np.float32) * 4
    levels, found = trellis.path(exact, np.full(exact.shape, 20))
    for row, states_of_row in zip(levels.astype(int), found, strict=True):
        state = 0
        for level, known in zip(row, states_of_row, strict=True):
            assert known == state
            state = nexts[state][level % 2]
    values = np.sign(levels) * (2 * np.abs(levels) - np.array(quantisers)[found] * (levels != 0))
    assert float(np.abs(values - exact).max()) < 2.5


def test_rounding_rounds_and_a_price_only_lowers_magnitudes() -> None:
    blocks = normal_blocks(3)
    rounded, priced = (LevelChoice(price).fit(blocks, [0]).chosen(blocks[0], 0)[0] for price in (0.0, 0.2))
    assert (rounded.levels == np.rint(rounded.exact)).all()
    assert (np.abs(priced.levels) <= np.abs(rounded.levels)).mean() > 0.99
    assert (priced.levels == 0).sum() > (rounded.levels == 0).sum()


def test_lengths_that_follow_loudness_are_shorter_where_tokens_differ_and_change_no_value() -> None:
    blocks = normal_blocks(16, is_loud=True)
    plain, follows = (each.fit(blocks[:12], [0]) for each in (LevelChoice(0), LoudClasses(0)))
    for block in blocks[12:]:
        one, other = plain.code(block, 0), follows.code(block, 0)
        assert (one.values == other.values).all()
        assert other.bits < 0.97 * one.bits


@pytest.mark.parametrize("transform", [Mixed(2, 8), Mixed(0, 24), Predicted(1), Predicted(3)])
def test_transforms_are_undone(transform: Transform) -> None:
    rng = np.random.default_rng(4)
    blocks = [TokenBlock(each, rng.standard_normal((10, TOKENS)).astype(np.float32)) for each in normal_blocks(8)]
    for block in blocks[:-1]:
        transform.add(block)
    transform.fit()
    turned = transform.forth(blocks[-1])
    assert transform.mflop > 0
    assert transform.back(blocks[-1], turned.values) == pytest.approx(blocks[-1].coefficients.values, abs=1e-3)


def test_prediction_takes_away_what_embeddings_say() -> None:
    rng, predicted, powers = np.random.default_rng(5), Predicted(1), []
    says = rng.standard_normal((COMPONENTS, 10)).astype(np.float32)
    for block in normal_blocks(30):
        known = rng.standard_normal((10, TOKENS)).astype(np.float32)
        values = block.values.copy()
        values[0] = 0.1 * values[0] + says @ known
        whole = TokenBlock(block._replace(values=values), known)
        predicted.add(whole)
        powers.append((whole, float(np.square(values[0]).mean())))
    predicted.fit()
    for whole, power in powers:
        assert float(np.square(predicted.forth(whole).values[0]).mean()) < 0.05 * power


def test_a_head_with_larger_weights_has_smaller_errors() -> None:
    model = TideModel(fitted(LAYOUT, "layer"))
    reweighed, finer = Reweighed(model), np.ones((LAYOUT.layers, 2, LAYOUT.kv_heads))
    finer[0, 0, 0] = 2
    reweighed.weigh(finer)
    rng, scales = np.random.default_rng(6), np.stack([group.scales for group in model.groups])
    values = rng.standard_normal((*scales.shape, TOKENS)) * 2.0 ** (scales[:, :, None] / UNITS)
    whole = (values.astype(np.float32), scales, np.zeros(4, dtype=np.int64))
    block = TokenBlock(
        BlockCoefficients(*whole, np.arange(TOKENS), np.zeros(TOKENS, dtype=bool)),
        np.zeros((1, TOKENS), dtype=np.float32),
    )
    turned = reweighed.forth(block)
    assert reweighed.back(block, turned.values) == pytest.approx(block.coefficients.values, abs=2e-3)
    noise = rng.standard_normal(turned.values.shape).astype(np.float32) / 100
    lost = reweighed.back(block, (turned.values + noise).astype(np.float32)) - block.coefficients.values
    assert np.square(lost[0]).mean() < 0.95 * np.square(lost[1]).mean()


class Stopped(Exception):
    pass


def test_bench_goes_on_from_its_file_and_each_lever_has_a_row(tiny_model: Any, tmp_path: Path) -> None:
    rng, layout = np.random.default_rng(1), model_layout(tiny_model, 16)
    ids = [rng.permutation(np.arange(69)).tolist() for _ in range(2)]
    size = QualitySize(contexts=2, context_tokens=48, continuation=20, greedy=1)
    subject = Subject(tiny_model, "tiny", layout, size, ids, ["noise", "noise"], ["a", "b"])
    profile = fitted_on(tiny_model, layout, torch.tensor([ids[0]]))

    def judged(path: Path, contexts_max: int) -> codec_levers.CodecLevers:
        def stop(what: str, done: int, total: int) -> None:
            if what == "contexts" and contexts_max <= done < total:
                raise Stopped

        levers = [
            Lever(codec_levers.TODAY, None, LevelChoice(0)),
            Lever("priced", None, LevelChoice(0.12)),
            Lever("mixed", Mixed(0, 8), TrellisLevels(4)),
            Lever("reweighed", Reweighed(TideModel(profile)), LevelChoice(0)),
        ]
        partial = codec_levers.partial_of(subject, profile, path)
        return codec_levers.run(subject, profile, [each[:64] for each in ids], levers, partial, stop)

    with pytest.raises(Stopped):
        judged(tmp_path / "partial", contexts_max=1)
    found = judged(tmp_path / "partial", contexts_max=2)
    assert found == judged(tmp_path / "whole", contexts_max=2)
    assert [row.lever for row in found.rows] == 2 * [codec_levers.TODAY, "priced", "mixed", "reweighed"]
    assert codec_levers_show.render(found).row_count == len(found.rows)


def test_bits_are_compared_at_equal_kl_and_at_equal_error() -> None:
    levers = [Lever(name, None, LevelChoice(0)) for name in ("rounded", "half")]

    def found(lever: Lever, units: int) -> JudgedLever:
        bits = 2.0 - units / 12
        return JudgedLever(bits * (0.5 if lever.name == "half" else 1.0), 10.0 ** (units / 12 - 3), 2.0**units)

    rows = codec_levers.rows_of(levers, found, [0, 12])
    assert [row.over_today for row in rows] == pytest.approx([1.0, 0.5] * 2)
    assert [row.over_today_equal_error for row in rows] == pytest.approx([1.0, 0.5] * 2)
