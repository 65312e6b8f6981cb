"""Swaps an engine's pages out to this machine's memory and in again, beside what the engine computes.

On a GPU each direction has a stream of its own and the memory is pinned; on a processor threads copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from kvtide.block import BlockLayout


class Swap:
    """A transfer under way. Until it is done, neither its pages nor its slots may be used otherwise."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until it is done."""
        self._wait()


class PageSwapper:
    """Moves pages of all layers between `layers` and as many slots as are asked for in this machine's memory.

    layers: one tensor (pages, bytes of a page) of int8 for each layer, all on one device. Use it with `with`.
    """

    def __init__(self, layers: Sequence[torch.Tensor], slots: int) -> None:
        shapes = {(layer.ndim, layer.dtype, layer.shape[-1]) for layer in layers}
        if shapes != {(2, torch.int8, layers[0].shape[1])}:
            raise ValueError(f"layers must be (pages, bytes) of int8 and one page size, got {sorted(map(str, shapes))}")
        if slots < 1:
            raise ValueError(f"slots must be positive, got {slots}")
        self._layers = list(layers)
        self._slots = slots
        self._is_cuda = layers[0].device.type == "cuda"
        self._host: list[torch.Tensor] = []
        self._copiers: ThreadPoolExecutor | None = None
        self._streams: dict[bool, Any] = {}

    def open(self) -> None:
        """Reserve the memory."""
        page_bytes = self._layers[0].shape[1]
        self._host = [
            torch.empty((self._slots, page_bytes), dtype=torch.int8, pin_memory=self._is_cuda) for _ in self._layers
        ]
        if self._is_cuda:
            self._streams = {is_out: torch.cuda.Stream(self._layers[0].device) for is_out in (False, True)}
        # On a GPU they only wait for events; on a processor they copy, one for each direction.
        self._copiers = ThreadPoolExecutor(2, thread_name_prefix="kvtide-swap")

    def close(self) -> None:
        """Wait for what is under way and give the memory back. Idempotent."""
        if self._copiers is not None:
            self._copiers.shutdown(wait=True)
        self._copiers, self._host, self._streams = None, [], {}

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def swap_out(self, pages: Sequence[int], slots: Sequence[int]) -> Swap:
        """Copy pages, as they are when the engine's stream comes here, into slots. ValueError for unequal counts."""
        return self._swap(pages, slots, is_out=True)

    def swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> Swap:
        """Copy slots into pages; the engine's stream may use them once it is done. ValueError for unequal counts."""
        return self._swap(pages, slots, is_out=False)

    def _swap(self, pages: Sequence[int], slots: Sequence[int], is_out: bool) -> Swap:
        if len(pages) != len(slots):
            raise ValueError(f"every page needs a slot, got {len(pages)} pages and {len(slots)} slots")
        assert self._copiers is not None, "swap before open"
        if self._is_cuda:
            action = self._queued(pages, slots, is_out).synchronize
        else:
            action = partial(self._copy, list(pages), list(slots), is_out)
        return Swap(self._copiers.submit(action).result)

    def _queued(self, pages: Sequence[int], slots: Sequence[int], is_out: bool) -> Any:
        stream = self._streams[is_out]
        stream.wait_stream(torch.cuda.current_stream(self._layers[0].device))
        with torch.cuda.stream(stream):
            self._copy(list(pages), list(slots), is_out)
            return stream.record_event()

    def _copy(self, pages: list[int], slots: list[int], is_out: bool) -> None:
        for layer, host in zip(self._layers, self._host, strict=True):
            for page, slot, count in runs(pages, slots):
                inside, outside = layer[page : page + count], host[slot : slot + count]
                source, target = (inside, outside) if is_out else (outside, inside)
                if self._is_cuda:
                    target.copy_(source, non_blocking=True)
                else:
                    # torch would wake a team of threads for each stretch.
                    np.copyto(target.numpy(), source.numpy())


def runs(pages: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (page, slot, count) for every stretch in which both count up: one copy for each."""
    found: list[tuple[int, int, int]] = []
    for page, slot in zip(pages, slots, strict=True):
        if found and (page, slot) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((page, slot, 1))
    return found


def made_up_pages(layout: BlockLayout, pages: int, device: str) -> list[torch.Tensor]:
    """Return pages of random bytes for each layer; `layout.tokens` is the tokens of a page."""
    generator = torch.Generator().manual_seed(0)
    page = torch.randint(-128, 128, (layout.layer_bytes,), dtype=torch.int8, generator=generator)
    return [page.repeat(pages, 1).to(device) for _ in range(layout.layers)]
