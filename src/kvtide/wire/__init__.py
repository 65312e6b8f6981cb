"""Formats of what is stored and sent, without I/O."""

from kvtide.wire.object import (
    HEADER_AND_TABLE_BYTES_MAX,
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    StoredObject,
    codec_field,
    embedded_namespace,
    header_and_table_bytes,
    object_bytes,
    object_bytes_max,
    pack_object,
    parse_header,
    parse_object,
    version_tag,
)

__all__ = [
    "HEADER_AND_TABLE_BYTES_MAX",
    "HEADER_BYTES",
    "OBJECT_BYTES_MAX",
    "StoredObject",
    "codec_field",
    "embedded_namespace",
    "header_and_table_bytes",
    "object_bytes",
    "object_bytes_max",
    "pack_object",
    "parse_header",
    "parse_object",
    "version_tag",
]
