"""A device proves itself before the first request: blocks go out of the engine's own pages and come into them, by the
very path that loads and stores will take, and every bit is compared.

What pages hold is written and read by address here, and blocks are put together by numpy: neither is what is proved.
Invariant: what the pages held before is there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec
from kvtide.engines.paged.device import DeviceLayer, DeviceStream
from kvtide.engines.paged.pages import Bytes, PagePool, join_pages
from kvtide.errors import DeviceFault, KvtideError
from kvtide.types import BlockKey, Namespace, ObjectId

# Denormals and NaNs with something in them, of every dtype and its complement.
_SPECIAL = (0x00010001, 0x7FC1FFC1)


class Proof(NamedTuple):
    """A device's result. reason: why its pages are not to be served; "" if they are proved."""

    reason: str
    seconds: float


def prove(
    pool: PagePool,
    layers: Sequence[DeviceLayer],
    clock: Clock,
    codecs: Sequence[Codec] = (),
    more: Callable[[Sequence[int]], None] = lambda pages: None,
) -> Proof:
    """Prove the pages of `layers`, none of which is in use yet, by whatever moves them for `pool`.

    codecs: those in use; exact ones have to give an object back as it was. more: is given a block's pages to use, and
    raises DeviceFault for what is wrong.
    """
    started_s, reason = clock.monotonic_s(), ""
    try:
        trial = _Trial(pool, layers)
        try:
            trial.run([codec for codec in codecs if codec.is_lossless], int(started_s * 1e9))
            more(trial.pages)
        finally:
            trial.put_back()
    except (KvtideError, RuntimeError, ValueError) as error:
        # RuntimeError: torch has no class of its own for what a device says.
        reason = str(error) or type(error).__name__
    return Proof(reason, clock.monotonic_s() - started_s)


class _Memory:
    """Some pages of all layers as their bytes in order of address, layer by layer."""

    def __init__(self, layers: Sequence[DeviceLayer], numbers: Sequence[Sequence[int]]) -> None:
        pages = [layer.pages[page] for layer, own in zip(layers, numbers, strict=True) for page in own]
        self._runs = [run.view(torch.uint8) for page in pages for run in _runs(page)]

    def read(self) -> torch.Tensor:
        return torch.cat(self._runs)

    def write(self, data: torch.Tensor) -> None:
        for run, part in zip(self._runs, data.split([len(run) for run in self._runs]), strict=True):
            run.copy_(part)


def _runs(page: torch.Tensor) -> list[torch.Tensor]:
    span = 1 + sum((size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True))
    if span == page.numel():
        return [page.as_strided((span,), (1,))]
    return [run for part in page.unbind(_by_address(page)[0]) for run in _runs(part)]


def _by_address(page: torch.Tensor) -> list[int]:
    # The outermost first.
    return sorted(range(page.ndim), key=lambda axis: (-page.stride(axis), axis))


class _Trial:
    """Blocks through pages that are spread over all there are, with an eye on the pages beside these."""

    def __init__(self, pool: PagePool, layers: Sequence[DeviceLayer]) -> None:
        self._pool, self._layers = pool, layers
        self._engine = DeviceStream.current(layers[0].pages.device)
        used = sorted({slot for layer in layers for slot in layer.slots or (0,)})
        count, last = pool.layout.tokens // pool.page_tokens, min(len(layer.pages) for layer in layers) - 1
        numbers = _spread(last, count * len(used))
        # Groups may lie over one another: a page is one group's alone.
        by_slot = [
            numbers[used.index(slot) :: len(used)] if slot in used else [0] * count for slot in range(used[-1] + 1)
        ]
        self.pages = join_pages(by_slot, [1] * len(by_slot)) if layers[0].slots is not None else numbers
        self._numbers = [layer.own(self.pages)[0] for layer in layers]
        ends = (numbers[0], numbers[-1])
        beside = sorted({0, *(page + step for page in ends for step in (-1, 1))} - {*numbers, last + 1})
        self._own, self._beside = _Memory(layers, self._numbers), _Memory(layers, [beside] * len(layers))
        self._before, self._before_beside = self._own.read(), self._beside.read()

    def run(self, codecs: Sequence[Codec], seed: int) -> None:
        """DeviceFault, with what went wrong, unless every bit came where it should.

        seed: another one each time, or what an earlier proof left in memory would be taken for what was copied.
        """
        first = np.random.default_rng(seed).integers(0, 256, len(self._before), np.uint8)
        words = first[: len(first) // 4 * 4].view("<u4")
        words[::5], words[1::5] = _SPECIAL
        # Every bit comes in both as 0 and as 1, and the engine's own writes are others.
        second, engine_s = ~first, first[::-1].copy()
        sent = [torch.from_numpy(each).to(self._before.device) for each in (first, engine_s)]
        self._engine.delay()
        self._own.write(sent[0])
        captured = self._pool.capture(self.pages)
        self._own.write(sent[1])
        _check("a block that went out", captured.block(), self._block(first))
        self._engine.delay()
        self._own.write(sent[1])
        self._pool.follow()
        came = self._block(second)
        for codec in codecs:
            came = _coded(codec, came, self._pool.layout)
        self._pool.scatter(came, self.pages, 0)
        _check("a block that came in", self._held(), second)
        # A part of a block, of whose last page a group has none any more.
        skip = min(1, len(self.pages) - 1)
        part = self.pages[skip:]
        if self._layers[0].slots is not None:
            part[-1] -= self._numbers[0][-1] << 32 * self._layers[0].slots[-1]
        captured.restore(part, skip)
        _check("a part of a block that came in", self._held(), self._mixed(first, second, part, skip))
        if not torch.equal(self._beside.read(), self._before_beside):
            raise DeviceFault("pages were written that nobody named")

    def put_back(self) -> None:
        self._own.write(self._before)
        self._beside.write(self._before_beside)
        self._engine.finish()

    def _held(self) -> Bytes:
        found = self._own.read()
        self._engine.finish()
        held: Bytes = found.cpu().numpy()
        return held

    def _parts(self, data: Bytes) -> list[Bytes]:
        """Return of each layer its pages (pages, bytes)."""
        counts = [len(own) for own in self._numbers]
        sizes = [layer.pages[0].nbytes for layer in self._layers]
        ends = np.cumsum(np.multiply(counts, sizes))[:-1]
        return [part.reshape(count, -1) for part, count in zip(np.split(data, ends), counts, strict=True)]

    def _mixed(self, new: Bytes, old: Bytes, pages: Sequence[int], skip_pages: int) -> Bytes:
        """Return `old` with those pages as in `new` that were written."""
        mixed = old.copy()
        for layer, own, source in zip(self._layers, self._parts(mixed), self._parts(new), strict=True):
            _, here = layer.own(pages, skip_pages)
            own[here] = source[here]
        return mixed

    def _block(self, data: Bytes) -> BlockBits:
        found: list[Bytes] = []
        for layer, pages in zip(self._layers, self._parts(data), strict=True):
            page = layer.pages[0]
            order = _by_address(page)
            shape = [page.shape[axis] for axis in order]
            cells = pages.view(f"<i{page.element_size()}").reshape(len(pages), *shape)
            cells = cells.transpose(0, *(1 + order.index(axis) for axis in range(page.ndim)))
            halves = (
                [cells] if page.ndim == 1 else [half.swapaxes(-3, -2) for half in np.split(cells, layer.halves, -1)]
            )
            found += [np.ascontiguousarray(half).reshape(-1).view(np.uint8) for half in halves]
        return np.concatenate(found).view(self._pool.layout.bits_dtype).reshape(self._pool.layout.shape)


def _coded(codec: Codec, bits: BlockBits, layout: BlockLayout) -> BlockBits:
    """Return a block as it comes out of a golden object of a codec's."""
    meta = BlockMeta(ObjectId(Namespace(bytes(32)), BlockKey(bytes(32))), BlockKey(bytes(32)), 0, layout)
    out = np.empty_like(bits)
    codec.decode(meta, codec.encode(meta, bits), out)
    _check(f"what was coded by {codec.codec_id}", out, bits)
    return out


def _spread(last: int, count: int) -> list[int]:
    """Return so many pages from 1 to the last, out of order. DeviceFault if there are not as many."""
    if count > last:
        raise DeviceFault(f"a proof takes {count} pages, there are {last}")
    numbers = [1 + (last - 1) * each // max(1, count - 1) for each in range(count)]
    return numbers[1::2] + numbers[::2]


def _check(what: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero(found.reshape(-1) != expected.reshape(-1))
        raise DeviceFault(f"{what} differs in {len(wrong)} of {found.size} values, first in number {wrong[0]}")
