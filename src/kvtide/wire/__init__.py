"""Formats of what is stored and sent, without I/O."""

from kvtide.wire.object import (
    ENTRY_BYTES,
    HEADER_BYTES,
    ObjectLabel,
    SectionEntry,
    StoredObject,
    embedded_namespace,
    head_bytes,
    header_and_table_bytes,
    object_bytes,
    object_bytes_max,
    object_quality,
    pack_around,
    pack_object,
    parse_header,
    parse_object,
    version_tag,
)

__all__ = [
    "ENTRY_BYTES",
    "HEADER_BYTES",
    "ObjectLabel",
    "SectionEntry",
    "StoredObject",
    "embedded_namespace",
    "head_bytes",
    "header_and_table_bytes",
    "object_bytes",
    "object_bytes_max",
    "object_quality",
    "pack_around",
    "pack_object",
    "parse_header",
    "parse_object",
    "version_tag",
]
