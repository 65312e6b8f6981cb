"""Streams of a device, as all that copies beside an engine uses them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceStream:
    """A stream of a device. Without one, in this machine's memory, all is done at once and events are None."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @staticmethod
    def new(device: torch.device) -> DeviceStream:
        """Return a new stream of a device."""
        return DeviceStream(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @staticmethod
    def current(device: torch.device) -> DeviceStream:
        """Return torch's current stream of a device: the engine's, if its thread asks."""
        return DeviceStream(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def queue(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues here."""
        context: AbstractContextManager[Any] = (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        return context

    def mark(self) -> Any:
        """Return an event after all that is queued here."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Put what is queued from now on after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def finish(self) -> None:
        """Wait for all that is queued."""
        if self._stream is not None:
            self._stream.synchronize()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from others until what is queued here is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
