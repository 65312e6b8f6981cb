"""The state of a llama.cpp context as rows of tokens: taken apart, and put together again for a prefix of any length.

Invariant: nothing is read before the length is checked, and what is put together has the form of what llama.cpp wrote.

    whole context:  u32 length, architecture, one part for each of the model's caches
    one sequence:   u32 magic, i32 sequence, the same parts
    part:           u32 streams = 1, u32 cells, cells x (i32 position, u32 sequences = 1, i32 sequence),
                    u32 values transposed, u32 layers, keys of each layer, values of each layer
    keys:           i32 type, u64 row bytes, cells x row                        (values too, unless transposed)
    values:         i32 type, u32 element bytes, u32 row elements, elements x cells         (transposed)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload
from kvtide.tier.buffers import recycled_buffer

Rows = NDArray[Any]

# The format that is known: llama.cpp's number of it, and what is written before a sequence.
SEQUENCE_VERSION = 3
_SEQUENCE_MAGIC = 0xAF143CD8
_SEQUENCE_HEAD, _CELLS_HEAD, _LAYERS_HEAD = struct.Struct("<Ii"), struct.Struct("<II"), struct.Struct("<II")
_ROW_HEAD, _COLUMN_HEAD = struct.Struct("<iQ"), struct.Struct("<iII")
_CELL_BYTES = 12
# Bounds of what is believed before the bytes are there.
LAYERS_MAX, ROW_BYTES_MAX, NAME_BYTES_MAX = 4096, 1 << 24, 256
# Buffers come in multiples of this, so that the next state, which is a little longer, takes the same one.
ROOM_BYTES = 16 << 20


class Tensor(NamedTuple):
    """Keys or values of a layer. column_bytes: of an element, where tokens are columns; 0 where they are rows."""

    type_code: int
    row_bytes: int
    column_bytes: int

    @property
    def unit(self) -> np.dtype[Any]:
        """Return the unsigned type that rows are copied by."""
        return np.dtype(f"<u{self.column_bytes or (2 if self.row_bytes % 2 == 0 else 1)}")

    @property
    def head(self) -> bytes:
        """Return the bytes before its rows."""
        if self.column_bytes:
            return _COLUMN_HEAD.pack(self.type_code, self.column_bytes, self.row_bytes // self.column_bytes)
        return _ROW_HEAD.pack(self.type_code, self.row_bytes)

    def view(self, data: memoryview, cells: int) -> Rows:
        """Return its rows in a state: (cells, units)."""
        units = np.frombuffer(data, self.unit)
        return units.reshape(-1, cells).T if self.column_bytes else units.reshape(cells, -1)


class PartShape(NamedTuple):
    """One of the model's caches: (keys, values) of each of its layers."""

    is_transposed: bool
    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return them as a block has them: keys and values of the first layer, then of the next."""
        return tuple(tensor for layer in self.layers for tensor in layer)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all layers."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the places of `tensors` in the order of a state: all keys, then all values."""
        return (*range(0, 2 * len(self.layers), 2), *range(1, 2 * len(self.layers), 2))


class Part(NamedTuple):
    """Cells of one cache in a state: the position of each, and the rows of `shape.tensors`, each (cells, units)."""

    shape: PartShape
    positions: NDArray[np.int32]
    rows: tuple[Rows, ...]

    def cut(self, start: int, stop: int, out: NDArray[np.uint8], pairs: int = 0) -> bool:
        """Copy the rows of positions [start, stop) as a block has them. False if they are not all there.

        pairs: so many heads of keys have neighbours that belong together, and blocks have them in two halves.
        """
        cells = np.flatnonzero((self.positions >= start) & (self.positions < stop))
        if len(cells) != stop - start:
            return False
        cells = cells[np.argsort(self.positions[cells])]
        is_run = cells[-1] - cells[0] == len(cells) - 1 and bool((np.diff(cells) == 1).all())
        which: Any = slice(int(cells[0]), int(cells[-1]) + 1) if is_run else cells
        places = block_rows(self.shape.tensors, stop - start, out)
        for number, (rows, place) in enumerate(zip(self.rows, places, strict=True)):
            place[:] = halved(rows[which], pairs) if pairs and number % 2 == 0 else rows[which]
        return True


def block_rows(tensors: Sequence[Tensor], tokens: int, block: NDArray[np.uint8]) -> Iterator[Rows]:
    """Yield the rows of tensors, each (tokens, units), as far as the bytes of a block, or of its first layers, go."""
    start = 0
    for tensor in tensors:
        stop = start + tokens * tensor.row_bytes
        yield block[start:stop].view(tensor.unit).reshape(tokens, -1)
        if (start := stop) == len(block):
            return


def halved(keys: Rows, heads: int) -> Rows:
    """Return keys, (tokens, heads x channels), with the even channels of each head before the odd ones."""
    return keys.reshape(len(keys), heads, -1, 2).swapaxes(2, 3).reshape(len(keys), -1)


def paired(keys: Rows, heads: int) -> Rows:
    """Return keys as they were before `halved`."""
    return keys.reshape(len(keys), heads, 2, -1).swapaxes(2, 3).reshape(len(keys), -1)


class _Reader:
    """Takes fields of a state, the length of each checked first."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, size: int) -> memoryview:
        if size > len(self.left):
            raise CorruptPayload(f"a state ends {size - len(self.left)} bytes early")
        found, self.left = self.left[:size], self.left[size:]
        return found

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def tensor(self, cells: int, is_transposed: bool) -> tuple[Tensor, Rows]:
        """Take one tensor. CorruptPayload if it is none."""
        if is_transposed:
            code, column, elements = self.fields(_COLUMN_HEAD)
            tensor = Tensor(code, column * elements, column)
            is_good = column in (1, 2, 4)
        else:
            code, size = self.fields(_ROW_HEAD)
            tensor, is_good = Tensor(code, size, 0), True
        if not (is_good and 0 <= code < 256 and 0 < tensor.row_bytes <= ROW_BYTES_MAX):
            raise CorruptPayload(f"a state has rows of {tensor}, which llama.cpp does not write")
        return tensor, tensor.view(self.take(tensor.row_bytes * cells), cells)

    def part(self) -> Part | None:
        """Take one cache's cells; None for an empty one. CorruptPayload for a form that is not known."""
        streams, cells = self.fields(_CELLS_HEAD)
        if streams != 1:
            raise CorruptPayload(f"a state has {streams} streams of sequences, expected 1")
        if not cells:
            return None
        meta = np.frombuffer(self.take(_CELL_BYTES * cells), np.int32).reshape(cells, 3)
        if (meta[:, 1] != 1).any() or (meta[:, 2] != 0).any() or (meta[:, 0] < 0).any():
            raise CorruptPayload("cells of a state belong to other sequences than the first")
        is_transposed, layers = self.fields(_LAYERS_HEAD)
        if is_transposed > 1 or not 0 < layers <= LAYERS_MAX:
            raise CorruptPayload(f"a state has {layers} layers, values transposed {is_transposed}")
        keys = [self.tensor(cells, False) for _ in range(layers)]
        values = [self.tensor(cells, bool(is_transposed)) for _ in range(layers)]
        shape = PartShape(
            bool(is_transposed), tuple((key[0], value[0]) for key, value in zip(keys, values, strict=True))
        )
        rows = tuple(each[1] for layer in zip(keys, values, strict=True) for each in layer)
        return Part(shape, meta[:, 0], rows)


def parse_context(data: memoryview) -> list[Part | None]:
    """Return the caches in the state of a whole context. CorruptPayload if it has another form than the known one."""
    reader = _Reader(data)
    (size,) = reader.fields(struct.Struct("<I"))
    if size > NAME_BYTES_MAX:
        raise CorruptPayload(f"a state begins with a name of {size} bytes")
    reader.take(size)
    parts = [reader.part()]
    while len(reader.left):
        parts.append(reader.part())
    return parts


class StateBuilder:
    """The state of a sequence that is being put together: the cells of each cache, whose rows come in any order.

    cells: positions, in the order in which the cells are to be filled. Rows that nobody writes hold anything.
    """

    def __init__(self, shapes: Sequence[PartShape], cells: Sequence[NDArray[np.int32]]) -> None:
        sizes = [_part_bytes(shape, len(each)) for shape, each in zip(shapes, cells, strict=True)]
        size = _SEQUENCE_HEAD.size + sum(sizes)
        self.data = recycled_buffer(-(-size // ROOM_BYTES) * ROOM_BYTES)[:size]
        self.parts: list[Part] = []
        self._end = 0
        self._put(_SEQUENCE_HEAD.pack(_SEQUENCE_MAGIC, 0))
        for shape, positions in zip(shapes, cells, strict=True):
            self._put_part(shape, positions)
        assert self._end == size

    def _put(self, data: bytes | memoryview) -> None:
        self.data[self._end : self._end + len(data)] = data
        self._end += len(data)

    def _put_part(self, shape: PartShape, positions: NDArray[np.int32]) -> None:
        cells = len(positions)
        self._put(_CELLS_HEAD.pack(1, cells))
        if not cells:
            self.parts.append(Part(shape, positions, ()))
            return
        meta = np.zeros((cells, 3), np.int32)
        meta[:, 0], meta[:, 1] = positions, 1
        self._put(meta.tobytes())
        self._put(_LAYERS_HEAD.pack(shape.is_transposed, len(shape.layers)))
        tensors, rows = shape.tensors, dict[int, Rows]()
        for place in shape.stored:
            self._put(tensors[place].head)
            size = cells * tensors[place].row_bytes
            rows[place] = tensors[place].view(self.data[self._end : self._end + size], cells)
            self._end += size
        self.parts.append(Part(shape, positions, tuple(rows[place] for place in range(len(tensors)))))


def _part_bytes(shape: PartShape, cells: int) -> int:
    heads = _LAYERS_HEAD.size + sum(len(tensor.head) for tensor in shape.tensors)
    return _CELLS_HEAD.size + (heads + cells * (_CELL_BYTES + shape.token_bytes) if cells else 0)
