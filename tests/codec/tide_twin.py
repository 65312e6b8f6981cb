"""The kernels of tide again in numpy: slow, readable, and the truth that the native ones are tested against."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import KVDtype
from kvtide.codec.rotary import Pairs, Rotary, RotaryTables

Floats = NDArray[np.float32]
Pulls = NDArray[np.int8]
Shorts = NDArray[np.int16]
Words = NDArray[np.uint16]
PARTS = 4
TOP, DIGIT, CONTEXT = 0, 1, 2


def _walk(values: Shorts, which: NDArray[np.uint32], tables: Words) -> Any:
    """Yield (row, token, table) in coded order."""
    tokens = values.shape[1]
    for i, row in enumerate(which):
        for part in range(PARTS):
            for token in range(part * tokens // PARTS, (part + 1) * tokens // PARTS):
                yield int(row), token, int(tables[i, part])


def put(values: Shorts, which: NDArray[np.uint32], tables: Words, mode: int, parents: Shorts) -> dict[int, list[int]]:
    lists: dict[int, list[int]] = {}
    for row, token, table in _walk(values, which, tables):
        value, parent = int(values[row, token]), int(parents[row, token])
        item = value if mode == TOP else value - 3 * parent
        if mode == CONTEXT:
            item = -item if parent < 0 else item
        asked = min(abs(parent), 2) if mode == CONTEXT else 0
        lists.setdefault(table + asked, []).append(item)
    return lists


def project(values: Floats, mean: Floats, scale: Floats, matrix: Shorts) -> Shorts:
    """Return coefficients in steps, (components, tokens), of values (streams, tokens, channels) that are not loud."""
    streams, tokens, channels = values.shape
    by_token = values.transpose(1, 0, 2).reshape(tokens, streams * channels)
    whole = np.rint((by_token - mean) * scale).astype(np.int64)
    sums = whole @ matrix.astype(np.int64).T
    return ((sums + (1 << 16)) >> 17).T.astype(np.int16)


def seen(values: Floats, mean: Floats, scale: Floats, matrix: Shorts) -> tuple[tuple[float, float, float], float]:
    """Return squared error, variance of coefficients and tokens as `project` finds them, and the energy in all."""
    streams, tokens, channels = values.shape
    by_token = (values.transpose(1, 0, 2).reshape(tokens, streams * channels) - mean) * scale
    exact = np.rint(by_token) @ matrix.astype(np.float64).T / (1 << 17)
    steps = project(values, mean, scale, matrix).T.astype(np.float64)
    energy = float(((by_token / 16) ** 2).sum())
    halves = values.shape[0] * channels * tokens / 256 / 12
    error = energy + halves - float((2 * exact * steps - steps**2).sum())
    return (error, float(steps.var(axis=0).sum() * tokens), float(tokens)), energy


def restore(
    coefficients: Shorts, classes: Words, pulls: Pulls, places: Words, mean: Floats, scale: Floats, matrix: Shorts
) -> Floats:
    """Return values, (tokens, values)."""
    rows, tokens = coefficients.shape
    part = np.repeat(np.arange(PARTS), np.diff(np.arange(PARTS + 1) * tokens // PARTS))
    magnitude = np.abs(coefficients.astype(np.int64))
    # Without pulls coefficients are half steps.
    pulled = pulls[classes[:, part], np.minimum(magnitude, 3)] * np.sign(coefficients) if len(pulls) else 0
    sums = ((16 if len(pulls) else 8) * coefficients.astype(np.int64) - pulled).T @ matrix[:rows].astype(np.int64)
    out = np.empty((tokens, matrix.shape[1]), dtype=np.float32)
    out[places] = sums.astype(np.float32) * scale + mean
    return out


class Stages(NamedTuple):
    """A transform in two stages: (blocks, components, values); (mixed, mixed); what is mixed; the place of each row."""

    matrices: Shorts
    mix: Shorts
    mixed: Words
    places: Words


def project_stages(values: Floats, mean: Floats, scale: Floats, stages: Stages) -> Shorts:
    streams, tokens, channels = values.shape
    by_token = values.transpose(1, 0, 2).reshape(tokens, streams * channels)
    whole = np.rint((by_token - mean) * scale).astype(np.int64)
    blocks = whole.reshape(tokens, len(stages.matrices), -1)
    sums = np.einsum("tbv,bcv->tbc", blocks, stages.matrices.astype(np.int64)).reshape(tokens, -1)
    strongest = (sums[:, stages.mixed] + (1 << 12)) >> 13
    both = np.hstack([sums, strongest @ stages.mix.astype(np.int64).T])
    return ((both[:, stages.places] + (1 << 16)) >> 17).T.astype(np.int16)


def restore_stages(
    coefficients: Shorts, classes: Words, pulls: Pulls, places: Words, mean: Floats, scale: Floats, stages: Stages
) -> Floats:
    tokens, count = coefficients.shape[1], len(mean)
    unit = np.eye(len(coefficients), dtype=np.int16)
    plain, one = np.zeros(len(unit), dtype=np.float32), np.ones(len(unit), dtype=np.float32)
    pulled = restore(coefficients, classes, pulls, np.arange(tokens, dtype=np.uint16), plain, one, unit)
    both = np.zeros((tokens, count + len(stages.mix)), dtype=np.int64)
    both[:, stages.places] = pulled.astype(np.int64)
    both[:, stages.mixed] = (both[:, count:] @ stages.mix.astype(np.int64) + (1 << 12)) >> 13
    blocks = both[:, :count].reshape(tokens, len(stages.matrices), -1)
    sums = np.einsum("tbc,bcv->tbv", blocks, stages.matrices.astype(np.int64)).reshape(tokens, -1)
    out = np.empty((tokens, count), dtype=np.float32)
    out[places] = sums.astype(np.float32) * scale + mean
    return out


# The state after an even and after an odd level; a state's quantiser is its lowest bit.
NEXT = ((0, 1), (3, 2), (5, 4), (6, 7), (1, 0), (2, 3), (4, 5), (7, 6))


def find_path(exact: Shorts, classes: Words, rates: Shorts) -> Shorts:
    """Return the levels of the cheapest path of each token, one token after the other. exact: 16ths of a step."""
    rows, tokens = exact.shape
    levels = np.zeros_like(exact)
    for part in range(PARTS):
        for token in range(part * tokens // PARTS, (part + 1) * tokens // PARTS):
            costs, ways = {0: 0}, []
            for row in range(rows):
                magnitude, known = abs(int(exact[row, token])), int(classes[row, part])
                after: dict[int, tuple[int, int, int]] = {}
                # Of equals the way from the lower state counts, and of levels the higher one.
                for state in sorted(costs):
                    for parity in (0, 1):
                        cost, level = _cheapest(magnitude, state % 2, parity, rates[known])
                        found, to = costs[state] + cost, NEXT[state][parity]
                        if to not in after or found < after[to][0]:
                            after[to] = (found, state, level)
                ways.append(after)
                costs = {state: way[0] for state, way in after.items()}
            state = min(costs, key=lambda each: (costs[each], each))
            for row in range(rows - 1, -1, -1):
                _, before, level = ways[row][state]
                levels[row, token] = -level if exact[row, token] < 0 else level
                state = before
    return levels


def _cheapest(magnitude: int, quantiser: int, parity: int, rates: Shorts) -> tuple[int, int]:
    near = 2 * ((magnitude + 8 * quantiser - 16 * parity + 16) // 32) + parity
    found = []
    for level in (near, max(near - 2, parity)):
        off = magnitude - (16 * level - 8 * quantiser if level else 0)
        found.append((off * off + int(rates[16 * quantiser + min(level, 15)]), level))
    return found[1] if found[1][0] < found[0][0] else found[0]


def walk(levels: Shorts) -> NDArray[np.int64]:
    """Return the quantiser of each level: (rows, tokens)."""
    found = np.zeros(levels.shape, dtype=np.int64)
    for token in range(levels.shape[1]):
        state = 0
        for row in range(len(levels)):
            found[row, token] = state % 2
            state = NEXT[state][int(levels[row, token]) & 1]
    return found


def put_states(
    levels: Shorts, parents: Shorts, modes: NDArray[np.uint8], tables: Words, twins: tuple[int, int]
) -> dict[int, list[int]]:
    lists: dict[int, list[int]] = {}
    quantisers = walk(levels)
    for row, token, table in _walk(levels, np.arange(len(levels), dtype=np.uint32), tables):
        level, parent, quantiser = int(levels[row, token]), int(parents[row, token]), int(quantisers[row, token])
        if modes[row] == TOP:
            lists.setdefault(table + quantiser * twins[0], []).append(level)
        elif modes[row] == CONTEXT:
            digit = (level - 3 * parent) * (-1 if parent < 0 else 1)
            lists.setdefault(table + min(abs(parent), 2) + quantiser * twins[1], []).append(digit)
    return lists


def half_steps(levels: Shorts) -> Shorts:
    """Return what levels along a path stand for, in half steps."""
    return (2 * levels.astype(np.int64) - walk(levels) * np.sign(levels)).astype(np.int16)


def turned(keys: Floats, rotary: Rotary, tables: RotaryTables) -> Floats:
    """The twin: each pair (a, b) of the rotated dims becomes (a cos - b sin, b cos + a sin)."""
    out = keys.copy()
    dims = out[..., rotary.dim_start : rotary.dim_stop]
    step = 2 if rotary.pairs is Pairs.NEIGHBOURS else 1
    first = dims[..., ::2] if step == 2 else dims[..., : rotary.pair_count]
    second = dims[..., 1::2] if step == 2 else dims[..., rotary.pair_count :]
    a, b = first.copy(), second.copy()
    cos, sin = tables.cos[:, None], tables.sin[:, None]
    first[:], second[:] = a * cos - b * sin, b * cos + a * sin
    return out


def as_bits(values: Floats, dtype: KVDtype) -> Any:
    """Patterns of values, rounded to nearest even."""
    if dtype is KVDtype.BFLOAT16:
        wide = values.view(np.uint32)
        return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return values.view(np.uint32) if dtype is KVDtype.FLOAT32 else values.astype(np.float16).view(np.uint16)
