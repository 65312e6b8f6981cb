"""A connector's options, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvtide.codec import Profile
from kvtide.config import Limits
from kvtide.engines import installed_profiles, read_profile
from kvtide.evict import Hint

# Half a block more or less decides what a prompt restores; shorter blocks cost objects.
BLOCK_TOKENS_WANTED = 128

_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class StreamOrder(NamedTuple):
    """The end of a streamed load: after so many seconds, or once the KL divergence is reached (None: the codec's)."""

    within_s: float
    quality: float | None = None


class RequestOptions(NamedTuple):
    """A request's own options; those that were `bad` are left out. follow_s: wait for another engine's next block."""

    is_latest: bool = False
    may_load: bool = True
    may_store: bool = True
    stream: StreamOrder | None = None
    follow_s: float = 0.0
    hint: Hint | None = None
    bad: int = 0


# Of a request that says nothing, with settings that do not either.
NO_OPTIONS = RequestOptions()
# What a request may say, in a mapping that other connectors read too.
_REQUEST_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("kvtide_force_latest", "kvtide_no_load", "kvtide_no_store"), bool),
    **dict.fromkeys(("start_within_s", "quality", "follow_s"), _Seconds),
    "agent_hint": dict[str, Any],
}

# Of a piece of a prompt's tail, where nobody says another number.
TAIL_TOKENS = 16
# Options of who fills the engine's pages.
_OF_PAGES = {"device_kernels", "load", "start_within_s", "tail_tokens", "profiles", "force_latest", "follow_s"}


def usual_codec(store: str) -> str:
    """Return the codec of who names none: what is read from this machine is read faster than it is decoded."""
    return "raw" if is_local(store) else "lossless"


def is_local(store: str) -> bool:
    """True for a store on this machine."""
    return "://" not in store or store.startswith(("disk://", "memory://"))


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A connector's options.

    load: `async` between the engine's steps; `layers` within a step, each layer waiting for its own keys and values;
    `auto`: `layers` for a lone request and a store of this machine, on a processor, else `async`.
    """

    # A store URL.
    store: str
    # "" to choose: `raw` for a store on this machine, which is read faster than it is decoded, else `lossless`.
    codec: str = ""
    # 0 to choose.
    block_tokens: _Count = 0
    # What a prompt has behind its last full block is stored too, in pieces of so many tokens, while the store has room
    # for more than blocks. 0: it is computed again. None: 16 for a store on this machine where parts of pages can be.
    tail_tokens: _Count | None = None
    # Layers that keep states: one is kept after so many tokens at the most, where a step of the engine ends with it.
    # 0: every 4,096 tokens, or rarer, so that states take no more room than the rows between them.
    state_every_tokens: _Count = 0
    tenant_salt: str = ""
    fingerprint: str = ""
    load: Literal["auto", "async", "layers"] = "auto"
    memory_bytes_max: int = Limits().memory_bytes_max
    disk_bytes_max: int = Limits().disk_bytes_max
    store_queue_bytes_max: int = Limits().store_queue_bytes_max
    load_threads: int = Limits().load_threads
    # On a GPU: kvtide's kernels instead of torch's copies. "auto": where they are proved at the start, and faster.
    device_kernels: Literal["auto", "on", "off"] = "auto"
    # With them: how many multiprocessors copying and decoding may fill, and how much of the memory holds objects.
    device_multiprocessors: Annotated[int, Meta(gt=0)] = 32
    device_bytes_max: _Count = 0
    # Wait for a prefix that another engine is computing and storing, as long as its next block comes within so many
    # seconds, and what is left comes sooner than it would be computed.
    follow_s: _Seconds = 0.0
    # A look-up or load that has no better bound is given up after this long, and the engine computes.
    match_s_max: Annotated[float, Meta(gt=0)] = 0.5
    # Stream stored prefixes: the first token comes so many seconds after a request, on what has come of them by then,
    # or earlier once the quality (a KL divergence; by default the codec's) is reached. None to load whole blocks.
    start_within_s: _Seconds | None = None
    quality: _Seconds | None = None
    # Files of profiles, before the installed ones.
    profiles: tuple[str, ...] = ()
    # Copies of this machine won't do, for any request.
    force_latest: bool = False
    load_s_max: float = 10.0
    # What the engine computes in a second, for a host that tells nobody (SGLang): a load that would take longer than
    # computing is left alone. 0: as another engine on this machine has measured it for this store, if one has.
    prefill_tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> ConnectorSettings:
        """Return the settings in a mapping. ValueError for an unknown option, a bad value or no store."""
        try:
            settings = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"bad kvtide option: {error}") from error
        settings._check_together(options.keys())
        settings.limits()
        return settings if settings.codec else replace(settings, codec=usual_codec(settings.store))

    def _check_together(self, given: Collection[str]) -> None:
        """ValueError for options that would do nothing, or that exclude each other."""
        is_streamed = self.start_within_s is not None
        for name in ("device_bytes_max", "device_multiprocessors"):
            if name in given and self.device_kernels == "off":
                raise ValueError(f"{name} is an option of the kernels: it needs device_kernels to be auto or on")
        if self.quality is not None and not is_streamed:
            raise ValueError("quality says when a streamed load may end early: it needs start_within_s")
        if is_streamed and self.load == "layers":
            raise ValueError("start_within_s streams between the engine's steps: load must be auto or async")
        if self.tail_tokens and is_streamed:
            raise ValueError("tail_tokens is for whole loads: it takes no start_within_s")

    def request_options(self, params: Mapping[str, object] | None) -> RequestOptions:
        """Return what a request's `kv_transfer_params` ask for, where these settings say the rest."""
        params, valid, bad = params or {}, dict[str, Any](), 0
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
            bad,
        )

    def read_profiles(self) -> list[Profile]:
        """Return the user's profiles, then the installed ones. ValueError for a file that is none."""
        return [*(read_profile(Path(file)) for file in self.profiles), *installed_profiles()]

    def check_device(self, kind: str) -> None:
        """ValueError for options that an engine on a device of this kind ("cpu", "cuda") does not take."""
        if self.load == "layers" and kind != "cpu":
            raise ValueError(f"load layers is for engines on a processor, pages on {kind} are filled by whole blocks")
        if self.tail_tokens and kind != "cpu":
            raise ValueError(f"tail_tokens is for engines on a processor, pages on {kind} are copied whole")
        if (self.device_kernels == "on" or self.device_bytes_max) and kind != "cuda":
            name = "device_bytes_max" if self.device_bytes_max else "device_kernels"
            raise ValueError(f"{name} is for engines on a CUDA device, this one is on {kind}")

    def check_chunks(self) -> None:
        """ValueError for options that do nothing where the engine moves bytes of its own to and from us."""
        for field in msgspec.structs.fields(self):
            if field.name in _OF_PAGES and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is an option of vLLM's connector: here the engine fills its pages")

    def limits(self) -> Limits:
        """Return the bounds of the cache. ValueError for one that is not positive."""
        own = {name: getattr(self, name) for name in Limits.__struct_fields__ if name in self.__struct_fields__}
        return Limits(**{**own, "device_bytes_max": self.device_bytes_max or Limits().device_bytes_max})

    @property
    def kept_bytes_max(self) -> int:
        """The share of the memory for blocks as the engine's pages hold them; the rest is the memory tier's."""
        return self.memory_bytes_max // 2

    def tail_tokens_for(self, page_tokens: int, is_possible: bool) -> int:
        """Return the tokens of a piece. is_possible: parts of this model's pages can be stored."""
        if self.tail_tokens is not None:
            return self.tail_tokens
        is_usual = is_possible and is_local(self.store) and self.start_within_s is None
        return TAIL_TOKENS if is_usual and page_tokens > TAIL_TOKENS and page_tokens % TAIL_TOKENS == 0 else 0

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
