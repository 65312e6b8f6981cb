"""An engine's pages on a device, moved by kernels and decoded into on it.

Invariant: a device that fails costs time or a miss, never a wrong page: each way has one through torch behind it, taken
only when nothing of the first is under way any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import Clock, SystemClock
from kvtide.codec import Codec
from kvtide.codec.published.cachegen import ProfiledCodec
from kvtide.codec.tide import TideCodec
from kvtide.engines.paged import Captured, PagePool
from kvtide.engines.paged.device import DevicePages, DeviceStream, coming
from kvtide.engines.paged.proof import prove
from kvtide.errors import CorruptPayload, DeviceFault, UnencodableBlock
from kvtide.tier.breaker import Breaker
from kvtide.types import BlockKey, Namespace, ObjectId, Section
from kvtide_gpu.codecs import BlockEncoder, DeviceCodec, DeviceDecoder
from kvtide_gpu.kernels import Budget, CudaKernels, Kernels, device_faults
from kvtide_gpu.memory import KernelMemory
from kvtide_gpu.targets import BlockCopier, PageTarget, page_target

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# After so many faults in a row kernels are left alone for so long.
FAULTS_MAX = 3
REST_S = 60.0
# A block goes out and in so often, by kernels and by torch, before one is chosen.
RACES = 3
# As much of a block is in a golden object: it is made at the start.
GOLDEN_BYTES = 4 << 20
_FLOATS = {KVDtype.BFLOAT16: torch.bfloat16, KVDtype.FLOAT16: torch.float16, KVDtype.FLOAT32: torch.float32}
_INTS = {2: torch.int16, 4: torch.int32}


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
        # Of each codec, by its first block, whether the device decodes as the processor does.
        self._is_right: dict[tuple[str, float, bytes], bool] = {}
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

    @property
    def room_bytes(self) -> int:
        """The memory that a captured block takes; see PagePool."""
        return self._plain.room_bytes

    def reserve(self, blocks: int, is_wanted: Callable[[], bool]) -> None:
        """Pin memory for captured blocks; see PagePool."""
        self._plain.reserve(blocks, is_wanted)

    def scatter(self, bits: BlockBits, pages: Sequence[int], skip_pages: int) -> None:
        """Write a block into `pages`; see PagePool."""
        block = torch.from_numpy(bits.reshape(-1).view(np.uint8))

        def by_kernel() -> bool:
            self._in.wait_for(self._after)
            self._copier.scatter(self._in, block, self._target.token_starts(pages, skip_pages))
            self._in.finish()
            return True

        if not self._tried(by_kernel, False):
            with device_faults():
                self._plain.scatter(bits, pages, skip_pages)

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int], skip_pages: int
    ) -> bool:
        """Write a block straight from its sections; see PagePool."""
        is_right = self._is_right.get(_key(codec))
        # The first block of each codec proves it, so it has to be a whole one.
        if is_right is False or (is_right is None and skip_pages):
            return False
        starts = self._target.token_starts(pages, skip_pages)[: meta.layout.tokens]
        is_written = self._tried(lambda: self._decoder.decode(codec, meta, sections, starts, self._after), False)
        return is_written and (is_right or self._is_as_the_processors(codec, meta, sections, pages))

    def _is_as_the_processors(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], pages: Sequence[int]
    ) -> bool:
        expected: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        try:
            codec.decode(meta, sections, expected)
        except CorruptPayload:
            # The processor has the last word, and says it again.
            return False
        tokens = min(meta.layout.tokens, len(pages) * self.page_tokens)
        found = self.capture(pages).block()[:, :, :tokens]
        is_right = self._is_right[_key(codec)] = np.array_equal(found, expected[:, :, :tokens])
        if not is_right:
            _log.warning("the device decodes %s otherwise than the processor, which does it now", codec.codec_id)
        return is_right

    def is_wrong(self, codec: Codec) -> bool:
        """Tell whether the device has decoded a block of a codec otherwise than the processor."""
        return self._is_right.get(_key(codec)) is False

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
            event = self._out.mark()

            def wait() -> None:
                with device_faults():
                    if event is not None:
                        event.synchronize()

            return coming(self, host, wait)

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


def _key(codec: Codec) -> tuple[str, float, bytes]:
    return codec.codec_id, codec.quality, codec.profile or b""


def cuda_pages(
    plain: DevicePages, multiprocessors: int, codecs: Sequence[Codec], clock: Clock, is_asked_for: bool
) -> PagePool:
    """Return pages on a CUDA device with kernels for as many multiprocessors, or `plain`, which torch copies.

    The latter, with the reason logged, where cuda-bindings is missing, the device does not take the kernels, or they
    fail their proof; and unless they are asked for, where they are not faster.
    """
    kernels = CudaKernels(plain.layers[0].pages.device, Budget.of_multiprocessors(multiprocessors))
    return proved_pages(kernels, plain, codecs, clock, is_asked_for)


def proved_pages(
    kernels: CudaKernels, plain: DevicePages, codecs: Sequence[Codec], clock: Clock, is_asked_for: bool
) -> PagePool:
    """Open kernels and return pages on their device; see `cuda_pages`."""
    try:
        with device_faults():
            kernels.open()
        pages = KernelPages(kernels, [layer.pages for layer in plain.layers], plain.layout, kernels.close)
    except (ImportError, DeviceFault, ValueError) as error:
        _log.warning("no kernels for the engine's pages, torch copies them: %s", error)
        return plain
    seconds: list[float] = []

    def more(numbers: Sequence[int]) -> None:
        for codec in codecs:
            prove_codec(pages, codec, numbers)
        seconds.extend(_copy_s(each, numbers, clock) for each in (pages, plain))

    proof = prove(pages, plain.layers, clock, more=more)
    if not proof.reason and (is_asked_for or seconds[0] < seconds[1]):
        _log.info("kernels copy and decode the engine's pages, proved in %.2f s", proof.seconds)
        return pages
    why = f"kernels failed their proof: {proof.reason}" if proof.reason else "kernels were no faster"
    _log.log(logging.WARNING if proof.reason else logging.INFO, "torch copies the engine's pages: %s", why)
    pages.close()
    return plain


def prove_codec(pages: KernelPages, codec: Codec, numbers: Sequence[int]) -> None:
    """Have the device encode and decode a golden object. DeviceFault if the processor makes something else of it."""
    count = min(len(numbers), max(1, GOLDEN_BYTES * len(numbers) // pages.layout.raw_bytes))
    layout = replace(pages.layout, tokens=count * pages.page_tokens)
    meta = BlockMeta(ObjectId(Namespace(bytes(32)), BlockKey(bytes(32))), BlockKey(bytes(32)), 0, layout)
    # What the pages hold is another pattern at each start.
    seed = int.from_bytes(pages.capture(numbers).block().reshape(-1)[:8].tobytes(), "little")
    values = np.random.default_rng(seed).standard_normal(layout.shape, np.float32) / 16
    signed: Any = torch.from_numpy(values).to(_FLOATS[layout.dtype]).view(_INTS[layout.dtype.item_bytes]).numpy()
    bits = signed.view(layout.bits_dtype)
    own = codec.rounded() if isinstance(codec, TideCodec) else codec
    sections = _encoded(own, meta, bits)
    if _encoded(pages.encoder(codec), meta, bits) != sections:
        raise DeviceFault(f"a golden object of {codec.codec_id} was encoded otherwise than by the processor")
    if isinstance(own, TideCodec) and own.model is not None:
        # Made-up values fit no profile.
        codec = own.with_steps(own.steps)
        sections = _encoded(codec, meta, bits)
    if sections is None:
        return
    pages.follow()
    pages.decode(codec, meta, sections, numbers[:count], 0)
    if pages.is_wrong(codec):
        raise DeviceFault(f"a golden object of {codec.codec_id} was decoded otherwise than by the processor")


def _encoded(codec: Codec, meta: BlockMeta, bits: BlockBits) -> list[Section] | None:
    try:
        return codec.encode(meta, bits)
    except UnencodableBlock:
        return None


def _copy_s(pages: PagePool, numbers: Sequence[int], clock: Clock) -> float:
    """Return the seconds of a block out and in, the best of a few."""
    found = []
    for _ in range(RACES):
        started_s = clock.monotonic_s()
        pages.capture(numbers).restore(numbers, 0)
        found.append(clock.monotonic_s() - started_s)
    return min(found)
