from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.server.logs import EventKind, EventLog, Position, events_body
from kvtide.testing.tier_suite import object_id


def log_of(count: int, events_max: int = 100) -> EventLog:
    log = EventLog("e1", events_max)
    for number in range(count):
        log.append(EventKind.STORED, object_id(number).namespace, object_id(number).key.hex(), "memory")
    return log


def test_event_names_block_namespace_and_tier() -> None:
    log = EventLog("e1")
    log.append(EventKind.REMOVED, object_id(7).namespace, object_id(7).key.hex(), "disk")
    (event,) = log.since(Position("e1", 0)).events
    assert (event.sequence, event.kind, event.tier) == (0, EventKind.REMOVED, "disk")
    assert (event.key, event.namespace) == (object_id(7).key.hex(), object_id(7).namespace.hex())


@given(st.lists(st.integers(0, 12)), st.integers(1, 8), st.integers(1, 5))
def test_reader_gets_each_event_once_in_order_or_a_gap(appended: list[int], events_max: int, batch_max: int) -> None:
    log, position, expected = EventLog("e1", events_max), Position("e1", 0), 0
    for count in appended:
        for _ in range(count):
            log.append(EventKind.STORED, object_id(1).namespace, object_id(1).key.hex(), "memory")
        batch = log.since(position, batch_max)
        if batch.has_gap:
            assert batch.gap_start == expected < batch.gap_stop
            expected = batch.gap_stop
        assert [event.sequence for event in batch.events] == list(range(expected, expected + len(batch.events)))
        assert len(batch.events) <= min(batch_max, events_max)
        expected += len(batch.events)
        position = batch.next
        assert position == Position("e1", expected)


def test_reader_that_lags_is_told_what_it_missed() -> None:
    batch = log_of(10, events_max=4).since(Position("e1", 2))
    assert (batch.has_gap, batch.gap_start, batch.gap_stop) == (True, 2, 6)
    assert [event.sequence for event in batch.events] == [6, 7, 8, 9]


def test_reader_of_another_life_of_the_server_starts_over_behind_a_gap() -> None:
    batch = log_of(3).since(Position("e0", 1))
    assert (batch.has_gap, len(batch.events), batch.next) == (True, 3, Position("e1", 3))
    assert not log_of(3).since(batch.next).has_gap


def test_number_that_was_never_given_is_a_gap() -> None:
    assert log_of(3).since(Position("e1", 4)).has_gap
    assert not log_of(3).since(Position("e1", 3)).has_gap


def test_reader_without_a_position_begins_at_the_end() -> None:
    log = log_of(3)
    assert log.position(None) == log.position("") == Position("e1", 3)
    assert log.position("e1-1") == Position("e1", 2)


@pytest.mark.parametrize("text", ["7", "e1", "e1-", "e1--1", "e1-x", "e1-²", "-5", "e1-" + "9" * 30, "e 1-2"])
def test_bad_event_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="EPOCH-NUMBER"):
        log_of(1).position(text)


def test_body_is_an_event_stream() -> None:
    body = events_body(log_of(6, events_max=2).since(Position("e1", 0))).decode()
    gap, first, second, rest = body.split("\n\n")
    assert gap == 'id: e1-3\nevent: gap\ndata: {"start":0,"stop":4}'
    assert first.startswith("id: e1-4\nevent: stored\ndata: ")
    assert json.loads(second.partition("data: ")[2])["sequence"] == 5
    assert rest == ""


def test_body_of_nothing_new_is_empty() -> None:
    assert events_body(log_of(3).since(Position("e1", 3))) == b""


def test_id_of_the_last_event_read_goes_on_behind_it() -> None:
    log = log_of(5)
    body = events_body(log.since(Position("e1", 0), events_max=2)).decode()
    last_id = body.strip().rpartition("id: ")[2].partition("\n")[0]
    assert log.since(log.position(last_id)).events[0].sequence == 2
