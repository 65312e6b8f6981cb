"""Keys of small random models of each family, taken back to before RoPE: the models' own code is the truth."""

import contextlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.rope_models import cached_keys, config_of, random_model
from tests.codec.tide_twin import as_bits, turned
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtide.block import KVDtype, values_of
from kvtide.codec.rotary import Frequencies, Pairs, Rotary
from kvtide.engines.transformers import contexts
from kvtide.engines.transformers.contexts import FAMILIES, UNROTATED_FAMILIES
from kvtide.errors import CorruptPayload, UnsupportedModel


def rotary_of(config: Any, layers: Sequence[int] = ()) -> Rotary:
    found = contexts.rotary_of(random_model(config), layers)
    assert found is not None
    return found


def named(config: Any) -> Any:
    """A model of which nothing but its config is there."""
    return SimpleNamespace(config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_keys_of_each_family_are_taken_back(family: str) -> None:
    config = config_of(family)
    rotary = rotary_of(config)
    for layer, (rotated, at_zero) in enumerate(cached_keys(config)):
        found = turned(rotated, rotary, rotary.inverse_tables(0, len(rotated), layer))
        assert np.abs(found * rotary.frequencies(layer).scale - at_zero).max() < 3e-6
        is_still = not any(rotary.frequencies(layer).values)
        assert (np.abs(rotated - at_zero).max() < 1e-6) == is_still


UNROTATED = [AutoConfig.for_model(family) for family in sorted(UNROTATED_FAMILIES)]
UNROTATED += [config_of("granitemoehybrid", position_embedding_type=None), config_of("falcon", alibi=True)]


@pytest.mark.parametrize("config", UNROTATED, ids=lambda config: config.model_type)
def test_models_without_rope_leave_the_step_out(config: Any) -> None:
    assert contexts.rotary_of(named(config)) is None


def test_layers_of_a_group_turn_by_their_own_heads_and_speeds() -> None:
    config = config_of("gemma4_text", global_head_dim=64)
    with pytest.raises(ValueError, match="different numbers of dims"):
        rotary_of(config)
    window, full = (rotary_of(config, [layer]) for layer in (0, 1))
    assert (window.dim_stop, full.dim_stop) == (32, 64)
    assert np.count_nonzero(full.frequencies(0).values) == 8 and all(window.frequencies(0).values)
    assert not any(rotary_of(config_of("llama4_text"), [1]).frequencies(0).values)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(32)],
        "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 512,
    },
}
YARN_MORE = [
    {"mscale": 1.0, "mscale_all_dim": 0.8},
    {"attention_factor": 1.3},
    {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in SCALINGS] + [("yarn", more) for more in YARN_MORE]


@pytest.mark.parametrize(("rope_type", "more"), CASES)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_those_of_the_reference(rope_type: str, more: dict[str, Any], theta: float) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": theta, **SCALINGS[rope_type], **more}
    config = config_of("llama", head_dim=64, max_position_embeddings=2048, rope_parameters=parameters)
    rotary = rotary_of(config)
    if rope_type == "default":
        values, scale = theta ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        values, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    assert np.allclose(rotary.kinds[0].values, values.numpy(), rtol=3e-6, atol=0)
    assert math.isclose(rotary.kinds[0].scale, scale, rel_tol=1e-6)


def test_what_is_not_known_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="not known how models of type 'qwen2_vl_text' rotate"):
        contexts.rotary_of(named(AutoConfig.for_model("qwen2_vl")))


def test_tables_of_part_of_the_positions_are_part_of_the_tables() -> None:
    rotary = rotary_of(config_of("llama"))
    whole, part = rotary.tables(0, 64), rotary.tables(48, 16)
    assert np.array_equal(whole.cos[48:], part.cos) and np.array_equal(whole.sin[48:], part.sin)
    assert part.cos.dtype == np.float32 and part.cos.shape == (16, 8)
    with pytest.raises(ValueError, match="layer must be"):
        rotary_of(config_of("gemma3_text")).tables(0, 1, layer=2)


@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(KVDtype),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 5)),
    dim_start=st.integers(0, 3),
    pairs=st.sampled_from(Pairs),
    pair_count=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_native_kernel_is_its_twin(
    seed: int, dtype: KVDtype, shape: tuple[int, int, int], dim_start: int, pairs: Pairs, pair_count: int
) -> None:
    tokens, heads, behind = shape
    rng = np.random.default_rng(seed)
    frequencies = Frequencies(tuple(rng.random(pair_count)), 1.25, 0)
    rotary = Rotary(pairs, dim_start, dim_start + 2 * pair_count, (frequencies,))
    shape = (tokens, heads, rotary.dim_stop + behind)
    spread = rng.choice([1e-6, 1.0, 1e4])
    bits = as_bits((rng.normal(size=shape) * spread).astype(np.float32), dtype)
    back, forth = rotary.inverse_tables(seed % 5000, tokens), rotary.tables(seed % 5000, tokens)
    loaded = rotary.load(bits, dtype, back)
    assert np.array_equal(loaded, turned(values_of(bits, dtype), rotary, back))
    out = as_bits(turned(loaded, rotary, forth), dtype)
    ulp = {KVDtype.FLOAT32: 1e-6, KVDtype.FLOAT16: 1e-3, KVDtype.BFLOAT16: 8e-3}[dtype]
    assert np.allclose(values_of(out, dtype), values_of(bits, dtype), rtol=ulp, atol=2e-6 * spread)


def test_every_float16_is_loaded_as_numpy_loads_it() -> None:
    """Also infinities and NaN, which no dims turn."""
    rotary = Rotary(Pairs.HALVES, 0, 2, (Frequencies((0.0,), 1.0, 0),))
    bits = np.zeros((1, 1, 2 + 65536), dtype=np.uint16)
    bits[0, 0, 2:] = np.arange(65536)
    loaded = rotary.load(bits, KVDtype.FLOAT16, rotary.tables(0, 1))
    assert np.array_equal(loaded, bits.view(np.float16).astype(np.float32), equal_nan=True)


def test_keys_of_another_shape_are_value_errors() -> None:
    rotary = rotary_of(config_of("llama"))
    tables, bits = rotary.tables(0, 4), np.zeros((4, 2, 16), np.uint32)
    for array in (bits[:, :, :14], np.zeros((4, 2, 8), np.uint32)):
        with pytest.raises(ValueError, match="in the head"):
            rotary.load(array, KVDtype.FLOAT32, tables)
    for array, dtype in ((bits[:3], KVDtype.FLOAT32), (bits, KVDtype.BFLOAT16)):
        with pytest.raises(ValueError, match=r"token|same elements"):
            rotary.load(array, dtype, tables)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2", "phi"])
def test_bytes_round_trip_and_every_cut_is_refused(family: str) -> None:
    rotary = rotary_of(config_of(family))
    data = rotary.to_bytes()
    assert Rotary.parse(data) == rotary
    for stop in range(len(data)):
        with pytest.raises(CorruptPayload):
            Rotary.parse(data[:stop])


@given(data=st.binary(max_size=80), version=st.sampled_from([1, 2]))
@settings(max_examples=300, deadline=None)
def test_foreign_bytes_are_refused_or_whole(data: bytes, version: int) -> None:
    foreign = bytes([version]) + data
    with contextlib.suppress(CorruptPayload):
        assert Rotary.parse(foreign).to_bytes() == foreign


@pytest.mark.parametrize(
    "arguments",
    [
        {"dim_stop": 0},
        {"dim_stop": 3},
        {"dim_start": -2},
        {"kinds": ()},
        {"kinds": (Frequencies((1.0,), 1.0, 0),)},
        {"kinds": (Frequencies((1.0, math.inf), 1.0, 0),)},
        {"kinds": (Frequencies((1.0, 1.0), 0.0, 0),)},
        {"layer_kinds": (1,)},
    ],
)
def test_parts_that_do_not_fit_are_value_errors(arguments: dict[str, Any]) -> None:
    fitting = {"pairs": Pairs.HALVES, "dim_start": 0, "dim_stop": 4, "kinds": (Frequencies((1.0, 0.1), 1.0, 0),)}
    with pytest.raises(ValueError, match=r"expected|must be|may be"):
        Rotary(**{**fitting, **arguments})
