"""The one tree of errors.

KvtideError
├── UnencodableBlock            a codec can't keep this block's values: another codec stores it
├── CorruptPayload              bytes that are not what they claim to be: a miss, counted, the object removed
├── TierUnavailable             a tier can't serve now: a miss, counted, logged once
│   └── TierFull                no room for this object: it is not stored
├── QueueFull                   a tenant has as much waiting as it may: try again later
└── UnsupportedModel            (also ValueError) a model that kvtide can't serve; the message names the reason

A miss is None, never an error. The user's mistake is ValueError at the edge.
"""

from __future__ import annotations

__all__ = [
    "CorruptPayload",
    "KvtideError",
    "QueueFull",
    "TierFull",
    "TierUnavailable",
    "UnencodableBlock",
    "UnsupportedModel",
]


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


class QueueFull(KvtideError):
    """A tenant may not queue more now."""


class UnsupportedModel(KvtideError, ValueError):
    """The model keeps a cache that kvtide can't store and restore exactly."""
