"""The readable label of a sealed object: that it is one, and the id of the key that sealed it. Needs no key."""

from __future__ import annotations

from kvtide.tier.base import Tier
from kvtide.tier.seal.keys import KEY_ID_BYTES
from kvtide.types import ObjectId
from kvtide.wire import head_bytes, object_label

SEALED_CODEC = "sealed-1"
# Header and a table of one section; the pieces follow.
HEAD_BYTES = head_bytes(1)


def sealing_key_id(tier: Tier, object_id: ObjectId) -> bytes | None:
    """Return the id of the key that sealed what an unwrapped tier has there; None if that is absent or not sealed."""
    head = memoryview(bytearray(HEAD_BYTES + KEY_ID_BYTES))
    if tier.get_into(object_id, head) != len(head) or object_label(head).codec.rstrip(b"\0") != SEALED_CODEC.encode():
        return None
    return bytes(head[HEAD_BYTES:])
