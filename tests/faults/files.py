"""Files whose n-th system call goes wrong, for tests of what is built on `tier.files.Files`."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvtide.tier.base import Buffer
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.files import FileInfo, Files

# What can go wrong with a call: an error that it raises, or a transfer that ends early.
FAULT_KINDS = ("EIO", "ENOSPC", "EINTR", "short read", "short write")


class FaultyFiles(Files):
    """Counts system calls and fails the one numbered `nth`, 0-based; with `nth` None it only counts.

    Only calls that can go wrong in this way count: a short read is one of `preadv`. `failed` names the one that did.
    """

    def __init__(self, kind: str, nth: int | None) -> None:
        if kind not in FAULT_KINDS:
            raise ValueError(f"expected a kind of fault from {FAULT_KINDS}, got {kind!r}")
        self._kind = kind
        self._nth = nth
        self.calls = 0
        self.failed = ""

    def _is_faulty(self, call: str) -> bool:
        is_nth = self.calls == self._nth
        self.calls += 1
        if is_nth:
            self.failed = call
        return is_nth

    def _check(self, call: str) -> None:
        if not self._kind.startswith("short") and self._is_faulty(call):
            code = getattr(errno, self._kind)
            raise OSError(code, os.strerror(code))

    def open(self, path: Path | str, flags: int) -> int:
        self._check("open")
        return super().open(path, flags)

    def preadv(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if self._kind == "short read" and self._is_faulty("preadv"):
            return super().preadv(descriptor, _first_half(parts), offset)
        self._check("preadv")
        return super().preadv(descriptor, parts, offset)

    def pwritev(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        if self._kind == "short write" and self._is_faulty("pwritev"):
            return super().pwritev(descriptor, _first_half([memoryview(part) for part in parts]), offset)
        self._check("pwritev")
        return super().pwritev(descriptor, parts, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        self._check("allocate")
        super().allocate(descriptor, size)

    def truncate(self, descriptor: int, size: int) -> None:
        self._check("truncate")
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._check("sync")
        super().sync(descriptor)

    def unlink(self, path: Path | str) -> None:
        self._check("unlink")
        super().unlink(path)

    def rename(self, path: Path, target: Path) -> None:
        self._check("rename")
        super().rename(path, target)

    def next_data(self, descriptor: int, offset: int) -> int | None:
        self._check("next_data")
        return super().next_data(descriptor, offset)

    def try_lock(self, descriptor: int) -> bool:
        self._check("try_lock")
        return super().try_lock(descriptor)

    def is_unlinked(self, descriptor: int) -> bool:
        self._check("is_unlinked")
        return super().is_unlinked(descriptor)

    def is_here(self, descriptor: int, path: Path | str, length: int = 0) -> bool:
        self._check("is_here")
        return super().is_here(descriptor, path, length)

    def length(self, path: Path | str) -> int:
        self._check("length")
        return super().length(path)

    def free_bytes(self, path: Path) -> int:
        self._check("free_bytes")
        return super().free_bytes(path)

    def listing(self, folder: Path) -> list[FileInfo]:
        self._check("listing")
        return super().listing(folder)


def _first_half(parts: Sequence[memoryview]) -> list[memoryview]:
    """Return the first half of the parts' bytes, in whole pages if there are several."""
    wanted = sum(map(len, parts)) // 2
    if wanted > ALIGN_BYTES:
        wanted -= wanted % ALIGN_BYTES
    halves = []
    for part in parts:
        halves.append(part[:wanted])
        wanted -= len(halves[-1])
    return halves
