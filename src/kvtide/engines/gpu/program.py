"""The kernels' source and its compilation by NVRTC, which needs no GPU.

Machine code of one architecture, not PTX: a driver refuses PTX of a compiler newer than itself.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from kvtide.errors import DeviceFault

# No contraction: floats take one operation at a time, as on the processor.
COMPILE_OPTIONS = ("--std=c++20", "--fmad=false")

MAIN = "kernels.cu"


def kernel_sources() -> dict[str, bytes]:
    """Return the source files by name."""
    folder = resources.files("kvtide.engines.gpu") / "kernels"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.endswith((".cu", ".cuh"))}


def compiler_version() -> str:
    """Return the version of NVRTC. ImportError without the extra `gpu`."""
    from cuda.bindings import nvrtc

    _, *version = nvrtc.nvrtcVersion()
    return ".".join(map(str, version))


def compile_kernels(architecture: str) -> bytes:
    """Return the kernels' machine code (cubin) for an architecture such as "sm_90".

    ImportError without the extra `gpu`. DeviceFault with the compiler's log if it does not compile.
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
