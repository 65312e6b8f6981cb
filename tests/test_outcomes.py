import pytest

from kvtide.outcomes import DECISIONS_TEXT_MAX, Choice, Decided, DecisionCounter, Why, decisions_text, parse_decisions
from kvtide.plan import Way
from kvtide.store.load.access import WHY_OF_WAY
from kvtide.types import Namespace

NAMESPACE = Namespace(b"n" * 32)
COUNTS = {Decided(Choice.LOAD, Why.IN_TIME): 12, Decided(Choice.RECOMPUTE, Why.LINK_SLOWER): 3}


def test_counts_survive_their_text() -> None:
    assert decisions_text(COUNTS) == "load:in_time=12,recompute:link_slower=3"
    assert parse_decisions(decisions_text(COUNTS)) == COUNTS
    every = {Decided(choice, why): 10**12 for choice in Choice for why in Why}
    assert parse_decisions(decisions_text(every)) == dict.fromkeys(every, 10**9)


NO_COUNTS = "load load:in_time load:in_time=0 load:in_time=-1 load:in_time=1e3 load:in_time=1, load:why=1 a:in_time=1"


@pytest.mark.parametrize(
    "text", ["", *NO_COUNTS.split(), "load:in_time=\u0663", "load:in_time=99999999999", "load:in_time=1," * 99]
)
def test_text_that_is_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"decisions take|expected choice|is not a valid"):
        parse_decisions(text)


def test_every_kind_fits_the_bound_and_every_way_has_a_reason() -> None:
    every = {Decided(choice, why): 10**9 for choice in Choice for why in Why}
    assert len(decisions_text(every)) <= DECISIONS_TEXT_MAX
    assert len({WHY_OF_WAY[way] for way in Way}) == len(Way)
    assert all(why.meaning for why in Why)


def test_counter_tells_each_token_once() -> None:
    counter, told = DecisionCounter(), []

    def tell() -> None:
        counter.tell(lambda namespace, counts: told.append((namespace, counts)))

    counter.add(Choice.LOAD, Why.IN_TIME, 12, NAMESPACE)
    tell()
    counter.add(Choice.RECOMPUTE, Why.LINK_SLOWER, 3, NAMESPACE)
    counter.add(Choice.ABANDONED, Why.DEADLINE, 0, NAMESPACE)
    tell()
    tell()
    assert told == [(NAMESPACE, {kind: count}) for kind, count in COUNTS.items()]
    assert counter.counts() == COUNTS
    with pytest.raises(ValueError, match="0 tokens or more"):
        counter.add(Choice.LOAD, Why.IN_TIME, -1, NAMESPACE)
