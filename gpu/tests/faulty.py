"""A driver that fails when it is told to: kernels whose device calls are counted, one of which raises."""

from __future__ import annotations

import threading
from typing import Any

from kvtide.engines.paged.device import DeviceStream
from kvtide.errors import DeviceFault


class Switch:
    """Counts calls and fails some: the one numbered `fails_at`, and those behind it too if `is_lost`."""

    def __init__(self, fails_at: int | None = None, is_lost: bool = False) -> None:
        self._lock = threading.Lock()
        self._fails_at = fails_at
        self._is_lost = is_lost
        self.calls = 0
        self.failed: list[str] = []

    def call(self, what: str) -> None:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            if self._fails_at is None or not (number == self._fails_at or (self._is_lost and number > self._fails_at)):
                return
            self.failed.append(what)
        # The driver's faults are ours, torch's are RuntimeErrors: both must be caught.
        raise (DeviceFault if number % 2 else RuntimeError)(f"made up: {what}")


class FaultyKernels:
    """Passes every call on to kernels, or a stream of theirs, unless the switch says otherwise."""

    def __init__(self, inner: Any, switch: Switch) -> None:
        self._inner = inner
        self._switch = switch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self._switch.call(f"launch {args[0]}" if name == "launch" else name)
            made = found(*args)
            return FaultyKernels(made, self._switch) if isinstance(made, DeviceStream) else made

        return call if callable(found) else found
