"""Formats of what is stored and sent, without I/O."""

from kvtide.wire.object import (
    HEADER_AND_TABLE_BYTES_MAX,
    NO_LABEL,
    OBJECT_BYTES_MAX,
    ObjectLabel,
    StoredObject,
    object_bytes_max,
    object_label,
    pack_object,
    parse_header,
    parse_object,
)

__all__ = [
    "HEADER_AND_TABLE_BYTES_MAX",
    "NO_LABEL",
    "OBJECT_BYTES_MAX",
    "ObjectLabel",
    "StoredObject",
    "object_bytes_max",
    "object_label",
    "pack_object",
    "parse_header",
    "parse_object",
]
