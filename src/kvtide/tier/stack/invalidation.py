"""Invalidations declared by servers, carried out in an engine's own tiers too (docs/protocol.md, "Records").

Invariant: a namespace counts as dealt with only once none of its objects that were in the own tiers is left there, and
none that was on its way there can come any more (generations.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.background import LastingFault, Repeater
from kvtide.tier.base import Tier
from kvtide.tier.files import Files
from kvtide.tier.http.records import RecordsClient
from kvtide.tier.stack.generations import LANDING_S_MAX, Generations
from kvtide.types import NamedId, Namespace, ObjectId
from kvtide.wire.protocol import RecordKind

_log = logging.getLogger(__name__)

_POLL_S = 5.0
# An engine that starts waits this long for what happened while it was away.
_FIRST_S_MAX = 1.0
# Another engine's bytes land within this, mostly.
_LOCK_S = 0.02
_REASON = "invalidated"
# What was dealt with, in a file: some 70 bytes a namespace.
_FILE_BYTES_MAX = 16 << 20

_Generations = dict[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], int]


class SharedInvalidations:
    """Generations that engines on one store have begun to remove what is older of, in a file beside its objects.

    Invariant: once `begin` has returned, nothing older lands in the store, whichever engine has not heard of it yet:
    each reads the file under a lock of the namespace, which it holds with others while bytes land.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._path = folder / "invalidating"
        self._seen: tuple[object, _Generations] = (None, {})

    def begun(self) -> _Generations:
        """Return what the file says, read again only if it has changed."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - asked for each write
        except OSError:
            return {}
        state, (seen, begun) = (found.st_ino, found.st_mtime_ns, found.st_size), self._seen
        if seen != state:
            begun = _remembered(self._path)
            self._seen = (state, begun)
        return begun

    def begin(self, raised: Mapping[str, int]) -> None:
        """Add generations. TierUnavailable if older bytes land without end, OSError if it can't be written."""
        with self._alone("file"):
            begun = self.begun()
            added = {name: max(value, begun.get(name, 0)) for name, value in raised.items()}
            Files().save(self._path, msgspec.json.encode(begun | added))
        for lock in {name[0] for name in raised}:
            # What had begun to land has landed then.
            with self._alone(lock):
                pass

    @contextmanager
    def landing(self, object_id: ObjectId) -> Iterator[bool]:
        """Yield whether bytes of this id may come to the store; they may where nobody can write to it."""
        may_land, namespace = True, object_id.namespace.hex()
        with ExitStack() as stack:
            with suppress(OSError):
                descriptor = stack.enter_context(self._opened(namespace[0]))
                may_land = False
                if Files().try_lock(descriptor, is_shared=True):
                    # Not by closing: a child that was forked meanwhile has it open too.
                    stack.callback(Files().unlock, descriptor)
                    begun = self.begun().get(namespace, 0)
                    may_land = not isinstance(object_id, NamedId) or begun <= object_id.name.generation
            yield may_land

    def _opened(self, lock: str) -> AbstractContextManager[int]:
        return Files().opened(self._folder / f"invalidating.{lock}.lock", os.O_RDWR | os.O_CREAT)

    @contextmanager
    def _alone(self, lock: str) -> Iterator[None]:
        last_s = self._clock.monotonic_s() + LANDING_S_MAX
        with self._opened(lock) as descriptor:
            while not Files().try_lock(descriptor):
                if self._clock.monotonic_s() > last_s:
                    raise TierUnavailable(f"another engine writes to the store for more than {LANDING_S_MAX} s")
                threading.Event().wait(_LOCK_S)
            yield


class Invalidations:
    """Asks servers which generation each namespace is at, and empties the own tiers of what is older.

    `clients` finds the servers. What was dealt with is remembered in `path`, for tiers that outlive the process;
    without it, and for a namespace that it does not name, everything stored of one that was ever invalidated goes.
    """

    def __init__(
        self, clients: Callable[[], Sequence[RecordsClient]], own: Sequence[Tier], path: Path | None, clock: Clock
    ) -> None:
        self._find_clients = clients
        self._own = list(own)
        self._served: list[Tier] = []
        self._shared = SharedInvalidations(path.parent, clock) if path is not None else None
        self.generations = Generations(own, self._shared.landing) if self._shared is not None else Generations(own)
        self._path = path
        self._known: _Generations = {}
        self._clients: list[tuple[RecordsClient, int]] = []
        self._asked = threading.Event()
        self._asking = Repeater(self._ask, "kvtide-invalidations")
        self._fault = LastingFault(_log, "can't learn what was invalidated, own tiers stay as they are")

    def open(self, tiers: Sequence[Tier]) -> None:
        """Begin to ask, for those of the own tiers that are open; return after the first answer, or _FIRST_S_MAX."""
        self._served = [tier for tier in self._own if tier in tiers]
        self._asked.clear()
        self._known = _remembered(self._path)
        self.generations.adopt(_by_namespace(self._known))
        self._asking.open()
        self._asked.wait(_FIRST_S_MAX)

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        for client, _ in self._clients:
            client.close()
        self._clients = []

    def _ask(self) -> float:
        with self._fault.caught(TierUnavailable, RequestRefused, OSError, ValueError):
            self.refresh()
        self._asked.set()
        return _POLL_S

    def refresh(self) -> None:
        """Ask every server, then remove what the others named even if one could not be asked.

        TierUnavailable or RequestRefused if one can't be asked or a tier can't remove, OSError if it can't be noted.
        """
        if not self._clients:
            self._clients = [(client, 0) for client in self._find_clients()]
            for client, _ in self._clients:
                client.open()
        # What another engine on this store has begun counts as heard.
        raised = dict(self._shared.begun()) if self._shared is not None else _Generations()
        faults, asked = list[Exception](), self._clients.copy()
        for position, (client, after) in enumerate(asked):
            try:
                asked[position] = (client, self._changed(client, after, raised))
            except (TierUnavailable, RequestRefused) as error:
                faults.append(error)
        self._forget({name: value for name, value in raised.items() if value > self._known.get(name, 0)})
        self._clients = asked
        if len(faults) == len(asked):
            # A pool may have other servers by now: they are looked for again, and asked for everything.
            for client, _ in asked:
                client.close()
            self._clients = []
        if faults:
            raise faults[0]

    def _changed(self, client: RecordsClient, after: int, raised: _Generations) -> int:
        found = client.changes(after)
        if found.version < after:
            # It has lost its records: what it writes now is told again.
            after, found = 0, client.changes()
        for each in found.records:
            if each.kind is RecordKind.GENERATION:
                raised[each.name] = max(raised.get(each.name, 0), int(each.value))
        return found.records[-1].version if found.records else after

    def _forget(self, raised: Mapping[str, int]) -> None:
        if not raised:
            return
        gone = _by_namespace(raised)
        self.generations.begin(gone.keys())
        if self._shared is not None:
            # A full disk must not keep what makes room on it from being removed.
            with suppress(OSError):
                self._shared.begin(raised)
        for tier in self._served:
            here: list[ObjectId] = [info.id for info in tier.objects() if info.id.namespace in gone]
            removed = sum(tier.delete(object_id, _REASON) for object_id in here)
            if removed:
                _log.info("removed %d objects of invalidated namespaces from %s", removed, tier.name)
        self.generations.adopt(gone)
        self._known |= raised
        if self._path is not None:
            Files().save(self._path, msgspec.json.encode(self._known))


def _by_namespace(generations: Mapping[str, int]) -> dict[Namespace, int]:
    return {Namespace(bytes.fromhex(name)): generation for name, generation in generations.items()}


def _remembered(path: Path | None) -> _Generations:
    """Return what the file says; nothing if it can't be read: then too much is removed, never too little."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(Files().content(path, _FILE_BYTES_MAX), type=_Generations)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _log.warning("what was invalidated before can't be read and is asked for anew: %s", error)
        return {}
