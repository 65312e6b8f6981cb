"""The kernels of tide again in numpy: slow, readable, and the truth that the native ones are tested against."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PARTS = 4
TOP, DIGIT, CONTEXT = 0, 1, 2


def _walk(values: NDArray[np.int16], which: NDArray[np.uint32], tables: NDArray[np.uint16]) -> Any:
    """Yield (row, token, table) in coded order."""
    tokens = values.shape[1]
    for i, row in enumerate(which):
        for part in range(PARTS):
            for token in range(part * tokens // PARTS, (part + 1) * tokens // PARTS):
                yield int(row), token, int(tables[i, part])


def put(
    values: NDArray[np.int16],
    which: NDArray[np.uint32],
    tables: NDArray[np.uint16],
    mode: int,
    parents: NDArray[np.int16],
) -> dict[int, list[int]]:
    """Return each table's list."""
    lists: dict[int, list[int]] = {}
    for row, token, table in _walk(values, which, tables):
        value, parent = int(values[row, token]), int(parents[row, token])
        item = value if mode == TOP else value - 3 * parent
        if mode == CONTEXT:
            item = -item if parent < 0 else item
        asked = min(abs(parent), 2) if mode == CONTEXT else 0
        lists.setdefault(table + asked, []).append(item)
    return lists


def project(
    values: NDArray[np.float32], mean: NDArray[np.float32], scale: NDArray[np.float32], matrix: NDArray[np.int16]
) -> NDArray[np.int16]:
    """Return coefficients in steps, (components, tokens), of values (streams, tokens, channels) that are not loud."""
    streams, tokens, channels = values.shape
    by_token = values.transpose(1, 0, 2).reshape(tokens, streams * channels)
    whole = np.rint((by_token - mean) * scale).astype(np.int64)
    sums = whole @ matrix.astype(np.int64).T
    return ((sums + (1 << 16)) >> 17).T.astype(np.int16)


def seen(
    values: NDArray[np.float32], mean: NDArray[np.float32], scale: NDArray[np.float32], matrix: NDArray[np.int16]
) -> tuple[tuple[float, float, float], float]:
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
    coefficients: NDArray[np.int16],
    classes: NDArray[np.uint16],
    pulls: NDArray[np.int8],
    places: NDArray[np.uint16],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    matrix: NDArray[np.int16],
) -> NDArray[np.float32]:
    """Return values, (tokens, values)."""
    rows, tokens = coefficients.shape
    part = np.repeat(np.arange(PARTS), np.diff(np.arange(PARTS + 1) * tokens // PARTS))
    magnitude = np.abs(coefficients.astype(np.int64))
    pulled = pulls[classes[:, part], np.minimum(magnitude, 3)] * np.sign(coefficients)
    sums = (16 * coefficients.astype(np.int64) - pulled).T @ matrix[:rows].astype(np.int64)
    out = np.empty((tokens, matrix.shape[1]), dtype=np.float32)
    out[places] = sums.astype(np.float32) * scale + mean
    return out


class Stages(NamedTuple):
    """A transform in two stages: (blocks, components, values); (mixed, mixed); what is mixed; the place of each row."""

    matrices: NDArray[np.int16]
    mix: NDArray[np.int16]
    mixed: NDArray[np.uint16]
    places: NDArray[np.uint16]


def project_stages(
    values: NDArray[np.float32], mean: NDArray[np.float32], scale: NDArray[np.float32], stages: Stages
) -> NDArray[np.int16]:
    """Return coefficients in steps, as `project`."""
    streams, tokens, channels = values.shape
    by_token = values.transpose(1, 0, 2).reshape(tokens, streams * channels)
    whole = np.rint((by_token - mean) * scale).astype(np.int64)
    blocks = whole.reshape(tokens, len(stages.matrices), -1)
    sums = np.einsum("tbv,bcv->tbc", blocks, stages.matrices.astype(np.int64)).reshape(tokens, -1)
    strongest = (sums[:, stages.mixed] + (1 << 12)) >> 13
    both = np.hstack([sums, strongest @ stages.mix.astype(np.int64).T])
    return ((both[:, stages.places] + (1 << 16)) >> 17).T.astype(np.int16)


def restore_stages(
    coefficients: NDArray[np.int16],
    classes: NDArray[np.uint16],
    pulls: NDArray[np.int8],
    places: NDArray[np.uint16],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    stages: Stages,
) -> NDArray[np.float32]:
    """Return values, (tokens, values)."""
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
