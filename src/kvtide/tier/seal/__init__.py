"""Sealed stores: objects encrypted before they reach a tier (docs/format.md, "Sealed objects")."""

from kvtide.tier.seal.keys import Keyring, sealed, split_seal
from kvtide.tier.seal.label import SEALED_CODEC, sealing_key_id

__all__ = ["SEALED_CODEC", "Keyring", "sealed", "sealing_key_id", "split_seal"]
