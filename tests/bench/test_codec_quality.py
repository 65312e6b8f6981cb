from __future__ import annotations

import pytest

from kvtide.bench.codec_quality import SINGLE_DELTAS, cases
from kvtide.block import BlockLayout, KVDtype
from kvtide.engines.profiles import shipped_profiles

LAYOUT = BlockLayout(layers=30, tokens=256, kv_heads=3, head_dim=64, dtype=KVDtype.FLOAT32)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("where", ["shared", "payload"])
def test_each_case_is_judged_once_and_parts_take_the_best_tables(quick: bool, where: str) -> None:
    found = cases(shipped_profiles() if where == "shared" else [], LAYOUT, quick)
    names = [(case.name, case.level, case.coder, case.profile, case.refinements, case.quality) for case in found]
    assert len(set(names)) == len(names)
    parts = [name[:-1] for name in names if name[-2] is not None]
    assert parts == [("cachegen", 4, "rans", where, refinements) for refinements in SINGLE_DELTAS]
