"""The one tree of errors. A miss is None, never an error; the user's mistake is ValueError at the edge."""

from __future__ import annotations


class KvtideError(Exception):
    """Root of everything that kvtide itself raises, save for ValueError on bad arguments."""


class CorruptPayload(KvtideError):
    """Stored or received bytes are not what they claim to be: a miss, counted, the object removed. Never served."""


class UnencodableBlock(KvtideError):
    """A lossy codec met infinities, or a model shape that its profile is not of: another codec stores the block."""


class TierUnavailable(KvtideError):
    """A tier can't be opened, read or written now: a miss, counted, logged once."""


class TierFull(TierUnavailable):
    """A tier has no room for an object, even after evicting what it may: it is not stored."""


class WrongServer(TierUnavailable):
    """A server of a pool sends us to another one, by its newer map."""


class NotAllowed(TierUnavailable):
    """A server will not do what we ask for, however often we ask."""


class DeviceFault(KvtideError):
    """A GPU, its driver or its compiler refuses the kernels."""


class RequestRefused(KvtideError):
    """A request, or no HTTP head, that gets this status; the caller may come back after `retry_after_s`, if given."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class UnsupportedModel(KvtideError, ValueError):
    """The model keeps a cache that kvtide can't store and restore exactly; the message names the reason."""
