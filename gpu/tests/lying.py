"""Kernels that lie: what they are launched with is changed, or they are not launched at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtide.engines.paged.device import DeviceStream

# Given a kernel's name and its arguments: others, or None not to launch it.
Change = Callable[[str, list[int]], list[int] | None]


class LyingKernels:
    """Passes every call on to kernels, or a stream of theirs, but for launches."""

    def __init__(self, inner: Any, change: Change) -> None:
        self._inner = inner
        self._change = change

    def open(self) -> None:
        """Do nothing: they are open."""

    def close(self) -> None:
        """Do nothing: others use them too."""

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        changed = self._change(name, list(args))
        if changed is not None:
            self._inner.launch(name, changed, blocks, threads)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            made = found(*args)
            return LyingKernels(made, self._change) if isinstance(made, DeviceStream) and name != "copies" else made

        return call if callable(found) else found
