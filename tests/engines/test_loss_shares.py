from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.codec.tide import COSTS, Moments, Steps, TideCodec, draft_profile
from kvtide.engines.calibrate import TideCalibration, calibration, split_texts
from kvtide.engines.calibrate.judge import WholeJudge, coded_prefixes
from kvtide.engines.calibrate.sensitivity import LossShares, cache_sensitivity, finer_weights, loss_shares
from kvtide.engines.transformers import ModelContexts

pytestmark = pytest.mark.usefixtures("any_block_fits")
TOKENS = 48


def texts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, size=190).tolist() for _ in range(count)]


def test_products_of_errors_and_gradients_add_up_to_the_kl(tiny_model: Any) -> None:
    ids, contexts = texts(1)[0], ModelContexts(tiny_model, 16)
    judge, rotaries, layout = WholeJudge(contexts, ids, TOKENS), contexts.rotaries(), contexts.shapes[0].layout
    context, moments = judge.context, Moments(layout, COSTS["layer"])
    for meta, bits in zip(context.metas[0], context.blocks[0], strict=True):
        moments.add(meta, bits, rotaries[0])
    moments.add_sensitivity(cache_sensitivity(contexts, context, ids[TOKENS:], rotaries, torch.Generator())[0])
    codec = TideCodec(draft_profile("tiny", layout, "layer", rotaries[0], moments.state)).with_steps(Steps(-12, 0))
    assert codec.model is not None
    (coded,) = coded_prefixes([codec], context)
    weights = [codec.model.weight]
    (found,) = loss_shares(contexts, context, coded.decoded, ids[TOKENS:], rotaries, weights)
    assert found.kl.shape == found.error.shape == (layout.layers, 2, layout.kv_heads)
    assert (found.error > 0).all()
    # Tokens that are kept apart have errors, too, but small ones.
    assert float(found.kl.sum()) == pytest.approx(judge.kl(coded.decoded), rel=0.15)


def test_a_head_that_the_model_minds_less_gets_coarser_steps(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepcopy(tiny_model)
    with torch.no_grad():
        # Query heads 2 and 3 read the second of two heads of keys and values.
        model.model.layers[1].self_attn.o_proj.weight[:, 32:] *= 0.1

    def weights() -> Any:
        calibrated = TideCalibration(model, "tiny", "layer", split_texts(texts(3)), 16, tmp_path / "p")
        (profile,), _ = calibrated.run(lambda *_: None)
        return profile.arrays["weight"].reshape(3, 2, 2, 16).mean(axis=-1)

    found = weights()
    monkeypatch.setattr(calibration, "finer_weights", lambda shares: [np.ones(each.kl.shape) for each in shares])
    over_even = found / weights()
    # Keys of both heads of this layer mean little to a random model.
    assert over_even[1, 0, 1] < 0.9 * over_even[1, 0, 0]
    assert over_even[1, 1, 1] < 0.6 * over_even[1, 1, 0]


def test_transforms_in_two_stages_are_fitted_once(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = list[str]()
    monkeypatch.setattr(calibration, "is_staged", lambda cost, layout: True)
    calibrated = TideCalibration(tiny_model, "tiny", "layer", split_texts(texts(1)), 16, tmp_path / "p")
    calibrated.run(lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["moments", "counts", "curve"]


def test_weights_follow_what_a_head_has_more_of_the_kl_than_of_the_error() -> None:
    error = np.ones((1, 2, 2))
    (even,) = finer_weights([LossShares(3 * error, error)])
    assert even == pytest.approx(1.0)
    (minded,) = finer_weights([LossShares(np.array([[[16.0, 1.0], [1.0, 1.0]]]), error)])
    assert minded[0, 0, 0] == pytest.approx(16**0.3 * minded[0, 0, 1])
    assert float(np.log(minded).sum()) == pytest.approx(0.0)
    (none,) = finer_weights([LossShares(0 * error, error)])
    assert (none == 1).all()
    first, second = finer_weights([LossShares(16 * error, error), LossShares(error, error)])
    assert (first > 1).all() and (second < 1).all()
