"""An engine's pages on a device, moved by kernels and decoded into on it.

Invariant: a device that fails costs time or a miss, never a wrong page: each way has one through torch behind it, taken
only when nothing of the first is under way any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import SystemClock
from kvtide.codec import Codec
from kvtide.codec.published.cachegen import ProfiledCodec
from kvtide.codec.tide import TideCodec
from kvtide.engines.paged import Captured, PagePool
from kvtide.engines.paged.device import DevicePages, DeviceStream
from kvtide.errors import DeviceFault
from kvtide.tier.breaker import Breaker
from kvtide.types import Section
from kvtide_gpu.codecs import BlockEncoder, DeviceCodec, DeviceDecoder
from kvtide_gpu.kernels import Budget, CudaKernels, Kernels, device_faults
from kvtide_gpu.memory import KernelMemory
from kvtide_gpu.targets import BlockCopier, PageTarget, page_target

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# After so many faults in a row kernels are left alone for so long.
FAULTS_MAX = 3
REST_S = 60.0


class KernelPages:
    """Pages that a device holds; see PagePool. The kernels are open, and may be closed once the pages are.

    layers: as DevicePages takes them. ValueError for strides that kernels don't take.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[torch.Tensor],
        layout: BlockLayout,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._plain = DevicePages.of_rows(layers, layout)
        self.layout = layout
        self.page_tokens = self._plain.page_tokens
        self._kernels = kernels
        self._on_close = on_close
        self._target: PageTarget = page_target(layers, layout)
        self._copier = BlockCopier(self._target)
        with device_faults():
            self._out: DeviceStream = kernels.copies()
            # Each way has a stream, so that none waits for another; together they take no more than the budget.
            decoding, self._in, encoding = kernels.beside(2), kernels.beside(4), kernels.beside(4)
        self._streams = (kernels, decoding, self._in, self._out, encoding)
        self._encoder = BlockEncoder(encoding)
        # Held while a block is encoded, so that closing waits for it.
        self._encoding_lock = threading.Lock()
        self._is_closed = False
        self._after: Any = None
        self._breaker = Breaker(FAULTS_MAX, REST_S, SystemClock())
        self._has_faulted = False
        self._decoder = DeviceDecoder(decoding, self._target)
        self._decoder.open()

    @property
    def memory(self) -> KernelMemory:
        """Return the device's memory."""
        return KernelMemory(self._kernels)

    def close(self) -> None:
        """Stop decoding and encoding. Idempotent."""
        with self._encoding_lock:
            self._is_closed = True
        self._decoder.close()
        self._on_close()

    def follow(self) -> None:
        """Put what is written from now on after what the engine has queued; see PagePool."""
        with device_faults():
            self._plain.follow()
            self._after = self._kernels.at_current().mark()

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`; see PagePool."""

        def by_kernel() -> bool:
            self._in.wait_for(self._after)
            self._copier.scatter(self._in, bits, self._target.token_starts(pages, skip_pages))
            self._in.finish()
            return True

        if not self._tried(by_kernel, False):
            with device_faults():
                self._plain.scatter(bits, pages, skip_pages)

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int], skip_pages: int
    ) -> bool:
        """Write a block straight from its sections; see PagePool."""
        starts = self._target.token_starts(pages, skip_pages)
        return self._tried(lambda: self._decoder.decode(codec, meta, sections, starts, self._after), False)

    def encoder(self, codec: Codec) -> Codec:
        """Return what encodes lossy codecs' blocks on the device; see PagePool."""
        return DeviceCodec(codec, self._encode) if isinstance(codec, ProfiledCodec | TideCodec) else codec

    def _encode(self, codec: Codec, meta: BlockMeta, bits: BlockBits) -> list[Section] | None:
        with self._encoding_lock:
            return None if self._is_closed else self._tried(lambda: self._encoder.encode(codec, meta, bits), None)

    def capture(self, pages: Sequence[int]) -> Captured:
        """Copy the pages of a block as they are when torch's current stream comes here; see PagePool."""

        def by_kernel() -> Captured | None:
            starts = self._target.token_starts(pages)
            host = self._copier.gather(self._kernels.at_current(), starts, self._out)
            return _KernelCaptured(self, host, self._out.mark())

        captured = self._tried(by_kernel, None)
        if captured is None:
            with device_faults():
                captured = self._plain.capture(pages)
        return captured

    def _tried(self, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action of the kernels; `fallback` if it failed, or lately did, and nothing of it is under way.

        DeviceFault if that can't be told: then the device is lost.
        """
        if not self._breaker.allows():
            return fallback
        try:
            with device_faults():
                found = action()
        except DeviceFault as error:
            self._breaker.note_fault()
            if not self._has_faulted:
                self._has_faulted = True
                _log.warning("kernels failed, torch copies and the processor decodes instead for now: %s", error)
            with device_faults():
                for stream in self._streams:
                    stream.finish()
            return fallback
        self._breaker.note_success()
        return found


class _KernelCaptured:
    """A block of pinned memory that the pages' values are on their way to."""

    def __init__(self, pool: KernelPages, host: torch.Tensor, event: Any) -> None:
        self._pool = pool
        self._host = host
        self._event = event

    def wait(self) -> None:
        with device_faults():
            if self._event is not None:
                self._event.synchronize()

    def block(self) -> BlockBits:
        self.wait()
        bits: BlockBits = self._host.numpy().view(self._pool.layout.bits_dtype).reshape(self._pool.layout.shape)
        return bits

    def restore(self, pages: Sequence[int], skip_pages: int) -> None:
        self._pool.scatter(self.block(), pages, skip_pages)


def cuda_pages(layers: Sequence[torch.Tensor], layout: BlockLayout, multiprocessors: int) -> PagePool:
    """Return pages on a CUDA device with kernels for as many multiprocessors, or what torch alone can do there.

    The latter, with the reason logged, where cuda-bindings is missing or the device does not take the kernels.
    """
    kernels = CudaKernels(layers[0].device, Budget.of_multiprocessors(multiprocessors))
    return opened_pages(kernels, layers, layout)


def opened_pages(kernels: CudaKernels, layers: Sequence[torch.Tensor], layout: BlockLayout) -> PagePool:
    """Open kernels and return pages on their device; see `cuda_pages`."""
    try:
        with device_faults():
            kernels.open()
        pages = KernelPages(kernels, layers, layout, kernels.close)
        _log.info("kernels copy and decode the engine's pages on %s", layers[0].device)
        return pages
    except (ImportError, DeviceFault, ValueError) as error:
        _log.warning("no kernels for the engine's pages, torch copies them: %s", error)
        return DevicePages.of_rows(layers, layout)
