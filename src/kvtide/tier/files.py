"""The system calls of the segment log in one place, so that tests can make each one fail.

Invariants: a transfer is whole or says how far it came; short reads and writes are continued here and nowhere else.
Only regular files are read or written: a FIFO would block, a device has no end, a link leads elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvtide.tier.base import Buffer
from kvtide.tier.buffers import ALIGN_BYTES

_MODE = 0o644


class FileInfo(NamedTuple):
    """An entry as a directory listing shows it; `size` is what it takes on the disk, `length` what it says."""

    name: str
    length: int
    size: int
    is_regular: bool


class Files:
    """The operating system's files. Everything raises OSError as the system does."""

    # As the system has them. Locks go with a descriptor that is closed, what lies behind a new end is given back.
    close = staticmethod(os.close)
    truncate = staticmethod(os.ftruncate)
    unlink = staticmethod(os.unlink)
    rename = staticmethod(os.rename)

    def open(self, path: Path | str, flags: int) -> int:
        """Open a regular file, or with O_DIRECTORY a folder or a link to one, and return its descriptor."""
        if flags & os.O_DIRECTORY:
            return os.open(path, flags | os.O_CLOEXEC)
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "not a regular file", str(path))
        return descriptor

    @contextmanager
    def opened(self, path: Path | str, flags: int) -> Iterator[int]:
        """Do `open`, and close the descriptor in the end."""
        descriptor = self.open(path, flags)
        try:
            yield descriptor
        finally:
            self.close(descriptor)

    def open_direct(self, path: Path | str, flags: int) -> int:
        """Open a file around the page cache, through it where the file system refuses that."""
        try:
            return self.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.open(path, flags)

    def use_page_cache(self, descriptor: int) -> bool:
        """Send further transfers through the page cache. False if they went there before."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True

    def preadv(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """Read once, as the system call does: possibly less than asked for."""
        return os.preadv(descriptor, parts, offset)

    def pwritev(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        """Write once, as the system call does: possibly less than asked for."""
        return os.pwritev(descriptor, parts, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserve disk space for the first `size` bytes."""
        os.posix_fallocate(descriptor, 0, size)

    def sync(self, descriptor: int) -> None:
        """Wait until a file's content is on the disk for good."""
        os.fdatasync(descriptor)

    def content(self, path: Path, bytes_max: int) -> bytes:
        """Return a file's bytes, the last `bytes_max` if it has more."""
        with self.opened(path, os.O_RDONLY) as descriptor:
            length = os.fstat(descriptor).st_size
            data = bytearray(min(length, bytes_max))
            return bytes(data[: self.read_full(descriptor, [memoryview(data)], length - len(data))])

    def save(self, path: Path, data: bytes) -> None:
        """Give a file this content in one step, whatever it had before."""
        aside = path.with_name(f"{path.name}.part")
        with self.opened(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            try:
                self.write_full(descriptor, [data], 0)
                self.rename(aside, path)
            except OSError:
                self.unlink(aside)
                raise

    def length(self, path: Path | str) -> int:
        """Return a file's length; 0 if there is none."""
        try:
            return os.stat(path).st_size  # noqa: PTH116 - asked for each look-up: a Path costs more than the call
        except FileNotFoundError:
            return 0

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this process may still take of the disk that `path` is on."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def is_here(self, descriptor: int, path: Path | str, length: int = 0) -> bool:
        """Tell whether an open file or folder is what stands at a path, and is at least so long."""
        try:
            found = os.stat(path)  # noqa: PTH116 - asked for each write
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(descriptor)) and found.st_size >= length

    def is_unlinked(self, descriptor: int) -> bool:
        """Tell whether an open file has lost its name."""
        return os.fstat(descriptor).st_nlink == 0

    def next_data(self, descriptor: int, offset: int) -> int | None:
        """Return where the next written bytes at or after `offset` begin, None if there are none."""
        try:
            return os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def try_lock(self, descriptor: int, is_shared: bool = False) -> bool:
        """Take the kernel's lock on an open file, alone or with others. False if somebody has it who rules that out."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, descriptor: int) -> None:
        """Give the kernel's lock back."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def listing(self, folder: Path) -> list[FileInfo]:
        """Return the entries of a directory; one that goes away meanwhile is left out."""
        infos = []
        with os.scandir(folder) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    size = max(status.st_size, status.st_blocks * 512)
                    infos.append(FileInfo(item.name, status.st_size, size, stat.S_ISREG(status.st_mode)))
        return infos

    def read_full(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """Read until the parts are full or the file ends; return how many bytes came."""
        return self._transfer(self.preadv, descriptor, parts, offset)

    def read_cached(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """Read what is in the page cache right there, without waiting for the disk; return how many bytes came."""
        try:
            return os.preadv(descriptor, parts, offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            # A file system without this question, such as tmpfs, does not wait either.
            return self.read_full(descriptor, parts, offset)

    def write_full(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        """Write all of the parts."""
        if self._transfer(self.pwritev, descriptor, parts, offset) < sum(map(len, parts)):
            raise OSError(errno.EIO, "a write made no progress")

    def _transfer(self, call: Callable[..., int], descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        """Call until all is done or nothing moves; return how many bytes did."""
        rest, done, wanted = list(parts), 0, sum(map(len, parts))
        while done < wanted:
            try:
                count = call(descriptor, rest, offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.use_page_cache(descriptor):
                    continue
                raise
            done += count
            if count == 0 or done == wanted:
                break
            if count % ALIGN_BYTES:
                # Direct transfers begin at pages only; this one ended elsewhere, at the file's end or at a fault.
                self.use_page_cache(descriptor)
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = memoryview(rest[0])[count:]
        return done
