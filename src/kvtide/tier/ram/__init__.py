"""Objects in memory: this machine's, or a device's that an engine hands in."""

from kvtide.tier.ram.memory import DeviceMemory, DevicePiece, DeviceTier, MemoryTier

__all__ = ["DeviceMemory", "DevicePiece", "DeviceTier", "MemoryTier"]
