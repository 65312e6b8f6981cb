"""Kernels whose streams keep account of their order: what may run at the same time on a device is found without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from kvtide.engines.paged.device import DeviceStream
from kvtide_gpu.kernels import Kernels

# How many pieces of work of each stream are known to be over.
Seen = Counter[str]


class Order:
    """Work queued on each stream, what the host has waited for, and the memory taken under `taking`.

    torch gives a stream memory that the same stream may still be working on, so that others must be behind that work.
    """

    def __init__(self) -> None:
        self.current = "engine"
        self.queued: Seen = Counter(engine=1)
        self.host: Seen = Counter()
        self.taken: Seen = Counter()
        self._is_taking = False

    @contextmanager
    def taking(self, monkeypatch: Any) -> Iterator[None]:
        empty = torch.empty

        def recorded(*args: Any, **options: Any) -> torch.Tensor:
            if "device" in options:
                self.taken[self.current] = self.queued[self.current]
            return empty(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recorded)
            self._is_taking = True
            yield
        self._is_taking = False

    def check(self, stream: str, seen: Seen) -> None:
        """AssertionError if a stream that has seen so much may run beside what was at work on the memory taken."""
        known = seen | self.host | Counter({stream: self.queued[stream]})
        assert self._is_taking or self.taken <= known, f"{stream} did not wait for {self.taken - known}"


class OrderedStream(DeviceStream):
    def __init__(self, name: str, order: Order) -> None:
        super().__init__(None)
        self.name = name
        self.order = order
        self._seen: Seen = Counter()

    def work(self) -> None:
        """Queue something that uses the memory."""
        self.order.queued[self.name] += 1
        self.order.check(self.name, self._seen)

    @contextmanager
    def _queue(self) -> Iterator[None]:
        before, self.order.current = self.order.current, self.name
        self.work()
        yield
        self.order.current = before

    def queue(self) -> AbstractContextManager[Any]:
        return self._queue()

    def mark(self) -> Seen:
        return self._seen | Counter({self.name: self.order.queued[self.name]})

    def wait_for(self, event: Any) -> None:
        self._seen |= event or Counter()

    def finish(self) -> None:
        self.order.host |= self.mark()


class OrderedKernels(OrderedStream):
    """Kernels that are queued and never run."""

    device = torch.device("cpu")

    def __init__(self, order: Order, name: str = "kernels") -> None:
        super().__init__(name, order)

    def launch(self, name: str, args: Sequence[int], blocks: int, threads: int) -> None:
        self.work()

    def follow(self) -> None:
        self._seen |= Counter(engine=self.order.queued["engine"])

    def copies(self) -> DeviceStream:
        return OrderedStream("copies", self.order)

    def at_current(self) -> Kernels:
        return OrderedKernels(self.order, "engine")

    def beside(self, parts: int) -> Kernels:
        return OrderedKernels(self.order, f"1/{parts}")
