"""Objects that come in pieces, for tests: their heads and frames, and requests with them."""

import json
import random
from typing import Any, NamedTuple

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.types import BlockKey, Section, SectionId, SectionKind
from kvtide.wire import StoredObject, pack_object, parse_object
from kvtide.wire.receiver import frame_header
from tests.server.worlds import ask, path_of
from tests.servers import RunningServer, ServerProcess
from tests.suites.tier_suite import object_id


class Pieces(NamedTuple):
    """An object, its head, and a frame for each of its sections."""

    number: int
    data: bytes
    stored: StoredObject
    frames: list[bytes]

    @property
    def head(self) -> bytes:
        return self.stored.head

    @property
    def path(self) -> str:
        return path_of(self.number)


def pieces(number: int, sections: int = 8, size: int = 500, quality: float = 0.0, filling: int = 0) -> Pieces:
    """Make an object of sections that differ, a base and refinements; `filling` makes another version of it."""
    name, rng = object_id(number), random.Random(f"{number} {filling}")
    meta = BlockMeta(name, BlockKey(name.namespace), 0, BlockLayout(2, 1, 1, 1, KVDtype.FLOAT16), "made up")
    parts = [
        Section(SectionId(SectionKind.DATA, at // 2, at % 2, at % 2 + 1), rng.randbytes(size)) for at in range(sections)
    ]
    data = bytes(pack_object(meta, "raw-1", parts, quality=quality))
    stored = parse_object(data)
    # Their checksums are compared once, and not for each of them.
    frames = [frame_header(stored, at) + section.data for at, section in enumerate(stored.sections())]
    return Pieces(number, data, stored, frames)


def pack_frame(stored: StoredObject, position: int) -> bytes:
    return frame_header(stored, position) + stored.sections()[position].data


class PieceAnswer(NamedTuple):
    """A status, and the sections that the server lacks, or the error."""

    status: int
    missing: list[int]
    error: str = ""


def post(server: RunningServer | ServerProcess, what: Pieces, body: bytes, **headers: Any) -> PieceAnswer:
    answer, content = ask(server, "POST", what.number, body, **headers)
    found = json.loads(content or b"{}")
    return PieceAnswer(answer.status, found.get("missing", []), found.get("error", ""))


def part(server: RunningServer | ServerProcess, what: Pieces, start: int, stop: int, **headers: Any) -> bytes | None:
    """Ask for a range; None for a miss. All else than the range is a fault."""
    answer, content = ask(server, "GET", what.number, Own_Range=f"bytes={start}-{stop - 1}", **headers)
    assert answer.status in {206, 404}
    return content if answer.status == 206 else None


def has(server: RunningServer | ServerProcess, what: Pieces, **headers: Any) -> bool:
    """Ask in every way whether the whole object is here."""
    found = {ask(server, method, what.number, **headers)[0].status for method in ("HEAD", "GET")}
    namespace, key = object_id(what.number)
    keys = json.dumps({"keys": [key.hex()]}).encode()
    listed = json.loads(ask(server, "POST", f"/v1/{namespace.hex()}/exists", keys, **headers)[1])["present"][0]
    assert found == ({200} if listed else {404})
    return bool(listed)
