"""Objects on Valkey."""

from kvtide.tier.valkey.tier import ValkeyTier

__all__ = ["ValkeyTier"]
