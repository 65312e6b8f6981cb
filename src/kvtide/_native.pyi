from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def lossless_encode(path: str, layer: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]: ...
def lossless_decode(path: str, section: NDArray[np.uint8], dtype: str, layer: NDArray[np.uint8]) -> str: ...
def delta_energy(values: NDArray[np.uint8], element_type: int, tokens: int, channels: int, group: int) -> float: ...
def quantise_groups(
    values: NDArray[np.uint8],
    element_type: int,
    group: int,
    half: int,
    step: float,
    anchors: NDArray[np.int16],
    scales: NDArray[np.uint16],
    deltas: NDArray[np.int16],
) -> bool: ...
def restore_groups(
    anchors: NDArray[np.int16],
    scales: NDArray[np.uint16],
    deltas: NDArray[np.int16],
    group: int,
    half: int,
    step: float,
    element_type: int,
    values: NDArray[np.uint8],
) -> None: ...
def rope_load(
    keys: NDArray[np.uint8],
    element_type: int,
    dim_start: int,
    neighbours: bool,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None: ...
def count_bytes(
    values: NDArray[np.uint8], run_symbols: int, run_tables: NDArray[np.uint16], counts: NDArray[np.uint64]
) -> None: ...
def rans_paths() -> list[str]: ...
def rans_quantise(counts: NDArray[np.uint64], frequencies: NDArray[np.uint16]) -> None: ...
def rans_write_tables(frequencies: NDArray[np.uint16]) -> NDArray[np.uint8]: ...
def rans_read_tables(data: NDArray[np.uint8], frequencies: NDArray[np.uint16]) -> bool: ...
def prefix_lengths(counts: NDArray[np.uint64], lengths: NDArray[np.uint8]) -> None: ...
def prefix_write_tables(lengths: NDArray[np.uint8]) -> NDArray[np.uint8]: ...
def prefix_read_tables(data: NDArray[np.uint8], lengths: NDArray[np.uint8]) -> bool: ...

# Cosines and sines of (kinds, tokens, pairs), the kind of each layer, the first dim that turns, pairs are neighbours.
_Stage = tuple[NDArray[np.int16], int, NDArray[np.uint16], NDArray[np.uint16]]
_Turns = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8], int, bool]

def tide_paths() -> list[str]: ...

TIDE_SLACK: int

def tide_count(
    path: str,
    values: NDArray[np.int16],
    which: NDArray[np.uint32],
    tables: NDArray[np.uint16],
    mode: int,
    counts: NDArray[np.int64],
) -> None: ...
def tide_take(
    path: str,
    values: NDArray[np.int16],
    which: NDArray[np.uint32],
    tables: NDArray[np.uint16],
    mode: int,
    items: NDArray[np.int16],
    cursors: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> bool: ...
def tide_put(
    path: str,
    values: NDArray[np.int16],
    which: NDArray[np.uint32],
    tables: NDArray[np.uint16],
    mode: int,
    parents: NDArray[np.int16],
    items: NDArray[np.int16],
    cursors: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> bool: ...
def tide_count_states(
    path: str,
    values: NDArray[np.int16],
    parents: NDArray[np.int16],
    modes: NDArray[np.uint8],
    tables: NDArray[np.uint16],
    twins: tuple[int, int],
    counts: NDArray[np.int64],
) -> None: ...
def tide_take_states(
    path: str,
    values: NDArray[np.int16],
    modes: NDArray[np.uint8],
    tables: NDArray[np.uint16],
    twins: tuple[int, int],
    items: NDArray[np.int16],
    cursors: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> bool: ...
def tide_put_states(
    path: str,
    values: NDArray[np.int16],
    parents: NDArray[np.int16],
    modes: NDArray[np.uint8],
    tables: NDArray[np.uint16],
    twins: tuple[int, int],
    items: NDArray[np.int16],
    cursors: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> bool: ...
def tide_find_path(
    path: str,
    exact: NDArray[np.int16],
    classes: NDArray[np.uint16],
    rates: NDArray[np.int16],
    levels: NDArray[np.int16],
) -> None: ...
def tide_pack(matrix: NDArray[np.int16], panels: NDArray[np.int16]) -> None: ...
def tide_project(
    path: str,
    bits: NDArray[np.uint8],
    block: tuple[int, ...],
    type: int,
    turns: _Turns,
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    panels: NDArray[np.int16],
    shape: tuple[int, int],
    stage: _Stage,
    is_coded: NDArray[np.uint8],
    apart: NDArray[np.uint8],
    out: NDArray[np.int16],
    fraction_bits: int = 0,
) -> tuple[float, float, float] | None: ...
def tide_arrange(
    path: str, steps: NDArray[np.int16], places: NDArray[np.uint16], rows: NDArray[np.uint16], out: NDArray[np.int16]
) -> None: ...
def tide_restore(
    path: str,
    coefficients: NDArray[np.int16],
    classes: NDArray[np.uint16],
    pulls: NDArray[np.int8],
    places: NDArray[np.uint16],
    mean: NDArray[np.float32],
    scale: NDArray[np.float32],
    panels: NDArray[np.int16],
    shape: tuple[int, int],
    order: NDArray[np.uint16],
    stage: _Stage,
    apart: tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.int8]],
    turns: _Turns,
    bits: NDArray[np.uint8],
    block: tuple[int, ...],
    type: int,
) -> None: ...
def tide_loudness(
    path: str, steps: NDArray[np.int16], weights: NDArray[np.float32], loud: NDArray[np.float32]
) -> None: ...
def tide_squares(
    path: str, bits: NDArray[np.uint8], block: tuple[int, ...], type: int, out: NDArray[np.float32]
) -> None: ...
def tide_third(path: str, values: NDArray[np.int16], which: NDArray[np.uint32], out: NDArray[np.int16]) -> None: ...
def tide_symbols(path: str, items: NDArray[np.int16], tops: int, out: NDArray[np.uint8]) -> NDArray[np.int64]: ...

class _Tables:
    def encode(
        self, path: str, symbols: NDArray[np.uint8], run_symbols: int, run_tables: NDArray[np.uint16]
    ) -> tuple[NDArray[np.uint8], list[int]]: ...
    def decode(
        self,
        path: str,
        data: NDArray[np.uint8],
        sizes: NDArray[np.uint64],
        run_symbols: int,
        run_tables: NDArray[np.uint16],
        values: NDArray[np.uint8],
        has_escapes: bool,
        escapes: NDArray[np.uint8],
        escape_counts: NDArray[np.uint64],
        out: NDArray[np.uint8],
    ) -> bool: ...

class RansTables(_Tables):
    def __init__(self, frequencies: NDArray[np.uint16]) -> None: ...

class PrefixTables(_Tables):
    def __init__(self, lengths: NDArray[np.uint8]) -> None: ...

JOB_ENDED: int
JOB_STOPPED: int

class Mover:
    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def receive(self, socket: int, memory: memoryview, wake_bytes: int) -> tuple[int, int, int]: ...
    def send(self, socket: int, memory: Sequence[memoryview], slice_bytes: int) -> tuple[int, int, int]: ...
    def send_file(self, socket: int, file: int, offset: int, size: int, slice_bytes: int) -> tuple[int, int, int]: ...
    def take(self) -> list[tuple[int, int, int]]: ...
    def stop(self, id: int) -> tuple[int, int, int]: ...
    def progress(self, id: int) -> tuple[int, float]: ...
    def shorten(self, id: int, size: int) -> bool: ...
