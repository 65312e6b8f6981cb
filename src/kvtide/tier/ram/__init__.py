"""Objects in memory: the host's, or a device's that an engine hands in."""

from kvtide.tier.ram.device import DeviceMemory, DeviceTier, Piece
from kvtide.tier.ram.memory import MemoryTier

__all__ = ["DeviceMemory", "DeviceTier", "MemoryTier", "Piece"]
