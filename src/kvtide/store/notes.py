"""Notes: small values of a store's users, each kept beside the blocks as an object that no prompt can name."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.plan import JudgeRecord
from kvtide.tier import Tier
from kvtide.types import BlockKey, Namespace, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import object_bytes_max, pack_object, parse_object

# Codec ids, and what listings call them.
JUDGE_CODEC, USES_CODEC = "judge-1", "uses-1"
PROFILE_CODEC, VERSION_CODEC = "profile-1", "profile-of-1"
NOTES: Mapping[str, str] = MappingProxyType(
    {
        JUDGE_CODEC: "what a machine's judge knows",
        USES_CODEC: "uses of a block",
        PROFILE_CODEC: "a piece of a profile",
        VERSION_CODEC: "a model's profile",
    }
)
_ROW_BYTES = 8192


def _layout(size: int) -> BlockLayout:
    """Return the smallest layout whose block has room for so many bytes."""
    return BlockLayout(1, max(1, -(-size // _ROW_BYTES)), 1, _ROW_BYTES // 8, KVDtype.FLOAT32)


def read_note(tier: Tier, object_id: ObjectId, codec_id: str, bytes_max: int) -> bytes | None:
    """Return a value of at most `bytes_max` bytes, None if there is nothing or something else.

    CorruptPayload for what is no object.
    """
    buffer = memoryview(bytearray(object_bytes_max(_layout(bytes_max))))
    size = tier.get_into(object_id, buffer)
    if not size:
        return None
    stored = parse_object(buffer[:size], object_id)
    return bytes(stored.sections()[0].data) if stored.codec_id == codec_id else None


def write_note(tier: Tier, object_id: ObjectId, codec_id: str, data: bytes) -> bool:
    """Put a value in the place of the last one. False if the tier did not take it."""
    # Its own parent: an index that is rebuilt passes it over.
    meta = BlockMeta(object_id, BlockKey(object_id.key), 0, _layout(len(data)))
    tier.delete(object_id, "renewed")
    return tier.put_from(object_id, pack_object(meta, codec_id, [Section(SectionId(SectionKind.DATA, 0, 0, 1), data)]))


# Room for every codec that is remembered.
RECORD_BYTES_MAX = 8192


def _judge_id() -> ObjectId:
    namespace = Namespace(hashlib.sha256(b"kvtide judge").digest())
    return ObjectId(namespace, BlockKey(hashlib.sha256(namespace + platform.node().encode()).digest()))


def read_judge(tier: Tier) -> JudgeRecord | None:
    """Return what this machine wrote last, None if there is nothing. CorruptPayload or ValueError for what is none."""
    data = read_note(tier, _judge_id(), JUDGE_CODEC, RECORD_BYTES_MAX)
    return msgspec.json.decode(data, type=JudgeRecord) if data is not None else None


def write_judge(tier: Tier, record: JudgeRecord) -> bool:
    """Put a record in the place of the last one. False if the tier did not take it."""
    return write_note(tier, _judge_id(), JUDGE_CODEC, msgspec.json.encode(record))
