"""Objects on a disk: a log of segments."""

from kvtide.tier.disk.tier import DiskTier

__all__ = ["DiskTier"]
