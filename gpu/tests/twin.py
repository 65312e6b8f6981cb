"""The kernels on this processor: their source, compiled as plain C++ over `emulation.hpp`."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtide.engines.paged.device import DeviceStream
from kvtide_gpu.program import COMPILE_OPTIONS

HERE = Path(__file__).parent
SOURCES = HERE.parent / "kvtide_gpu/kernels"

# Set by tools/gpu.py, which preloads the sanitizers' libraries; fibers have stacks that they know nothing of.
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param", "asan-stack=0")
FLAGS = SANITIZED if os.environ.get("KVTIDE_TWIN_SANITIZED") else ("-O1",)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile_twin(folder: Path, flags: Sequence[str] = FLAGS) -> Path:
    """Return the library, made in `folder`."""
    assert "--fmad=false" in COMPILE_OPTIONS
    target = folder / "twin.so"
    base = ("g++", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off", f"-I{SOURCES}")
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    subprocess.run([*base, *warnings, *flags, str(HERE / "twin.cpp"), "-o", str(target)], check=True)
    return target


class TwinKernels(DeviceStream):
    """`Kernels` that run at once, in this machine's memory."""

    device = torch.device("cpu")

    def __init__(self, library: Path, blocks: int = 3, seed: int = 1) -> None:
        super().__init__(None)
        self._library = ctypes.CDLL(str(library))
        self._blocks = blocks
        self._seed = seed
        self.launches = 0
        # The emulation runs one kernel at a time.
        self._lock = threading.Lock()

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        if blocks < 1:
            return
        fields = struct.pack(f"<{len(args)}Q", *(field % (1 << 64) for field in args))
        grid = min(blocks, self._blocks)
        sys.stdout.flush()
        with self._lock:
            self.launches += 1
            seed = self._seed * 1000 + self.launches
            failed = self._library.twin_launch(name.encode(), fields, ctypes.c_uint64(len(fields)), grid, threads, seed)
        assert not failed, f"{name}: {['', 'no such kernel', 'arguments of another size'][failed]}"

    def follow(self) -> None:
        pass

    def copies(self) -> DeviceStream:
        return DeviceStream(None)

    def at_current(self) -> TwinKernels:
        return self

    def beside(self, parts: int) -> TwinKernels:
        return self
