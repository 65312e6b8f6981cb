"""A connector's options, checked before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtide.config import Limits

# Half a block more or less decides what a prompt restores; shorter blocks cost objects.
BLOCK_TOKENS_WANTED = 128


class StreamOrder(NamedTuple):
    """The end of a streamed load: after so many seconds, or once the KL divergence is reached (None: the codec's)."""

    within_s: float
    quality: float | None = None


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A connector's options.

    `store` is a store URL. `load` says how blocks come in: `async` loads between the engine's steps, so that other
    requests run meanwhile; `layers` loads within the step, each layer waiting for its own keys and values alone; `auto`
    is that for a lone request and a store of this machine, on a processor, and `async` for others.
    """

    store: str
    # None to choose: `raw` for a store on this machine, which is read faster than it is decoded, else `lossless`.
    codec: str = ""
    block_tokens: int = 0
    tenant_salt: str = ""
    fingerprint: str = ""
    load: Literal["auto", "async", "layers"] = "auto"
    memory_bytes_max: int = Limits().memory_bytes_max
    disk_bytes_max: int = Limits().disk_bytes_max
    store_queue_bytes_max: int = Limits().store_queue_bytes_max
    load_threads: int = Limits().load_threads
    # On a GPU: kvtide's kernels instead of torch's copies. No device has proven them yet.
    device_kernels: bool = False
    # With them: how many multiprocessors copying and decoding may fill, and how much of the memory holds objects.
    device_multiprocessors: int = 32
    device_bytes_max: int = 0
    # A look-up or load that has no better bound is given up after this long, and the engine computes.
    match_s_max: float = 0.5
    # Stream stored prefixes: the first token comes so many seconds after a request, on what has come of them by then,
    # or earlier once the quality (a KL divergence; by default the codec's) is reached. None to load whole blocks.
    start_within_s: float | None = None
    quality: float | None = None
    load_s_max: float = 10.0

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> ConnectorSettings:
        """Return the settings in a mapping. ValueError for an unknown option, a bad value or no store."""
        try:
            settings = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"bad kvtide option: {error}") from error
        if settings.block_tokens < 0:
            raise ValueError(f"block_tokens must be positive, or 0 to choose, got {settings.block_tokens}")
        settings.check_stream()
        if settings.match_s_max <= 0:
            raise ValueError(f"match_s_max must be positive, got {settings.match_s_max}")
        if settings.device_multiprocessors <= 0 or settings.device_bytes_max < 0:
            found = (settings.device_multiprocessors, settings.device_bytes_max)
            raise ValueError(f"device_multiprocessors must be positive and device_bytes_max not negative, got {found}")
        alone = sorted({"device_multiprocessors", "device_bytes_max"} & set(options))
        if alone and not settings.device_kernels:
            raise ValueError(f"{alone[0]} is an option of the kernels: it needs device_kernels to be true")
        settings.limits()
        return settings if settings.codec else replace(settings, codec="raw" if settings.is_local else "lossless")

    def check_stream(self) -> None:
        """ValueError for options of streaming that can't be, or that go with no streaming."""
        for name, value in (("start_within_s", self.start_within_s), ("quality", self.quality)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
        if self.quality is not None and self.start_within_s is None:
            raise ValueError("quality says when a streamed load may end early: it needs start_within_s")
        if self.start_within_s is not None and self.load == "layers":
            raise ValueError("start_within_s streams between the engine's steps: load must be auto or async")

    def stream_order(self, request: Mapping[str, object]) -> StreamOrder | None:
        """Return how a request with these options of its own is streamed; bad ones are left out."""
        asked = {name: request.get(name) for name in ("start_within_s", "quality")}
        valid = {name: float(value) for name, value in asked.items() if isinstance(value, int | float) and value >= 0}
        within_s = valid.get("start_within_s", self.start_within_s)
        return None if within_s is None else StreamOrder(within_s, valid.get("quality", self.quality))

    @property
    def is_local(self) -> bool:
        """Tell whether the store is on this machine."""
        return "://" not in self.store or self.store.startswith(("disk://", "memory://"))

    def check_device(self, kind: str) -> None:
        """ValueError for options that an engine on a device of this kind ("cpu", "cuda") does not take."""
        if self.load == "layers" and kind != "cpu":
            raise ValueError(f"load layers is for engines on a processor, pages on {kind} are filled by whole blocks")
        if self.device_kernels and kind != "cuda":
            raise ValueError(f"device_kernels is for engines on a CUDA device, this one is on {kind}")

    def check_chunks(self) -> None:
        """ValueError for options that do nothing where the engine moves bytes of its own to and from us."""
        given = (
            ("device_kernels", self.device_kernels),
            ("load", self.load != "auto"),
            ("start_within_s", self.start_within_s is not None),
        )
        for option, is_given in given:
            if is_given:
                raise ValueError(f"{option} is an option of vLLM's connector: here the engine itself fills its pages")

    def limits(self) -> Limits:
        """Return the bounds of the cache. ValueError for one that is not positive."""
        return Limits(
            memory_bytes_max=self.memory_bytes_max,
            disk_bytes_max=self.disk_bytes_max,
            store_queue_bytes_max=self.store_queue_bytes_max,
            load_threads=self.load_threads,
            load_s_max=self.load_s_max,
            device_bytes_max=self.device_bytes_max or Limits().device_bytes_max,
        )

    @property
    def kept_bytes_max(self) -> int:
        """Return the share of the memory for blocks as the engine's pages hold them; the rest is the memory tier's."""
        return self.memory_bytes_max // 2

    def block_tokens_for(self, page_tokens: int) -> int:
        """Return the tokens of a block. ValueError if the user's number is not a multiple of the engine's page."""
        if self.block_tokens % page_tokens:
            raise ValueError(
                f"block_tokens must be a multiple of the engine's page of {page_tokens} tokens, got {self.block_tokens}"
            )
        return self.block_tokens or page_tokens * max(1, BLOCK_TOKENS_WANTED // page_tokens)
