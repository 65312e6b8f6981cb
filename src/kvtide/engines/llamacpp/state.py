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

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from kvtide.codec import ByteReader
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
_ROOM_BYTES = 16 << 20


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


# One of the model's caches: keys and values of its first layer, then of the next, as blocks have them.
PartShape = tuple[Tensor, ...]


class Part(NamedTuple):
    """Cells of one cache in a state: the position of each, and the rows of its tensors, each (cells, units)."""

    shape: PartShape
    positions: NDArray[np.int32]
    rows: tuple[Rows, ...]


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


def parse_context(data: memoryview) -> list[Part]:
    """Return the caches in the state of a whole context. CorruptPayload if it has another form than the known one."""
    reader = ByteReader(data)
    (size,) = _fields(reader, struct.Struct("<I"))
    if size > NAME_BYTES_MAX:
        raise CorruptPayload(f"a state begins with a name of {size} bytes")
    reader.take(size)
    parts = [_part(reader)]
    while reader.left:
        parts.append(_part(reader))
    return parts


def _fields(reader: ByteReader, form: struct.Struct) -> tuple[int, ...]:
    return form.unpack(reader.take(form.size))


def _part(reader: ByteReader) -> Part:
    """Take one cache's cells. CorruptPayload if there are none, or for a form that is not known."""
    streams, cells = _fields(reader, _CELLS_HEAD)
    if streams != 1 or not cells:
        raise CorruptPayload(f"a state has {cells} cells and {streams} streams of sequences, expected 1")
    meta = np.frombuffer(reader.take(_CELL_BYTES * cells), np.int32).reshape(cells, 3)
    if (meta[:, 1] != 1).any() or (meta[:, 2] != 0).any() or (meta[:, 0] < 0).any():
        raise CorruptPayload("cells of a state belong to other sequences than the first")
    is_transposed, layers = _fields(reader, _LAYERS_HEAD)
    if is_transposed > 1 or not 0 < layers <= LAYERS_MAX:
        raise CorruptPayload(f"a state has {layers} layers, values transposed {is_transposed}")
    keys = [_tensor(reader, cells, False) for _ in range(layers)]
    values = [_tensor(reader, cells, bool(is_transposed)) for _ in range(layers)]
    shape, rows = zip(*(each for layer in zip(keys, values, strict=True) for each in layer), strict=True)
    return Part(shape, meta[:, 0], rows)


def _tensor(reader: ByteReader, cells: int, is_transposed: bool) -> tuple[Tensor, Rows]:
    code, size, *elements = _fields(reader, _COLUMN_HEAD if is_transposed else _ROW_HEAD)
    tensor = Tensor(code, size * elements[0], size) if is_transposed else Tensor(code, size, 0)
    if not (tensor.column_bytes in (0, 1, 2, 4) and 0 <= code < 256 and 0 < tensor.row_bytes <= ROW_BYTES_MAX):
        raise CorruptPayload(f"a state has rows of {tensor}, which llama.cpp does not write")
    units = np.frombuffer(reader.take(tensor.row_bytes * cells), tensor.unit)
    return tensor, units.reshape(-1, cells).T if is_transposed else units.reshape(cells, -1)


def _state_room(size: int) -> memoryview:
    return recycled_buffer(-(-size // _ROOM_BYTES) * _ROOM_BYTES)[:size]


def build_state(shapes: Sequence[PartShape], cells: Sequence[NDArray[np.int32]]) -> tuple[memoryview, list[Part]]:
    """Return the state of a sequence whose rows are still to be written, and its parts, which are views of it.

    cells: of each cache the positions, in the order in which its cells are to be filled.
    """
    # What is before some rows, and the bytes of these.
    pieces = [(_SEQUENCE_HEAD.pack(_SEQUENCE_MAGIC, 0), 0)]
    for shape, positions in zip(shapes, cells, strict=True):
        meta = np.zeros((len(positions), 3), np.int32)
        meta[:, 0], meta[:, 1] = positions, 1
        layers = _LAYERS_HEAD.pack(shape[1].column_bytes > 0, len(shape) // 2)
        pieces.append((_CELLS_HEAD.pack(1, len(positions)) + meta.tobytes() + layers, 0))
        pieces += [(tensor.head, len(positions) * tensor.row_bytes) for tensor in (*shape[::2], *shape[1::2])]
    data, end = _state_room(sum(len(head) + size for head, size in pieces)), 0
    for head, size in pieces:
        data[end : end + len(head)] = head
        end += len(head) + size
    reader = ByteReader(data[_SEQUENCE_HEAD.size :])
    return data, [_part(reader) for _ in shapes]


class LlamaContext:
    """The context of a `llama_cpp.Llama`, whose tokens are counted there."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llm.ctx), True)
        self.llm.reset()

    def read(self) -> tuple[memoryview, list[Part]]:
        """Copy the state out; return it, and its parts, which are views of it. CorruptPayload for an unknown form."""
        size = int(llama_cpp.llama_state_get_size(self.llm.ctx))
        data = _state_room(size)
        count = int(llama_cpp.llama_state_get_data(self.llm.ctx, _pointer(data), size))
        if not 0 < count <= size:
            raise CorruptPayload(f"llama.cpp wrote {count} bytes of a state of {size}")
        return data[:count], parse_context(data[:count])

    def write(self, data: memoryview, gaps: Sequence[int] = ()) -> bool:
        """Put a sequence's state in the place of all that is there; False if llama.cpp refuses it, then nothing is.

        gaps: positions whose cells are emptied again: where one is, the next token goes.
        """
        # Where a context is empty its cells are filled from the first one on.
        memory = llama_cpp.llama_get_memory(self.llm.ctx)
        llama_cpp.llama_memory_clear(memory, False)
        is_taken = int(llama_cpp.llama_state_seq_set_data(self.llm.ctx, _pointer(data), len(data), 0)) == len(data)
        if not is_taken:
            self.clear()
        for position in gaps if is_taken else ():
            llama_cpp.llama_memory_seq_rm(memory, 0, position, position + 1)
        return is_taken


def _pointer(data: memoryview) -> Any:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)
