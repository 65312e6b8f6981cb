"""Meaning of the server's requests (docs/protocol.md): paths, tags, and the JSON of the smaller ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Self
from urllib.parse import parse_qsl

import msgspec

from kvtide.errors import RequestRefused
from kvtide.evict import Hint
from kvtide.outcomes import Decided, parse_decisions
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats


class Header(StrEnum):
    """Headers of our own, as they are asked for: in small letters."""

    DEADLINE = "kvtide-deadline-ms"
    # What a client decided about blocks since it last said so.
    DECISIONS = "kvtide-decisions"
    EPOCH = "kvtide-epoch"
    # Between regions: answer from what is here alone; ask who may know better; when the centre answered last.
    LOCAL = "kvtide-local"
    FORCE = "kvtide-force-latest"
    STALENESS = "kvtide-max-staleness"
    AS_OF = "kvtide-as-of"
    # Between servers: for which of its tenants one asks, and which generation of the namespace it means.
    TENANT = "kvtide-tenant"
    GENERATION = "kvtide-generation"
    REASON = "kvtide-reason"
    REMOVED = "kvtide-removed"
    # Advice that comes with a look-up of a prompt, by what `Hint` calls it.
    SESSION = "kvtide-session"
    SESSION_END = "kvtide-session-end"
    RETAIN = "kvtide-retain-s"
    PRIORITY = "kvtide-priority"


EXISTS_KEYS_MAX = 4096
EXISTS_BYTES_MAX = 80 * EXISTS_KEYS_MAX
LIST_MAX = 1000
_DEADLINE_MS_MAX = 3_600_000

_OBJECT_PATH = re.compile(r"/v1/([0-9a-f]{64})/([0-9a-f]{64})")
_NAMESPACE_PATH = re.compile(r"/v1/([0-9a-f]{64})(/exists|/prefetch)?")
_DECIMAL = re.compile(r"-?\d{1,12}(\.\d{1,6})?")
_RECORD_PATH = re.compile(r"/v1/records/([^/]{1,64})/([^/]{1,64})")
_NUMBER = re.compile(r"\d{1,18}")
_URGENCY = re.compile(r"(?:^|[ ,])u=([0-7])(?![^ ,;])")
_KEY = re.compile(r"[0-9a-f]{64}")

RECORD_BYTES_MAX = 1024
# Records in one answer; whoever wants more asks again from after the last one.
CHANGES_MAX = 256

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GENERATION = re.compile(r"0|[1-9]\d{0,11}")


class RecordKind(StrEnum):
    """`generation` of a namespace, which only rises; `alias`, a name for a namespace; `profile`, free text."""

    GENERATION = "generation"
    ALIAS = "alias"
    PROFILE = "profile"

    def checked(self, body: bytes | bytearray) -> str:
        """Return a record's value from a request's body. RequestRefused (400, 413) if such a record can't have it."""
        if len(body) > RECORD_BYTES_MAX:
            raise RequestRefused(413, f"a record may have {RECORD_BYTES_MAX} bytes, got {len(body)}")
        try:
            value = body.decode().strip()
        except UnicodeDecodeError as error:
            raise RequestRefused(400, "a record is UTF-8 text") from error
        form = {RecordKind.GENERATION: _GENERATION, RecordKind.ALIAS: _KEY}.get(self)
        if not value or (form is not None and not form.fullmatch(value)):
            raise RequestRefused(400, f"a {self} can't be {value[:80]!r}")
        return value


class RecordName(NamedTuple):
    """One record of the caller's tenant."""

    kind: RecordKind
    name: str

    @classmethod
    def parse(cls, kind: str, name: str) -> Self:
        """Return what a path names. RequestRefused (400) for an unknown kind or a name that it can't have."""
        if kind not in {*RecordKind}:
            raise RequestRefused(400, f"a record is one of {', '.join(RecordKind)}, got {kind[:80]!r}")
        if not (_KEY if kind == RecordKind.GENERATION else _NAME).fullmatch(name):
            raise RequestRefused(
                400, "a record's name is 1 to 64 letters, digits, dots, dashes; a generation's 64 hex digits"
            )
        return cls(RecordKind(kind), name)

    @property
    def target(self) -> str:
        """Return the path of the record."""
        return f"/v1/records/{self.kind}/{self.name}"


class RecordsRoute(NamedTuple):
    """The records whose versions are larger than `after`."""

    after: int


class Record(msgspec.Struct, frozen=True):
    """A record. Versions rise over a server's records; `tenant` is empty for one's own; no value: it was removed."""

    tenant: str
    kind: RecordKind
    name: str
    value: str
    version: int

    @property
    def tag(self) -> str:
        """Return the ETag."""
        return f'"{self.version}"'


class RecordList(msgspec.Struct, frozen=True):
    """Records in the order of their versions; `is_whole` is false if there are more.

    `version` is the largest that the server has given. `epoch` is another after each start: only then may a server know
    less than it did.
    """

    records: list[Record]
    is_whole: bool
    version: int
    epoch: str


class ExistsRoute(NamedTuple):
    """The batched look-up of a namespace."""

    namespace: Namespace


class PrefetchRoute(NamedTuple):
    """Bringing objects of a namespace to the fastest tier before they are asked for."""

    namespace: Namespace


class ListRoute(NamedTuple):
    """The objects of a namespace, at most `limit` of them, whose keys come after `after`."""

    namespace: Namespace
    after: bytes
    limit: int


class PageRoute(NamedTuple):
    """A path without anything variable in it."""

    path: str


Route = ObjectId | ExistsRoute | PrefetchRoute | ListRoute | RecordName | RecordsRoute | PageRoute


def parse_target(target: str) -> Route:
    """Return what a request's target names. RequestRefused (400, 404) for what names nothing."""
    path, _, query = target.partition("?")
    if (found := _OBJECT_PATH.fullmatch(path)) and not query:
        return ObjectId(Namespace(bytes.fromhex(found[1])), BlockKey(bytes.fromhex(found[2])))
    if found := _NAMESPACE_PATH.fullmatch(path):
        namespace = Namespace(bytes.fromhex(found[1]))
        if not found[2]:
            return _list_route(namespace, query)
        return (ExistsRoute if found[2] == "/exists" else PrefetchRoute)(namespace)
    if (found := _RECORD_PATH.fullmatch(path)) and not query:
        return RecordName.parse(found[1], found[2])
    if path == "/v1/records":
        return _records_route(query)
    if path.startswith("/v1/"):
        raise RequestRefused(400, "expected /v1/{namespace}/{key} with 64 lower-case hex digits each")
    return PageRoute(path)


def _list_route(namespace: Namespace, query: str) -> ListRoute:
    options = dict(parse_qsl(query[:256]))
    after, limit = options.pop("after", ""), options.pop("limit", str(LIST_MAX))
    if options or (after and not _KEY.fullmatch(after)) or not (limit.isdecimal() and limit.isascii()):
        raise RequestRefused(400, "a listing takes after=KEY and limit=N")
    return ListRoute(namespace, bytes.fromhex(after), max(1, min(int(limit[:9]), LIST_MAX)))


def _records_route(query: str) -> RecordsRoute:
    options = dict(parse_qsl(query[:64]))
    after = options.pop("after", "0")
    if options or not (after.isascii() and _NUMBER.fullmatch(after)):
        raise RequestRefused(400, "a list of records takes after=VERSION")
    return RecordsRoute(int(after))


def etag(version_tag: bytes) -> str:
    """Return an object's version tag as an ETag."""
    return f'"{version_tag.hex()}"'


def is_tag_matched(if_none_match: str, tag: str) -> bool:
    """Tell whether an If-None-Match header names this tag."""
    return any(each.strip().removeprefix("W/") in {tag, "*"} for each in if_none_match.split(","))


def _stated(headers: Mapping[str, str], header: str, form: str, meaning: str) -> str | None:
    """Return a header that has a form, None without it. RequestRefused (400) if it says something else."""
    text = headers.get(header)
    if text is not None and not re.fullmatch(form, text, re.ASCII):
        raise RequestRefused(400, f"{header} {meaning}, got {text[:40]!r}")
    return text


def deadline_ms(headers: Mapping[str, str]) -> int | None:
    """Return the milliseconds after which the answer is of no use. RequestRefused (400) if it says something else."""
    meaning = f"must be from 1 to {_DEADLINE_MS_MAX}"
    text = _stated(headers, Header.DEADLINE, r"\d{1,18}", meaning)
    if text is not None and not 1 <= int(text) <= _DEADLINE_MS_MAX:
        raise RequestRefused(400, f"{Header.DEADLINE} {meaning}, got {text!r}")
    return None if text is None else int(text)


def decisions(headers: Mapping[str, str]) -> Mapping[Decided, int]:
    """Return what the client says that it decided, by blocks. RequestRefused (400) if it says something else."""
    text = headers.get(Header.DECISIONS)
    if text is None:
        return {}
    try:
        return parse_decisions(text)
    except ValueError as error:
        raise RequestRefused(400, f"{Header.DECISIONS}: {error}") from error


def staleness_s(headers: Mapping[str, str]) -> float | None:
    """Return how old the knowledge of the centre may be. RequestRefused (400) if it says something else."""
    text = _stated(headers, Header.STALENESS, r"\d{1,9}(\.\d{1,6})?", "is a number of seconds")
    return None if text is None else float(text)


def generation(headers: Mapping[str, str]) -> int | None:
    """Return the generation that a request means. RequestRefused (400) if it says something else."""
    text = _stated(headers, Header.GENERATION, r"\d{1,18}", "is a number")
    return None if text is None else int(text)


def hint(headers: Mapping[str, str]) -> Hint | None:
    """Return what a request advises; None if it does not. What can't be read is passed over: advice fails nothing."""
    said: dict[str, object] = {"session": headers.get(Header.SESSION)}
    if Header.SESSION_END in headers:
        said["is_last"] = headers[Header.SESSION_END] == "1"
    for name, header in (("retain_s", Header.RETAIN), ("priority", Header.PRIORITY)):
        if _DECIMAL.fullmatch(text := headers.get(header, "").strip()) and text.isascii():
            said[name] = float(text) if "." in text else int(text)
    return Hint.parse(said)


def hint_headers(advice: Hint) -> list[tuple[str, str]]:
    """Return the headers that say what a hint does; a session's name only if a header can have it."""
    session = advice.session or ""
    headers: list[tuple[str, str]] = []
    headers += [(Header.SESSION, session)] if session.isascii() and session.strip() == session != "" else []
    headers += [(Header.SESSION_END, "1")] if advice.is_last else []
    headers += [] if advice.retain_s is None else [(Header.RETAIN, f"{advice.retain_s:.6f}")]
    return [*headers, (Header.PRIORITY, str(advice.priority))] if advice.priority else headers


def urgency(headers: Mapping[str, str]) -> int:
    """Return the urgency of RFC 9218, 0 first to 7 last; 3 if there is none that can be read, as the RFC says."""
    found = _URGENCY.search(headers.get("priority", ""))
    return int(found[1]) if found else 3


class ExistsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys to look up; of a run only the leading ones that are present may be of interest."""

    keys: list[str]
    leading_only: bool = False

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> Self:
        """Return what a batched look-up asks for. RequestRefused (400) for anything else."""
        try:
            question = msgspec.json.decode(body, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestRefused(400, f'expected {{"keys": [...]}}: {error}') from error
        if len(question.keys) > EXISTS_KEYS_MAX:
            raise RequestRefused(400, f"at most {EXISTS_KEYS_MAX} keys at once, got {len(question.keys)}")
        for key in question.keys:
            if not _KEY.fullmatch(key):
                raise RequestRefused(400, f"expected keys of 64 lower-case hex digits, got {key[:80]!r}")
        return question

    def block_keys(self) -> list[BlockKey]:
        """Return the keys as bytes."""
        return [BlockKey(bytes.fromhex(key)) for key in self.keys]


class ExistsAnswer(msgspec.Struct, frozen=True):
    """The keys that are present, and how many are before the first absent one."""

    present: list[bool]
    leading: int


class PiecesAnswer(msgspec.Struct, frozen=True):
    """Sections that an object in pieces still lacks, by their numbers in its table."""

    missing: list[int]


class ListedObject(msgspec.Struct, frozen=True):
    """One object of a listing."""

    key: str
    size: int
    last_use_s: float


class ObjectList(msgspec.Struct, frozen=True):
    """A part of a namespace's objects, ordered by key."""

    objects: list[ListedObject]


class TenantView(msgspec.Struct, frozen=True):
    """The namespaces in which a tenant has objects; the store's counters only for who may see them."""

    namespaces: list[str]
    tier: TierStats | None
