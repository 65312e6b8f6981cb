"""Answers requests: heads in, tiers asked, bodies out (docs/protocol.md).

Invariant: nothing of a body becomes visible to a tier before all of it has come and been verified; every buffer and
lent object is given back, whatever happens to the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvtide.clock import Clock
from kvtide.errors import CorruptPayload, RequestRefused, TierFull, TierUnavailable
from kvtide.server.auth import Caller, Gate, Scope, tenant_namespace
from kvtide.server.bodies import BodyBuffers
from kvtide.server.sender import Order, Sender
from kvtide.server.settings import ServerLimits
from kvtide.server.store import ServerStore
from kvtide.server.stream import Stream
from kvtide.tier.lend import LentObject
from kvtide.types import ObjectId
from kvtide.wire import parse_object, version_tag
from kvtide.wire.http import RequestHead, pack_response_head, parse_request_head
from kvtide.wire.protocol import (
    ByteRange,
    ObjectRoute,
    deadline_ms,
    etag,
    is_tag_matched,
    parse_range,
    parse_target,
    urgency,
)
