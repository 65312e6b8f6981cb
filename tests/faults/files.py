"""Files whose n-th system call goes wrong, for tests of what is built on `tier.files.Files`."""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.tier.base import Buffer
from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.tier.files import Files

# What can go wrong with a call: an error that it raises, or a transfer that ends early.
FAULT_KINDS = ("EIO", "ENOSPC", "EINTR", "short read", "short write")
# Calls that can only raise; `preadv` and `pwritev` may end early too.
CALLS = (
    *("open", "allocate", "truncate", "sync", "unlink", "rename", "next_data", "try_lock"),
    *("is_unlinked", "is_here", "length", "free_bytes", "listing"),
)


class UnsyncedFiles(Files):
    """Files that wait for no disk: power does not fail here."""

    def sync(self, descriptor: int) -> None:
        return


class FaultyFiles(UnsyncedFiles):
    """Counts system calls and fails the one numbered `nth`, 0-based.

    Only calls that can go wrong in this way count: a short read is one of `preadv`. `failed` names the one that did.
    """

    def __init__(self, kind: str, nth: int) -> None:
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


def _checked(name: str) -> Callable[..., Any]:
    def call(files: FaultyFiles, *arguments: Any) -> Any:
        files._check(name)
        return getattr(super(FaultyFiles, files), name)(*arguments)

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _checked(_name))


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
