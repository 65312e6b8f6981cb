"""Sealed stores: objects encrypted before they reach a tier (docs/format.md, "Sealed objects")."""

from kvtide.clock import Clock
from kvtide.tier.base import Tier
from kvtide.tier.seal.keys import SEALED_CODEC, Keyring, sealing_key_id, split_seal

__all__ = ["SEALED_CODEC", "Keyring", "sealed", "sealing_key_id", "split_seal"]


def sealed(tier: Tier, source: str, clock: Clock) -> Tier:
    """Return a tier encrypted by a source's keys. ValueError as `Keyring`; ModuleNotFoundError without the extra."""
    from kvtide.tier.seal.tier import SealedTier

    return SealedTier(tier, Keyring(source, clock))
