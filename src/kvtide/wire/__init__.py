"""Formats of what is stored and sent, without I/O."""

from kvtide.wire.frame import FRAME_HEADER_BYTES, Frame, frame_header, pack_frame, parse_frame, parse_frame_header
from kvtide.wire.object import (
    HEADER_AND_TABLE_BYTES_MAX,
    HEADER_BYTES,
    NO_LABEL,
    OBJECT_BYTES_MAX,
    ObjectLabel,
    SectionEntry,
    StoredObject,
    header_and_table_bytes,
    object_bytes_max,
    object_label,
    pack_object,
    parse_header,
    parse_object,
)

__all__ = [
    "FRAME_HEADER_BYTES",
    "HEADER_AND_TABLE_BYTES_MAX",
    "HEADER_BYTES",
    "NO_LABEL",
    "OBJECT_BYTES_MAX",
    "Frame",
    "ObjectLabel",
    "SectionEntry",
    "StoredObject",
    "frame_header",
    "header_and_table_bytes",
    "object_bytes_max",
    "object_label",
    "pack_frame",
    "pack_object",
    "parse_frame",
    "parse_frame_header",
    "parse_header",
    "parse_object",
]
