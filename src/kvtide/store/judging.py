"""What the judge of this machine knows, kept beside the objects as one of them."""

from __future__ import annotations

import hashlib
import platform

import msgspec

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.plan import JudgeRecord
from kvtide.tier import Tier
from kvtide.types import BlockKey, Namespace, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import object_bytes_max, pack_object, parse_object

CODEC_ID = "judge-1"
# Room for every codec that is remembered.
_LAYOUT = BlockLayout(1, 1, 1, 1024, KVDtype.FLOAT32)


def _meta() -> BlockMeta:
    namespace = Namespace(hashlib.sha256(b"kvtide judge").digest())
    key = BlockKey(hashlib.sha256(namespace + platform.node().encode()).digest())
    return BlockMeta(ObjectId(namespace, key), BlockKey(namespace), 0, _LAYOUT)


def read_judge(tier: Tier) -> JudgeRecord | None:
    """Return what this machine wrote last, None if there is nothing. CorruptPayload or ValueError for what is none."""
    meta, buffer = _meta(), bytearray(object_bytes_max(_LAYOUT))
    size = tier.get_into(meta.id, memoryview(buffer))
    if not size:
        return None
    stored = parse_object(bytes(buffer[:size]), meta.id)
    return msgspec.json.decode(stored.sections()[0].data, type=JudgeRecord) if stored.codec_id == CODEC_ID else None


def write_judge(tier: Tier, record: JudgeRecord) -> bool:
    """Put a record in the place of the last one. False if the tier did not take it."""
    meta, data = _meta(), msgspec.json.encode(record)
    tier.delete(meta.id, "renewed")
    return tier.put_from(meta.id, pack_object(meta, CODEC_ID, [Section(SectionId(SectionKind.DATA, 0, 0, 1), data)]))
