"""The one tree of errors.

KvtideError
├── UnencodableBlock            a codec can't keep this block's values: another codec stores it
├── CorruptPayload              bytes that are not what they claim to be: a miss, counted, the object removed
├── TierUnavailable             a tier can't serve now: a miss, counted, logged once
│   ├── TierFull                no room for this object: it is not stored
│   └── WrongServer             a pool's server that does not keep this object, as its newer map says
├── RequestRefused              a request that a server answers with an error, or bytes that are no HTTP head
├── DeviceFault                 a GPU can't compile or run the kernels
└── UnsupportedModel            (also ValueError) a model that kvtide can't serve; the message names the reason

A miss is None, never an error. The user's mistake is ValueError at the edge.
"""

from __future__ import annotations


class KvtideError(Exception):
    """Root of everything that kvtide itself raises, save for ValueError on bad arguments."""


class CorruptPayload(KvtideError):
    """Stored or received bytes fail a check. Never served."""


class UnencodableBlock(KvtideError):
    """A lossy codec met values that it can't keep, such as infinities, or a model shape that its profile is not of."""


class TierUnavailable(KvtideError):
    """A tier can't be opened, read or written now."""


class TierFull(TierUnavailable):
    """A tier has no room for an object, even after evicting what it may."""


class WrongServer(TierUnavailable):
    """A server of a pool sends us to another one; our map of the pool may be old."""


class DeviceFault(KvtideError):
    """A GPU, its driver or its compiler refuses the kernels."""


class RequestRefused(KvtideError):
    """A request that gets this status as its answer; the caller may come back after `retry_after_s`, if given."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class UnsupportedModel(KvtideError, ValueError):
    """The model keeps a cache that kvtide can't store and restore exactly."""
