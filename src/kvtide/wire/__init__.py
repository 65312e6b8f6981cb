"""Formats of what is stored and sent, without I/O."""

from kvtide.wire.object import OBJECT_BYTES_MAX, StoredObject, object_bytes_max, pack_object, parse_object

__all__ = ["OBJECT_BYTES_MAX", "StoredObject", "object_bytes_max", "pack_object", "parse_object"]
