"""What a block is, and what groups of layers need of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.group import GroupKind, LayerGroup, hit_of, part_keys
from kvtide.types import BlockKey, Namespace, ObjectId

KEY, NAMESPACE = BlockKey(b"k" * 32), Namespace(b"n" * 32)


def test_layout_counts_bytes() -> None:
    layout = BlockLayout(layers=2, tokens=4, kv_heads=3, head_dim=5, dtype=KVDtype.BFLOAT16)
    assert layout.shape == (2, 2, 4, 3, 5)
    assert layout.layer_bytes == 2 * 4 * 3 * 5 * 2
    assert layout.raw_bytes == 2 * layout.layer_bytes


DIMENSIONS = ("layers", "tokens", "kv_heads", "head_dim")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({field: value}, field) for field in DIMENSIONS for value in (0, -1, 1 << 40, 1.5, "4")),
        ({"layers": 4096, "tokens": 65536, "kv_heads": 4096, "head_dim": 8192}, "raw bytes"),
        ({"dtype": "float32"}, "KVDtype"),
    ],
)
def test_layout_out_of_bounds_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {**dict.fromkeys(DIMENSIONS, 1), "dtype": KVDtype.FLOAT32, **changes}
    with pytest.raises(ValueError, match=message):
        BlockLayout(**fields)


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_dtype_code_round_trips(dtype: KVDtype) -> None:
    assert KVDtype.from_code(dtype.code) is dtype


def test_meta_refuses_short_digests_and_crooked_starts(layout: BlockLayout) -> None:
    good = ObjectId(NAMESPACE, KEY)
    with pytest.raises(ValueError, match="parent"):
        BlockMeta(good, BlockKey(b"short"), 0, layout)
    with pytest.raises(ValueError, match="key"):
        BlockMeta(ObjectId(NAMESPACE, BlockKey(b"short")), KEY, 0, layout)
    for start in (-16, 5):
        with pytest.raises(ValueError, match="start"):
            BlockMeta(good, KEY, start, layout)


LAYOUT = BlockLayout(2, 64, 2, 16, KVDtype.FLOAT32)


def brute(present: list[list[bool]], reaches: list[int]) -> int:
    for end in range(len(present[0]), 0, -1):
        starts = [end - min(reach or end, end) for reach in reaches]
        if all(all(parts[start:end]) for parts, start in zip(present, starts, strict=True)):
            return end
    return 0


@given(
    st.integers(0, 12).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(0, 5)), min_size=1, max_size=4
        )
    )
)
def test_hit_is_the_longest_whose_every_group_has_its_last_parts(groups: list[tuple[list[bool], int]]) -> None:
    present, reaches = [parts for parts, _ in groups], [reach for _, reach in groups]
    hit = hit_of(present, reaches)
    assert hit.blocks == brute(present, reaches)
    if hit.blocks == len(present[0]):
        assert hit.ended_by is None
    else:
        # Without that group the hit is no shorter, and alone it does not allow one block more.
        assert hit.ended_by is not None
        assert brute([present[hit.ended_by]], [reaches[hit.ended_by]]) <= len(present[0])
        only = present[hit.ended_by][: hit.blocks + 1]
        assert brute([only], [reaches[hit.ended_by]]) != hit.blocks + 1


def test_groups_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        hit_of([[True], [True, True]], [0, 0])


@pytest.mark.parametrize(("window", "blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (255, 4)])
def test_reach_in_blocks_covers_the_window(window: int, blocks: int) -> None:
    assert LayerGroup("window", GroupKind.KV, (0, 1), LAYOUT, window).reach_blocks(64) == blocks


def test_parts_of_two_groups_never_share_a_key() -> None:
    keys = [BlockKey(bytes([number]) * 32) for number in range(3)]
    one, other = (part_keys(Namespace(bytes([space]) * 32), keys) for space in (1, 2))
    assert len({*one, *other, *keys}) == 9
