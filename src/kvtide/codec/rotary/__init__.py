"""Rotary position embedding: keys turned back to before it, for every family of models that is known."""

from kvtide.codec.rotary.families import Frequencies
from kvtide.codec.rotary.rotary import Rotary, RotaryTables

__all__ = ["Frequencies", "Rotary", "RotaryTables"]
