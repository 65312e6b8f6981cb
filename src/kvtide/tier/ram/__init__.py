"""Objects in memory, in frames."""

from kvtide.tier.ram.memory import FramedTier, Frames, MemoryTier, Resident

__all__ = ["FramedTier", "Frames", "MemoryTier", "Resident"]
