"""Small named records that may change (docs/protocol.md): names, values, and the list of what changed.

Objects never change; these do, so each has a version, and the centre of several regions alone writes them.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvtide.errors import RequestRefused

__all__ = [
    "CHANGES_MAX",
    "RECORD_BYTES_MAX",
    "Record",
    "RecordKind",
    "RecordList",
    "RecordName",
    "RecordsRoute",
    "checked_value",
    "record_name",
    "record_target",
]

RECORD_BYTES_MAX = 1024
# Records in one answer; whoever wants more asks again from after the last one.
CHANGES_MAX = 256

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_GENERATION = re.compile(r"0|[1-9]\d{0,11}")


class RecordKind(StrEnum):
    """`generation` of a namespace, which only rises; `alias`, a name for a namespace; `profile`, free text."""

    GENERATION = "generation"
    ALIAS = "alias"
    PROFILE = "profile"


class RecordName(NamedTuple):
    """One record of the caller's tenant."""

    kind: RecordKind
    name: str


class RecordsRoute(NamedTuple):
    """The records whose versions are larger than `after`."""

    after: int


class Record(msgspec.Struct, frozen=True):
    """A record as it was written last. Versions rise over all records of a server; `tenant` is empty for one's own.

    One without a value was removed: it is told of for a while, and counts as absent.
    """

    tenant: str
    kind: RecordKind
    name: str
    value: str
    version: int

    @property
    def tag(self) -> str:
        """Return the ETag."""
        return f'"{self.version}"'


class RecordList(msgspec.Struct, frozen=True):
    """Records in the order of their versions; `is_whole` is false if there are more.

    `version` is the largest that the server has given. `epoch` is another after each start: only then may a server know
    less than it did.
    """

    records: list[Record]
    is_whole: bool
    version: int
    epoch: str


def record_name(kind: str, name: str) -> RecordName:
    """Return what a path names. RequestRefused (400) for an unknown kind or a name that such a record can't have."""
    if kind not in {*RecordKind}:
        raise RequestRefused(400, f"a record is one of {', '.join(RecordKind)}, got {kind[:80]!r}")
    if not (_NAMESPACE if kind == RecordKind.GENERATION else _NAME).fullmatch(name):
        raise RequestRefused(
            400, "a record's name is 1 to 64 letters, digits, dots, dashes; a generation's 64 hex digits"
        )
    return RecordName(RecordKind(kind), name)


def record_target(name: RecordName) -> str:
    """Return the path of a record."""
    return f"/v1/records/{name.kind}/{name.name}"


def checked_value(kind: RecordKind, body: bytes | bytearray) -> str:
    """Return a record's value from a request's body. RequestRefused (400) if such a record can't have it."""
    if len(body) > RECORD_BYTES_MAX:
        raise RequestRefused(413, f"a record may have {RECORD_BYTES_MAX} bytes, got {len(body)}")
    try:
        value = body.decode().strip()
    except UnicodeDecodeError as error:
        raise RequestRefused(400, "a record is UTF-8 text") from error
    form = {RecordKind.GENERATION: _GENERATION, RecordKind.ALIAS: _NAMESPACE}.get(kind)
    if not value or (form is not None and not form.fullmatch(value)):
        raise RequestRefused(400, f"a {kind} can't be {value[:80]!r}")
    return value
