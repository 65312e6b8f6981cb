"""Entropy coders behind one interface: symbols below 32 to bytes and back, under static tables (docs/codec.md)."""

from kvtide.codec.entropy.base import ESCAPE, SYMBOLS, EntropyCoder, EntropyTables, Escapes, Runs, Streams, check_counts
from kvtide.codec.entropy.escape import EscapeMap, count_values
from kvtide.codec.entropy.rans import RansCoder, RansTables

__all__ = [
    "ESCAPE",
    "SYMBOLS",
    "EntropyCoder",
    "EntropyTables",
    "EscapeMap",
    "Escapes",
    "RansCoder",
    "RansTables",
    "Runs",
    "Streams",
    "check_counts",
    "count_values",
]
