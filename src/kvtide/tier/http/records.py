"""Records on servers, for their clients and for a region that asks its centre (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.base import POOL_SCHEMES
from kvtide.tier.http.peer import Call, Endpoint, HttpAnswer, Patience, Peer, PeerSettings, servers_of
from kvtide.tier.http.tier import OPERATION_S_MAX
from kvtide.tier.pool import server_urls
from kvtide.wire.http import Headers
from kvtide.wire.protocol import Header, Record, RecordKind, RecordList, RecordName

_VERSION_DIGITS_MAX = 18
# Requests for one generation.
STEPS_MAX = 10_000
# No server has more records.
_LISTED_MAX = 1 << 17


class RecordsClient(Peer):
    """One server's records. TierUnavailable if it can't be asked, RequestRefused for what it answers with an error."""

    def __init__(self, endpoint: Endpoint, headers: Headers, clock: Clock, operation_s_max: float) -> None:
        super().__init__(endpoint, headers, PeerSettings(), clock)
        self._operation_s_max = operation_s_max

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, name: RecordName, is_latest: bool = False, headers: Headers = ()) -> Record | None:
        """Return a record, None if there is none; the centre's if `is_latest`."""
        answer = self._ask("GET", name.target, [*headers, (Header.FORCE, "1")] if is_latest else headers)
        return None if answer.status == 404 else _record(name, answer, answer.body)

    def write(self, name: RecordName, value: str, headers: Headers = ()) -> Record:
        """Write a record; return it as it is then."""
        answer = self._ask("PUT", name.target, headers, value.encode())
        return _record(name, answer, answer.body)

    def remove(self, name: RecordName, headers: Headers = ()) -> Record | None:
        """Remove a record; return the one that tells others of it, None if there was none."""
        answer = self._ask("DELETE", name.target, headers)
        return None if answer.status == 404 else _record(name, answer, b"")

    def changes(self, after: int = 0, epoch: str = "") -> RecordList:
        """Return all that was written after a version of the server's epoch."""
        found = self._part(after, epoch)
        records, part = found.records, found
        while not part.is_whole and part.records:
            part = self._part(records[-1].version, found.epoch)
            if part.epoch != found.epoch:
                raise TierUnavailable(f"{self} began anew while it was asked")
            records += part.records
            if len(records) > _LISTED_MAX:
                raise TierUnavailable(f"{self} lists more than {_LISTED_MAX} records")
        return msgspec.structs.replace(found, is_whole=True)

    def _part(self, after: int, epoch: str) -> RecordList:
        answer = self._ask("GET", f"/v1/records?after={after}", [("If-None-Match", f'"{epoch}.{after}"')])
        if answer.status == 304:
            return RecordList([], True, after, epoch)
        try:
            found = msgspec.json.decode(answer.body, type=RecordList)
            for each in found.records:
                RecordName.parse(each.kind, each.name)
                if each.value or each.kind is RecordKind.GENERATION:
                    each.kind.checked(each.value.encode())
        except (msgspec.DecodeError, UnicodeError, RecursionError, RequestRefused) as error:
            raise TierUnavailable(f"the server's records can't be read: {error}") from error
        return found

    def _ask(self, method: str, target: str, headers: Headers, body: bytes = b"") -> HttpAnswer:
        patience = Patience(self._clock, self._clock.monotonic_s() + self._operation_s_max)
        answer = self.call(Call(method, target, headers, body), patience)
        if answer.status in {200, 204, 304} or (answer.status == 404 and method != "PUT"):
            return answer
        raise RequestRefused(answer.status, f"{self} refused: {answer.reason}")

    def __str__(self) -> str:
        return str(self.endpoint)


def _record(name: RecordName, answer: HttpAnswer, body: bytes) -> Record:
    version = answer.headers.get("etag", "").strip('"')
    if not (version.isascii() and version.isdecimal() and len(version) <= _VERSION_DIGITS_MAX):
        raise TierUnavailable("the server's record has no version")
    try:
        return Record("", name.kind, name.name, name.kind.checked(body) if body else "", int(version))
    except RequestRefused as error:
        raise TierUnavailable(f"the server's record can't be read: {error}") from error


def records_clients(url: str, clock: Clock, operation_s_max: float = OPERATION_S_MAX) -> list[RecordsClient]:
    """Return an unopened client of each server of a URL. ValueError; TierUnavailable without a pool's map."""
    clients: list[RecordsClient] = []
    for each in server_urls(url) if urlsplit(url).scheme in POOL_SCHEMES else [url]:
        servers = servers_of(each)
        clients += [RecordsClient(place, servers.headers, clock, operation_s_max) for place in servers.endpoints]
    return clients


def raise_generation(clients: Sequence[RecordsClient], namespace: str) -> int:
    """Raise a namespace's generation above all that these servers know, on all of them, and return it.

    May be repeated. TierUnavailable if one can't be asked; others may have it then.
    """
    name = RecordName(RecordKind.GENERATION, namespace)
    found = [client.read(name, is_latest=True) for client in clients]
    generation = 1 + max((int(each.value) for each in found if each is not None), default=0)
    for client in clients:
        raise_to(client, name, generation)
    return generation


def raise_to(client: RecordsClient, name: RecordName, generation: int, headers: Headers = ()) -> Record:
    """Raise a generation on one server, step by step if it takes no larger one."""
    try:
        return client.write(name, str(generation), headers)
    except RequestRefused as error:
        found = client.read(name, headers=headers)
        known = int(found.value) if found else 0
        if error.status != 409 or not known + 1 < generation <= known + STEPS_MAX:
            raise
    for each in range(known + 1, generation):
        client.write(name, str(each), headers)
    return client.write(name, str(generation), headers)


def backed_up(clients: Sequence[RecordsClient]) -> list[Record]:
    """Return all records that these servers show us: the largest generation of each, the latest version of others."""
    found: dict[tuple[str, RecordName], Record] = {}
    for client in clients:
        for each in client.changes().records:
            place = (each.tenant, RecordName(each.kind, each.name))
            if place not in found or _rank(each) > _rank(found[place]):
                found[place] = each
    return [record for record in found.values() if record.value]


def _rank(record: Record) -> int:
    return int(record.value) if record.kind is RecordKind.GENERATION else record.version


def restore(clients: Sequence[RecordsClient], records: Sequence[Record]) -> None:
    """Write backed-up records; a generation that is higher by now stays. RequestRefused (403) for others' tenants."""
    for client in clients:
        for each in records:
            name, whose = RecordName(each.kind, each.name), [(Header.TENANT, each.tenant)] if each.tenant else []
            if each.kind is RecordKind.GENERATION:
                raise_to(client, name, int(each.value), whose)
            else:
                client.write(name, each.value, whose)
