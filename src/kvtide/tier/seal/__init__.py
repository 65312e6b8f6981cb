"""Sealed stores: objects encrypted before they reach a tier (docs/format.md, "Sealed objects")."""

from kvtide.tier.seal.keys import Keyring
from kvtide.tier.seal.tier import SEALED_CODEC, SealedTier, sealing_key_id

__all__ = ["SEALED_CODEC", "Keyring", "SealedTier", "sealing_key_id"]
