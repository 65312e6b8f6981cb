"""A connector's options, checked before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtide.codec import Profile
from kvtide.config import Limits
from kvtide.engines import installed_profiles, read_profile
from kvtide.evict import Hint

if TYPE_CHECKING:
    from kvtide.plan.base import StreamPolicy

# Half a block more or less decides what a prompt restores; shorter blocks cost objects.
BLOCK_TOKENS_WANTED = 128


class StreamOrder(NamedTuple):
    """The end of a streamed load: after so many seconds, or once the KL divergence is reached (None: the codec's)."""

    within_s: float
    quality: float | None = None


class RequestOptions(NamedTuple):
    """A request's own options. `bad` counts those that were left out: a request never fails for them.

    follow_s: how long to wait for the next block of a prefix that another engine is computing; 0 to wait for none.
    hint: advice of its agent about its session. prefetch: tokens of a prompt that its agent expects next.
    """

    is_latest: bool = False
    may_load: bool = True
    may_store: bool = True
    stream: StreamOrder | None = None
    follow_s: float = 0.0
    hint: Hint | None = None
    prefetch: Sequence[int] = ()
    bad: int = 0


# Of a request that says nothing, with settings that do not either.
NO_OPTIONS = RequestOptions()
# Of a prompt that is to be prefetched: its blocks are named while the engine waits.
PREFETCH_TOKENS_MAX = 1 << 16
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Prefetch = Annotated[list[_TokenId], msgspec.Meta(max_length=PREFETCH_TOKENS_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
# Names and types of what a request may say, of a mapping that other connectors read too.
_REQUEST_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "kvtide_force_latest": bool,
        "kvtide_no_load": bool,
        "kvtide_no_store": bool,
        "start_within_s": _Seconds,
        "quality": _Seconds,
        "follow_s": _Seconds,
        "agent_hint": dict[str, Any],
        "prefetch": _Prefetch,
    }
)


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
    # What a prompt has behind its last full block is stored too, in pieces of so many tokens. 0: it is computed again.
    tail_tokens: int = 0
    # Layers that keep states: one is kept after so many tokens at the most, where a step of the engine ends with it.
    # 0: every 4,096 tokens, or rarer, so that states take no more room than the rows between them.
    state_every_tokens: int = 0
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
    # Wait for a prefix that another engine is computing and storing, as long as its next block comes within so many
    # seconds, and what is left comes sooner than it would be computed.
    follow_s: float = 0.0
    # A look-up or load that has no better bound is given up after this long, and the engine computes.
    match_s_max: float = 0.5
    # Stream stored prefixes: the first token comes so many seconds after a request, on what has come of them by then,
    # or earlier once the quality (a KL divergence; by default the codec's) is reached. None to load whole blocks.
    start_within_s: float | None = None
    quality: float | None = None
    # What a streamed load asks for first; not by policies that compute meanwhile, as a step can't.
    policy: Literal["layered", "anchor-first", "deltas-first-when-slow"] | None = None
    # Load only this share of each block's tokens exactly, from 0 to 1, those that its keys tell apart, and the rest
    # rough, where that is faster than all of them. It needs the codec `packed`, which it makes the usual one.
    importance: float = 1.0
    # Files of profiles, before the installed ones.
    profiles: tuple[str, ...] = ()
    # Copies of this machine won't do, for any request.
    force_latest: bool = False
    load_s_max: float = 10.0
    # What the engine computes in a second, for a host that tells nobody (SGLang): a load that would take longer than
    # computing is left alone. 0: as another engine on this machine has measured it for this store, if one has.
    prefill_tokens_per_s: float = 0.0

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
        settings.check_importance()
        settings.check_tail()
        if settings.state_every_tokens < 0:
            raise ValueError(f"state_every_tokens must be positive, or 0, got {settings.state_every_tokens}")
        if not 0 <= settings.follow_s < math.inf:
            raise ValueError(f"follow_s must not be negative, got {settings.follow_s}")
        if settings.match_s_max <= 0:
            raise ValueError(f"match_s_max must be positive, got {settings.match_s_max}")
        if not 0 <= settings.prefill_tokens_per_s < math.inf:
            raise ValueError(f"prefill_tokens_per_s must not be negative, got {settings.prefill_tokens_per_s}")
        if settings.device_multiprocessors <= 0 or settings.device_bytes_max < 0:
            found = (settings.device_multiprocessors, settings.device_bytes_max)
            raise ValueError(f"device_multiprocessors must be positive and device_bytes_max not negative, got {found}")
        alone = sorted({"device_multiprocessors", "device_bytes_max"} & set(options))
        if alone and not settings.device_kernels:
            raise ValueError(f"{alone[0]} is an option of the kernels: it needs device_kernels to be true")
        settings.limits()
        return settings if settings.codec else replace(settings, codec=settings.usual_codec)

    def check_stream(self) -> None:
        """ValueError for options of streaming that can't be, or that go with no streaming."""
        for name, value in (("start_within_s", self.start_within_s), ("quality", self.quality)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
        if self.quality is not None and self.start_within_s is None:
            raise ValueError("quality says when a streamed load may end early: it needs start_within_s")
        if self.policy is not None and self.start_within_s is None:
            raise ValueError("policy says what a streamed load asks for first: it needs start_within_s")
        if self.start_within_s is not None and self.load == "layers":
            raise ValueError("start_within_s streams between the engine's steps: load must be auto or async")

    def check_importance(self) -> None:
        """ValueError for a share that can't be, or beside options that load in another way."""
        if not 0 <= self.importance <= 1:
            raise ValueError(f"importance is a share of the tokens, from 0 to 1, got {self.importance!r}")
        if self.importance == 1:
            return
        if self.start_within_s is not None or self.load == "layers":
            raise ValueError("importance loads in its own way: it takes no start_within_s, and no load by layers")
        if self.codec and self.codec.partition(":")[0] != "packed":
            raise ValueError(f"importance loads what the codec packed stores, got codec {self.codec!r}")

    def check_tail(self) -> None:
        """ValueError for pieces that can't be, or beside options that load in another way."""
        if self.tail_tokens < 0:
            raise ValueError(f"tail_tokens must be positive, or 0 for none, got {self.tail_tokens}")
        if self.tail_tokens and (self.start_within_s is not None or self.importance < 1):
            raise ValueError("tail_tokens is for whole loads: it takes neither start_within_s nor importance")

    @property
    def usual_codec(self) -> str:
        """Return the codec of who names none."""
        if self.importance < 1:
            return "packed"
        return "raw" if self.is_local else "lossless"

    def request_options(self, params: Mapping[str, object] | None) -> RequestOptions:
        """Return what a request's `kv_transfer_params` ask for, where these settings say the rest."""
        params, valid, bad = dict(params or {}), dict[str, Any](), 0
        said = params.get("agent_hint")
        # One of its fields is not about the session.
        params.pop("prefetch", None)
        if isinstance(said, dict) and "prefetch" in said:
            params["prefetch"] = said["prefetch"]
        for name in _REQUEST_TYPES.keys() & params.keys():
            try:
                valid[name] = msgspec.convert(params[name], _REQUEST_TYPES[name])
            except msgspec.ValidationError:
                bad += 1
        within_s = valid.get("start_within_s", self.start_within_s)
        return RequestOptions(
            self.force_latest or valid.get("kvtide_force_latest", False),
            not valid.get("kvtide_no_load", False),
            not valid.get("kvtide_no_store", False),
            None if within_s is None else StreamOrder(within_s, valid.get("quality", self.quality)),
            valid.get("follow_s", self.follow_s),
            Hint.parse(valid.get("agent_hint")),
            valid.get("prefetch", ()),
            bad,
        )

    def stream_policy(self) -> StreamPolicy | None:
        """Return what a streamed load asks for first; None for the usual order."""
        if self.policy is None:
            return None
        # Who streams nothing needs none of it.
        from kvtide.plan.policies import policy_named

        return policy_named(self.policy)

    def read_profiles(self) -> list[Profile]:
        """Return the user's profiles, then the installed ones. ValueError for a file that is none."""
        return [*(read_profile(Path(file)) for file in self.profiles), *installed_profiles()]

    @property
    def is_local(self) -> bool:
        """Tell whether the store is on this machine."""
        return "://" not in self.store or self.store.startswith(("disk://", "memory://"))

    def check_device(self, kind: str) -> None:
        """ValueError for options that an engine on a device of this kind ("cpu", "cuda") does not take."""
        if self.load == "layers" and kind != "cpu":
            raise ValueError(f"load layers is for engines on a processor, pages on {kind} are filled by whole blocks")
        if self.tail_tokens and kind != "cpu":
            raise ValueError(f"tail_tokens is for engines on a processor, pages on {kind} are copied whole")
        if self.device_kernels and kind != "cuda":
            raise ValueError(f"device_kernels is for engines on a CUDA device, this one is on {kind}")

    def check_chunks(self) -> None:
        """ValueError for options that do nothing where the engine moves bytes of its own to and from us."""
        given = (
            ("device_kernels", self.device_kernels),
            ("load", self.load != "auto"),
            ("start_within_s", self.start_within_s is not None),
            ("importance", self.importance < 1),
            ("tail_tokens", self.tail_tokens > 0),
            ("profiles", bool(self.profiles)),
            ("force_latest", self.force_latest),
            ("follow_s", self.follow_s > 0),
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
        tokens = self.block_tokens or page_tokens * max(1, BLOCK_TOKENS_WANTED // page_tokens)
        if self.tail_tokens and (page_tokens % self.tail_tokens or self.tail_tokens == tokens):
            raise ValueError(
                f"tail_tokens must divide the engine's page of {page_tokens} tokens and be less than a block of "
                f"{tokens}, got {self.tail_tokens}"
            )
        return tokens
