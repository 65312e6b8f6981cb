"""Codecs on the device, for many callers: stored sections decoded into an engine's pages, blocks of pages encoded.

Work that comes while the device is busy goes together next.
A thread feeds the device; a caller waits for its block. What the device can't do is the caller's to do otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec, LevelledCodec, PromisingCodec
from kvtide.codec.published.cachegen import ProfiledCodec
from kvtide.codec.tide import TideCodec
from kvtide.errors import DeviceFault, UnencodableBlock
from kvtide.types import Section
from kvtide_gpu.groups import DeviceGroups
from kvtide_gpu.kernels import Kernels, Opened, device_faults
from kvtide_gpu.targets import PageTarget, StoredBlock, block_target
from kvtide_gpu.tide import DeviceTide
from kvtide_gpu.tide_encode import TOKENS_MAX, DeviceTideEncoder, PagedBlock
from kvtide_gpu.tide_model import DeviceModel

# What is decoded together takes several times its blocks' size on the device while it lasts.
BLOCKS_AT_ONCE = 16


# Returns a block's sections, None if the device did not encode it.
DeviceEncode = Callable[[Codec, BlockMeta, BlockBits], list[Section] | None]


class _Job(NamedTuple):
    codec: Codec
    block: StoredBlock
    after: Any
    is_written: Future[bool]


class DeviceDecoder(Opened):
    """Decodes objects of lossy codecs into one engine's pages. Thread-safe between `open` and `close`."""

    def __init__(self, kernels: Kernels, target: PageTarget) -> None:
        self._kernels = kernels
        self._target = target
        self._tides: dict[bytes, DeviceTide] = {}
        self._groups: DeviceGroups | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="kvtide-device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Decode what waits and stop. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join()

    def decode(
        self, codec: Codec, meta: BlockMeta, sections: Sequence[Section], starts: NDArray[np.int64], after: Any
    ) -> bool:
        """Write a block to its tokens' places after an event, and return when it is there.

        False if it was not written: another codec, or the device says that something in it is wrong. DeviceFault if the
        device fails; nothing of the block is under way then.
        """
        model = codec.model if isinstance(codec, TideCodec) else None
        fits = model is not None and model.profile.fits(meta.layout) and not model.is_for_host
        if not fits and not isinstance(codec, ProfiledCodec):
            return False
        job = _Job(codec, StoredBlock(meta, sections, starts), after, Future())
        with self._lock:
            if self._thread is None:
                return False
            self._jobs.put(job)
        return job.is_written.result()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            found = [self._jobs.get()]
            while not self._jobs.empty() and len(found) < BLOCKS_AT_ONCE:
                found.append(self._jobs.get())
            jobs = [job for job in found if job is not None]
            is_last = len(jobs) < len(found)
            for codec in {id(job.codec): job.codec for job in jobs}.values():
                self._decode([job for job in jobs if job.codec is codec])

    def _decode(self, jobs: Sequence[_Job]) -> None:
        try:
            for job, is_written in zip(jobs, self._written(jobs), strict=True):
                job.is_written.set_result(is_written)
        except Exception as error:  # noqa: BLE001 - whoever waits gets it; the thread serves the next
            for job in jobs:
                if not job.is_written.done():
                    job.is_written.set_exception(error)

    def _written(self, jobs: Sequence[_Job]) -> list[bool]:
        codec, blocks = jobs[0].codec, [job.block for job in jobs]

        def wait() -> None:
            for job in jobs:
                self._kernels.wait_for(job.after)

        try:
            with device_faults():
                if isinstance(codec, ProfiledCodec):
                    self._groups = self._groups or DeviceGroups(self._kernels)
                    return self._groups.write(codec, blocks, self._target, wait)
                assert isinstance(codec, TideCodec)
                return self._tide(codec).decode(blocks, wait)
        except DeviceFault:
            with device_faults():
                self._kernels.finish()
            raise

    def _tide(self, codec: TideCodec) -> DeviceTide:
        model = codec.model
        assert model is not None, "a profile"
        digest = model.profile.digest
        if digest not in self._tides:
            self._tides[digest] = DeviceTide(DeviceModel(self._kernels, model), self._target)
        return self._tides[digest]


class BlockEncoder:
    """Encodes blocks of this machine's memory by lossy codecs. One thread at a time."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._groups: DeviceGroups | None = None
        self._models: dict[bytes, DeviceModel] = {}

    def encode(self, codec: Codec, meta: BlockMeta, bits: BlockBits) -> list[Section] | None:
        """Return a block's sections, None if that is left to the processor. UnencodableBlock as the codec's own."""
        if isinstance(codec, ProfiledCodec):
            self._groups = self._groups or DeviceGroups(self._kernels)
            return self._groups.encode(codec, meta, bits)
        model = codec.model if isinstance(codec, TideCodec) else None
        if model is None or not model.profile.fits(meta.layout) or model.is_for_host or meta.layout.tokens > TOKENS_MAX:
            return None
        assert isinstance(codec, TideCodec)
        digest = model.profile.digest
        if digest not in self._models:
            self._models[digest] = DeviceModel(self._kernels, model)
        signed: Any = bits.view(f"<i{bits.itemsize}")
        with self._kernels.queue():
            block = torch.from_numpy(signed).to(self._kernels.device)
            target = block_target(block, meta.layout)
            encoder = DeviceTideEncoder(self._models[digest], target, codec.rounded().steps)
            (found,) = encoder.encode([PagedBlock(meta, target.token_starts([0]))])
        if isinstance(found, UnencodableBlock):
            raise found
        return found


class DeviceCodec:
    """A codec whose blocks a device encodes; what the device leaves, it encodes itself."""

    def __init__(self, codec: Codec, encode: DeviceEncode) -> None:
        self._codec = codec
        self._encode = encode
        self.codec_id = codec.codec_id
        self.is_lossless = codec.is_lossless
        self.quality = codec.quality
        self.profile = codec.profile
        levels = codec.coarser if isinstance(codec, LevelledCodec) else ()
        self.coarser = tuple(DeviceCodec(level, encode) for level in levels)

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return the codec's own bound: it may have to do the work."""
        return self._codec.scratch_bytes(layout)

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the block's sections; see Codec."""
        found = self._encode(self._codec, meta, bits)
        return self._codec.encode(meta, bits) if found is None else found

    def check_decoded(self, meta: BlockMeta, bits: BlockBits, sections: Sequence[Section]) -> None:
        """Check as the codec does, on the processor, what the device encoded; nothing where it promises nothing."""
        if isinstance(self._codec, PromisingCodec):
            self._codec.check_decoded(meta, bits, sections)

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Decode as the codec does: on the processor."""
        self._codec.decode(meta, sections, out)
