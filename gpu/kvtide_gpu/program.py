"""The kernels' source, its compilation by NVRTC, which needs no GPU, and the machine code kept on disk.

Machine code of one architecture, not PTX: a driver refuses PTX of a compiler newer than itself.
Invariant: no byte of a file is handed out unless its key and its checksum hold; otherwise it is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from kvtide.errors import DeviceFault

# No contraction: floats take one operation at a time, as on the processor.
COMPILE_OPTIONS = ("--std=c++20", "--fmad=false")

MAIN = "kernels.cu"


_log = logging.getLogger(__name__)
# Files in the folder: a few architectures, and versions before and after an update. The oldest go.
CUBINS_MAX = 8
# They have half a megabyte.
CUBIN_BYTES_MAX = 16 << 20
_DIGEST_BYTES = 32


def kernel_sources() -> dict[str, bytes]:
    """Return the source files by name."""
    folder = resources.files("kvtide_gpu") / "kernels"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.endswith((".cu", ".cuh"))}


def compiler_version() -> str:
    """Return the version of NVRTC. ImportError without cuda-bindings."""
    from cuda.bindings import nvrtc

    _, *version = nvrtc.nvrtcVersion()
    return ".".join(map(str, version))


def compile_kernels(architecture: str) -> bytes:
    """Return the kernels' machine code (cubin) for an architecture such as "sm_90".

    ImportError without cuda-bindings. DeviceFault with the compiler's log if it does not compile.
    """
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceFault(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    sources = kernel_sources()
    headers = {name: text for name, text in sources.items() if name != MAIN}
    names = [name.encode() for name in headers]
    program = checked(
        nvrtc.nvrtcCreateProgram(sources[MAIN], MAIN.encode(), len(headers), list(headers.values()), names)
    )
    options = [option.encode() for option in (*COMPILE_OPTIONS, f"--gpu-architecture={architecture}")]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise DeviceFault(f"the kernels don't compile for {architecture}: {log.decode(errors='replace')}")
    machine_code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, machine_code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(machine_code)


def kept_kernels(architecture: str, folder: Path) -> bytes:
    """Return the kernels' machine code for an architecture such as "sm_90", out of `folder` or compiled and put there.

    A folder that can't be read or written costs time only. Errors are those of `compile_kernels`.
    """
    key = _key(architecture)
    path = folder / f"{architecture}-{key.hex()}.cubin"
    found = _read(path, key)
    if found is None:
        found = compile_kernels(architecture)
        try:
            _write(path, key, found)
        except OSError as error:
            _log.info("the kernels' machine code could not be kept: %s", error)
    return found


def _key(architecture: str) -> bytes:
    """Digest all that the machine code depends on."""
    digest = hashlib.sha256()
    sources = sorted(kernel_sources().items())
    texts = [text.encode() for text in (architecture, compiler_version(), *COMPILE_OPTIONS)]
    for part in (*texts, *(each for name, text in sources for each in (name.encode(), text))):
        # The lengths keep "a" + "bc" and "ab" + "c" apart.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _checksum(key: bytes, code: bytes) -> bytes:
    return hashlib.sha256(key + code).digest()


def _read(path: Path, key: bytes) -> bytes | None:
    try:
        # A link may lead to another's file, and a pipe would not end.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            data = file.read(CUBIN_BYTES_MAX + 1)
    except OSError:
        return None
    code = data[_DIGEST_BYTES:]
    is_whole = len(data) <= CUBIN_BYTES_MAX and data[:_DIGEST_BYTES] == _checksum(key, code)
    return code if is_whole else None


def _write(path: Path, key: bytes, code: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
        try:
            aside.write(_checksum(key, code) + code)
            aside.flush()
            Path(aside.name).replace(path)
        finally:
            Path(aside.name).unlink(missing_ok=True)
    oldest_first = sorted(path.parent.iterdir(), key=lambda each: each.lstat().st_mtime_ns)
    for each in oldest_first[:-CUBINS_MAX]:
        each.unlink(missing_ok=True)
