"""Rotary position embedding: keys turned back to before it, for every family of models that is known."""

from kvtide.codec.rotary.rotary import Rotary, RotaryTables
from kvtide.codec.rotary.scaling import Frequencies

__all__ = ["Frequencies", "Rotary", "RotaryTables"]
