import hashlib
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.block import KVDtype
from kvtide.keys import KeyChain, block_keys, namespace_digest, tokens_array

FIELDS: dict[str, Any] = {
    "fingerprint": b"model",
    "dtype": KVDtype.BFLOAT16,
    "layout": "layers=2",
    "block_tokens": 4,
    "tenant_salt": b"tenant",
}
NAMESPACE = namespace_digest(**FIELDS)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_key_is_sha256_of_parent_and_little_endian_tokens() -> None:
    first = hashlib.sha256(NAMESPACE + np.array([1, 2, 3, 4], dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([5, 6, 7, 8], dtype="<u4").tobytes()).digest()
    assert block_keys(NAMESPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first, second], "a partial block has no key"


@given(tokens=token_lists, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_growing_chain_gives_the_keys_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    chain, grown = KeyChain(NAMESPACE, 4), []
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, stop in itertools.pairwise(bounds):
        grown += chain.extend(tokens[start:stop])
    assert grown == block_keys(NAMESPACE, tokens, 4)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), position=st.integers(0, 7))
def test_changed_token_changes_its_block_and_all_after(tokens: list[int], position: int) -> None:
    changed = list(tokens)
    changed[position] ^= 1
    before, after = block_keys(NAMESPACE, tokens, 4), block_keys(NAMESPACE, changed, 4)
    assert (before[0] == after[0]) == (position >= 4)
    assert before[1] != after[1]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": b"other"},
        {"dtype": KVDtype.FLOAT16},
        {"layout": "layers=3"},
        {"block_tokens": 8},
        {"tenant_salt": b"neighbour"},
        # A field's end must not be movable into the next one.
        {"fingerprint": b"modelb", "layout": "float16"},
    ],
)
def test_every_field_sets_the_namespace_apart(change: dict[str, Any]) -> None:
    assert namespace_digest(**{**FIELDS, **change}) != NAMESPACE


def test_keys_are_stable_across_processes_and_hash_seeds() -> None:
    code = (
        "from kvtide.keys import block_keys, namespace_digest; from kvtide.block import KVDtype;"
        "n = namespace_digest(b'model', KVDtype.BFLOAT16, 'layers=2', 4, b'tenant');"
        "print(n.hex(), *[k.hex() for k in block_keys(n, range(8), 4)])"
    )
    command = [sys.executable, "-c", code]
    outputs = {subprocess.check_output(command, env={"PYTHONHASHSEED": seed}, text=True) for seed in ("0", "1")}
    here = [NAMESPACE.hex(), *[key.hex() for key in block_keys(NAMESPACE, range(8), 4)]]
    assert outputs == {" ".join(here) + "\n"}


def test_golden_keys() -> None:
    # Golden: a change here makes every store in the world cold. It needs a new namespace tag and a decision page.
    assert NAMESPACE.hex() == "46bac94ee78054fce0ac0fa4bb0f5a614433ca207d07b7174bf0f3e97f9812b8"
    (first,) = block_keys(NAMESPACE, range(4), 4)
    assert first.hex() == "4a3fd75bbee85d64fdf32da461d89762e90cd976e270a99dce25d39980fa69ba"


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [[1, 2]], [None], [2**70], np.zeros((2, 2), int)])
def test_bad_token_ids_are_refused(tokens: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="token ids"):
        tokens_array(tokens)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, ">u4"])
def test_any_integer_type_gives_the_same_keys(dtype: Any) -> None:
    assert block_keys(NAMESPACE, np.arange(8).astype(dtype), 4) == block_keys(NAMESPACE, range(8), 4)


@pytest.mark.parametrize("block_tokens", [0, -4, 1 << 20])
def test_block_size_out_of_bounds_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        KeyChain(NAMESPACE, block_tokens)
    with pytest.raises(ValueError, match="block_tokens"):
        namespace_digest(b"model", KVDtype.FLOAT32, "", block_tokens)


def test_namespace_needs_a_fingerprint() -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        namespace_digest(b"", KVDtype.FLOAT32, "", 4)
