"""Importance of tokens (IMPRESS, FAST '25): probes, guards, scores over uses, packing. Pure functions and state."""

from kvtide.importance.probe import (
    AllHeads,
    Floats,
    Guard,
    NeighboursAgree,
    ProbeFinding,
    ProbeQuestion,
    Selector,
    top_tokens,
)
from kvtide.importance.score import (
    CHUNK_TOKENS,
    RECORD_BYTES_MAX,
    WRITER_BYTES,
    Orders,
    UseRecord,
    WriterId,
    chunks_of,
    expected_gain,
    is_order,
    packing_orders,
    record_id,
    select_chunks,
)

__all__ = [
    "CHUNK_TOKENS",
    "RECORD_BYTES_MAX",
    "WRITER_BYTES",
    "AllHeads",
    "Floats",
    "Guard",
    "NeighboursAgree",
    "Orders",
    "ProbeFinding",
    "ProbeQuestion",
    "Selector",
    "UseRecord",
    "WriterId",
    "chunks_of",
    "expected_gain",
    "is_order",
    "packing_orders",
    "record_id",
    "select_chunks",
    "top_tokens",
]
