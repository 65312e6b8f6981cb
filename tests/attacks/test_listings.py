"""Listings go through everybody's objects: in slices, each of which waits for its tenant's turn."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from tests.attacks.floods import GRANTS, ask
from tests.server.worlds import path_of
from tests.servers import running_server

from kvtide.server.auth import tenant_namespace
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier import ObjectInfo
from kvtide.types import BlockKey, Namespace, ObjectId

OBJECT = path_of(1)
SPACE = OBJECT.rpartition("/")[0]


@pytest.mark.parametrize("path", ["/v1", SPACE])
def test_listing_goes_in_slices_and_no_further_than_somebody_waits_for_it(path: str) -> None:
    is_over, yielded = threading.Event(), 0

    def endless() -> Iterator[ObjectInfo]:
        nonlocal yielded
        while not is_over.is_set():
            yielded += 1
            yield ObjectInfo(ObjectId(Namespace(bytes(32)), BlockKey(yielded.to_bytes(32, "big"))), 1, 0.0)

    with running_server(grants=GRANTS) as server:
        ask(server, "PUT", OBJECT, body=object_bytes(1))
        server.store.objects = endless  # type: ignore[method-assign]
        assert ask(server, "GET", path, "attacker", Kvtide_Deadline_Ms="2000")[0].status == 504
        ask(server, "GET", OBJECT)
        before = yielded
        time.sleep(0.2)
        went_on = yielded - before
        is_over.set()
    assert before > 0 and went_on <= 512


def test_listing_over_several_slices_is_whole_and_in_order() -> None:
    ids = [ObjectId(tenant_namespace("victim", object_id(1).namespace), object_id(n).key) for n in range(2000)]
    others = [ObjectId(Namespace(bytes(32)), object_id(n).key) for n in range(2000)]
    with running_server(grants=GRANTS) as server:
        server.store.objects = lambda: iter(  # type: ignore[method-assign]
            [ObjectInfo(each, 7, 0.0) for pair in zip(ids, others, strict=True) for each in pair]
        )
        first = json.loads(ask(server, "GET", SPACE)[1])["objects"]
        rest = json.loads(ask(server, "GET", f"{SPACE}?after={first[-1]['key']}")[1])["objects"]
    assert [each["key"] for each in first + rest] == sorted(each.key.hex() for each in ids)
