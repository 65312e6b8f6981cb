from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtide.codec import LosslessCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec
from kvtide.engines.transformers.groups import model_layout
from kvtide_lab.judge.quality import QualityJudge


@pytest.fixture(scope="module")
def judge(tiny_model: Any) -> QualityJudge:
    judge = QualityJudge(tiny_model, model_layout(tiny_model, 16), context_tokens=48, continuation=20, greedy=6)
    judge.add(np.random.default_rng(1).integers(0, 256, size=80).tolist())
    return judge


def test_exact_cache_is_judged_as_perfect(judge: QualityJudge) -> None:
    coded = judge.code(0, LosslessCodec())
    verdict = judge.judge(0, coded.decoded)
    assert (verdict.kl, verdict.nll_change, verdict.top1, verdict.greedy_match) == (0.0, 0.0, 1.0, 6)
    assert coded.stored_bytes < coded.raw_bytes == 3 * judge.layout.raw_bytes


def test_coarser_cache_is_judged_as_worse(judge: QualityJudge) -> None:
    fine, coarse = (judge.judge(0, judge.code(0, ChunkwiseCodec(level)).decoded) for level in (1, 3))
    assert 0 < fine.kl < coarse.kl


def test_leading_refinements_are_counted_and_judged_alone(judge: QualityJudge) -> None:
    codec = CachegenCodec(level=1)
    anchors, some, whole = (judge.code(0, codec, refinements) for refinements in (0, 4, None))
    assert (anchors.refinements, some.refinements, whole.refinements) == (0, 4, 9)
    assert anchors.stored_bytes < some.stored_bytes < whole.stored_bytes == judge.code(0, codec, 9).stored_bytes
    kls = [judge.judge(0, coded.decoded).kl for coded in (anchors, some, whole)]
    assert kls[0] > kls[1] > kls[2] > 0


def test_garbage_cache_is_judged_as_bad(judge: QualityJudge) -> None:
    garbage = [np.zeros_like(bits) for bits in judge.contexts[0].blocks]
    assert judge.judge(0, garbage).kl > 1e-3


def test_short_context_or_crooked_size_is_refused(judge: QualityJudge, tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="needs 69 tokens"):
        judge.add([1] * 68)
    with pytest.raises(ValueError, match="whole blocks"):
        QualityJudge(tiny_model, judge.layout, context_tokens=50, continuation=20, greedy=6)
