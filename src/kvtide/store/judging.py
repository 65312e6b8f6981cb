"""This machine's judge record, kept as a note."""

from __future__ import annotations

import hashlib
import platform

import msgspec

from kvtide.plan import JudgeRecord
from kvtide.store.notes import JUDGE_CODEC, read_note, write_note
from kvtide.tier import Tier
from kvtide.types import BlockKey, Namespace, ObjectId

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
