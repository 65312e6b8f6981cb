"""Bits as characters, for the twins: the first bit of a stream is the first character."""

from collections.abc import Iterable


def to_bytes(bits: str) -> bytes:
    """Return bits as bytes, the first bit lowest."""
    return bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))


def to_bits(data: bytes) -> str:
    """Return bytes as bits, the lowest bit first."""
    return "".join(format(byte, "08b")[::-1] for byte in data)


def field_bits(fields: Iterable[tuple[int, int]]) -> str:
    """Return fields of (value, width), one after the other, each lowest bit first."""
    return "".join(format(value, f"0{width}b")[::-1] for value, width in fields)


class BitReader:
    """Takes fields from the front. Behind the end it gives what is left, and `has_overrun` says so."""

    def __init__(self, data: bytes) -> None:
        self._bits = to_bits(data)
        self._at = 0

    def take(self, width: int) -> int:
        """Return the next field."""
        self._at += width
        field = self._bits[self._at - width : self._at]
        return int(field[::-1], 2) if field else 0

    @property
    def has_overrun(self) -> bool:
        """Return whether more was taken than there is."""
        return self._at > len(self._bits)

    @property
    def is_at_end(self) -> bool:
        """Return whether nothing but zeros that fill the last byte is left."""
        return len(self._bits) - self._at < 8 and "1" not in self._bits[self._at :]
