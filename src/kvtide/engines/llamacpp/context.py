"""A llama.cpp context by its C API: computed in, read, written, emptied. Not for two threads at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from kvtide.engines.llamacpp.state import ROOM_BYTES, Part, parse_context
from kvtide.errors import CorruptPayload
from kvtide.tier.buffers import recycled_buffer


class LlamaContext:
    """The context of a `llama_cpp.Llama`, whose tokens are counted there."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self.llm.ctx)

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Compute tokens behind those that are there."""
        self.llm.eval(list(tokens))

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self.llm.reset()

    def state_bytes(self) -> int:
        """Return the size of the state now."""
        return int(llama_cpp.llama_state_get_size(self.llm.ctx))

    def read(self) -> tuple[memoryview, list[Part | None]]:
        """Copy the state out; return it, and its parts, which are views of it. CorruptPayload for an unknown form."""
        size = self.state_bytes()
        data = recycled_buffer(-(-size // ROOM_BYTES) * ROOM_BYTES)[:size]
        count = int(llama_cpp.llama_state_get_data(self.llm.ctx, _pointer(data), size))
        if not 0 < count <= size:
            raise CorruptPayload(f"llama.cpp wrote {count} bytes of a state of {size}")
        return data[:count], parse_context(data[:count])

    def write(self, data: memoryview) -> bool:
        """Put a sequence's state in the place of all that is there. False if llama.cpp refuses it; then it is empty."""
        # Where a context is empty its cells are filled from the first one on.
        llama_cpp.llama_memory_clear(self._memory, False)
        is_taken = int(llama_cpp.llama_state_seq_set_data(self.llm.ctx, _pointer(data), len(data), 0)) == len(data)
        if not is_taken:
            self.clear()
        return is_taken

    def drop(self, position: int) -> None:
        """Empty the cells of one position."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, position, position + 1)


def _pointer(data: memoryview) -> Any:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)
