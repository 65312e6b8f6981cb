"""Objects on Mooncake's distributed store."""

from kvtide.tier.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
