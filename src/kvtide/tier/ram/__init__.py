"""Objects in memory: the host's; `device` has a device's that an engine hands in."""

from kvtide.tier.ram.memory import MemoryTier

__all__ = ["MemoryTier"]
