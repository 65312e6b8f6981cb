"""Several tiers as one, fastest first. `invalidation` is imported where there are servers to follow."""

from kvtide.tier.stack.tier import TierStack, wants_latest

__all__ = ["TierStack", "wants_latest"]
