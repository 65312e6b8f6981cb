"""Which tokens matter (IMPRESS, FAST '25): probes, guards, scores over uses, packing. Pure functions and state."""

from kvtide.importance.guard import Finding, Guard, HeadsAgree, NeighboursAgree
from kvtide.importance.probe import AllHeads, Ask, FirstHeads, GroupHeads, Known, Random, Recency, Selector, top_tokens
from kvtide.importance.reorder import CHUNK_TOKENS, Orders, expected_gain, is_order, packing_orders, select_chunks
from kvtide.importance.score import UseRecord, record_id

__all__ = [
    "CHUNK_TOKENS",
    "AllHeads",
    "Ask",
    "Finding",
    "FirstHeads",
    "GroupHeads",
    "Guard",
    "HeadsAgree",
    "Known",
    "NeighboursAgree",
    "Orders",
    "Random",
    "Recency",
    "Selector",
    "UseRecord",
    "expected_gain",
    "is_order",
    "packing_orders",
    "record_id",
    "select_chunks",
    "top_tokens",
]
