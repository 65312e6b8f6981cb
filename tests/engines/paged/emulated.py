"""A device made up of this machine's memory: work is queued on streams, and done as late as it may be, or wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvtide.engines.paged.device import DeviceStream

# What a device does when a stream gets there; all else is views, and the host's.
QUEUED = {"index", "index_put_", "_index_put_impl_", "copy_", "cat", "clone"}
POISON = 0x5A
Work = Callable[[], None]
# Given an operation's name, what does it and its arguments: does it, rightly or not.
Lie = Callable[[str, Callable[..., Any], list[Any]], Any]


def honest(name: str, do: Callable[..., Any], args: list[Any]) -> Any:
    return do(*args)


class EmulatedStream(DeviceStream):
    """A queue of work; `late`: which of its promises it does not keep ("finish", "event", "wait", "last")."""

    def __init__(self, device: EmulatedDevice, name: str) -> None:
        super().__init__(None)
        self.name = name
        self._device = device
        self._work: list[Work] = []
        self._done = 0

    def add(self, work: Work) -> None:
        self._work.append(work)

    def run(self, upto: int) -> None:
        with _disable_current_modes():
            while self._done < min(upto, len(self._work)):
                self._done += 1
                self._work[self._done - 1]()

    @contextmanager
    def queue(self) -> Iterator[None]:
        before, self._device.current = self._device.current, self
        yield
        self._device.current = before

    def mark(self) -> EmulatedEvent:
        return EmulatedEvent(self, len(self._work), self._device.late)

    def wait_for(self, event: Any) -> None:
        if event is not None and self._device.late != "wait":
            self.add(event.reach)

    def finish(self) -> None:
        late = self._device.late if self.name == "copies" else ""
        if late != "finish":
            self.run(len(self._work) - (late == "last"))


class EmulatedEvent:
    def __init__(self, stream: EmulatedStream, at: int, late: str) -> None:
        self._stream, self._at, self._late = stream, at, late

    def reach(self) -> None:
        self._stream.run(self._at)

    def synchronize(self) -> None:
        if self._late != "event":
            self.reach()


class EmulatedDevice(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for it
    """Use it with `with`: what torch does in this thread meanwhile is the device's. late: see EmulatedStream."""

    def __init__(self, monkeypatch: Any, lie: Lie = honest, late: str = "") -> None:
        super().__init__()
        self._lie = lie
        self.late = late
        self.engine = self.current = EmulatedStream(self, "engine")
        monkeypatch.setattr(DeviceStream, "new", lambda device: EmulatedStream(self, "copies"))
        monkeypatch.setattr(DeviceStream, "current", lambda device: self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name == "equal":
            self.current.finish()
        if name not in QUEUED:
            return func(*args, **kwargs)
        if name.endswith("_"):
            self.current.add(lambda: self._lie(name, func, list(args)))
            return args[0]
        made = func(*args, **kwargs).fill_(POISON)
        self.current.add(lambda: self._fill(made, self._lie(name, func, list(args))))
        return made

    @staticmethod
    def _fill(made: torch.Tensor, found: torch.Tensor | None) -> None:
        """Write what an operation found into what it returned before; nothing if it was not done."""
        if found is not None:
            made.copy_(found)
