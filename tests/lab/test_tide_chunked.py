"""Refinements by chunks of tokens: with all of them the block of `tide-1`, with some each token at its own step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import LAYOUT, fitted

from kvtide import _native
from kvtide.block import BlockBits
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.model import TideModel
from kvtide.codec.tide.section import Floats, KeyRotation, StoredLayers
from kvtide.errors import CorruptPayload
from kvtide.testing import block_meta, smooth_bits
from kvtide_lab.judge.tide_chunked import ChunkedRange, ChunkedTide, decode_chunked, encode_chunked

PROFILE = fitted(LAYOUT)
MODEL, PATH = TideModel(PROFILE), _native.tide_paths()[0]
TIDE = TideCodec(PROFILE, 1e-3, 2).rounded()
META, BITS = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 77)
LAYERS = MODEL.section_layers
ORDER = np.random.default_rng(3).permutation(LAYOUT.tokens)
CHUNKS = [ORDER[start : start + 6] for start in range(0, LAYOUT.tokens, 6)]
STORED = StoredLayers(BITS[:LAYERS], LAYOUT.dtype, 0, KeyRotation(META, MODEL.rotary, is_back=True))
CODED = encode_chunked(MODEL, PATH, TIDE.steps, META, STORED, CHUNKS)


Runs = dict[int, list[bytes | memoryview]]


def decoded(runs: Runs, base: bytes | memoryview = CODED.base) -> BlockBits:
    out = np.empty_like(BITS[:LAYERS])
    target = StoredLayers(out, LAYOUT.dtype, 0, KeyRotation(META, MODEL.rotary, is_back=False))
    decode_chunked(MODEL, PATH, ChunkedRange(base, runs), CHUNKS, target)
    return out


def tide_at(refinements: int) -> Floats:
    sections = [each for each in TIDE.encode(META, BITS) if each.id.refinement <= refinements]
    out = np.empty_like(BITS)
    TIDE.decode(META, sections, out)
    return out[:LAYERS].view(np.float32)


@given(st.lists(st.integers(0, 2), min_size=len(CHUNKS), max_size=len(CHUNKS)))
@settings(max_examples=15, deadline=None)
def test_each_chunk_is_as_fine_as_what_is_here_of_it(refinements: list[int]) -> None:
    runs = {number: list(CODED.chunks[number][:count]) for number, count in enumerate(refinements)}
    found = decoded(runs).view(np.float32)
    for tokens, count in zip(CHUNKS, refinements, strict=True):
        # Pulls to zero go by loudness, which a chunk knows in the mean: a small part of a step.
        assert np.allclose(found[:, :, tokens], tide_at(count)[:, :, tokens], atol=np.ptp(BITS.view(np.float32)) / 50)


def test_finer_is_nearer() -> None:
    exact = BITS[:LAYERS].view(np.float32)
    errors = [
        float(
            np.square(
                decoded({n: list(run[:count]) for n, run in CODED.chunks.items()}).view(np.float32) - exact
            ).mean()
        )
        for count in range(3)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_sections_that_do_not_fit_are_refused() -> None:
    other = TideCodec(PROFILE, 1e-2, 1)
    foreign = encode_chunked(MODEL, PATH, other.rounded().steps, META, STORED, CHUNKS)
    run = list(CODED.chunks[0])
    refused: tuple[Runs, ...] = ({0: [*run, run[0]]}, {0: [foreign.chunks[0][0]]}, {0: [run[0][:-1]]}, {0: [b""]})
    for bad in refused:
        with pytest.raises(CorruptPayload):
            decoded(bad)


def test_a_whole_block_has_all_its_ranges_and_important_tokens_first() -> None:
    codec = ChunkedTide(PROFILE, 1e-3, 2, 6)
    scores = np.random.default_rng(0).random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32)
    ranges = codec.encode(META, BITS, scores)
    out = np.empty_like(BITS)
    codec.decode(META, ranges, out)
    assert np.allclose(out.view(np.float32)[:LAYERS], tide_at(2), atol=np.ptp(BITS.view(np.float32)) / 50)
    means = [
        scores[start:stop].mean(axis=0)[chunks[0]].mean()
        for (start, stop), (_, chunks) in zip(codec.ranges, ranges, strict=True)
    ]
    assert min(means) > scores.mean()
