"""A driver that fails when it is told to: kernels whose device calls are counted, one of which raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvtide.engines.streams import DeviceStream
from kvtide.errors import DeviceFault
from kvtide_gpu.kernels import Kernels


class Switch:
    """Counts calls and fails some: the one numbered `fails_at`, and those behind it too if `is_lost`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.fails_at: int | None = None
        self.is_lost = False
        self.failed: list[str] = []

    def call(self, what: str) -> None:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            is_hit = self.fails_at is not None and (
                number >= self.fails_at if self.is_lost else number == self.fails_at
            )
            if not is_hit:
                return
            self.failed.append(what)
        # The driver's faults are ours, torch's are RuntimeErrors: both must be caught.
        raise (DeviceFault if number % 2 else RuntimeError)(f"made up: {what}")


class FaultyStream(DeviceStream):
    def __init__(self, stream: DeviceStream, switch: Switch) -> None:
        super().__init__(None)
        self._inner = stream
        self._switch = switch

    @contextmanager
    def _queue(self) -> Iterator[None]:
        self._switch.call("queue")
        with self._inner.queue():
            yield

    def queue(self) -> AbstractContextManager[Any]:
        return self._queue()

    def mark(self) -> Any:
        self._switch.call("mark")
        return self._inner.mark()

    def wait_for(self, event: Any) -> None:
        self._switch.call("wait_for")
        self._inner.wait_for(event)

    def finish(self) -> None:
        self._switch.call("finish")
        self._inner.finish()


class FaultyKernels(FaultyStream):
    """Passes everything on to `kernels`, unless the switch says otherwise."""

    def __init__(self, kernels: Kernels, switch: Switch) -> None:
        super().__init__(kernels, switch)  # type: ignore[arg-type]  # kernels are a stream too
        self._kernels = kernels
        self.device = kernels.device

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        self._switch.call(f"launch {name}")
        self._kernels.launch(name, args, blocks, threads)

    def follow(self) -> None:
        self._switch.call("follow")
        self._kernels.follow()

    def copies(self) -> DeviceStream:
        self._switch.call("copies")
        return FaultyStream(self._kernels.copies(), self._switch)

    def at_current(self) -> Kernels:
        self._switch.call("at_current")
        return FaultyKernels(self._kernels.at_current(), self._switch)

    def beside(self, parts: int) -> Kernels:
        self._switch.call("beside")
        return FaultyKernels(self._kernels.beside(parts), self._switch)
