import json
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.block import BlockLayout
from kvtide.cli.app import app
from kvtide.cli.explain import MatchVerdict, explain_prompt
from kvtide.cli.store import read_header, read_object
from kvtide.codec import CodecRegistry
from kvtide.codec.published import CachegenCodec
from kvtide.errors import CorruptPayload
from kvtide.outcomes import DECISIONS_TEXT_MAX, Choice, Decided, DecisionCounter, Why, decisions_text, parse_decisions
from kvtide.server.auth import stored_namespace
from kvtide.store.cache import Cache
from kvtide.types import Namespace, ObjectId
from kvtide.wire import pack_object
from tests.codec.test_quantise import fitted
from tests.store.test_cache import OpenCache, fill, metas_of
from tests.stores import open_memory, stored_records
from tests.suites import namespace, smooth_bits
from tests.suites.tier_suite import object_bytes, object_id

PROMPT = range(70)  # four full blocks of 16, and 6 tokens


@pytest.fixture
def stored(layout: BlockLayout, open_cache: OpenCache) -> Cache:
    cache = open_cache()
    fill(cache, metas_of(layout, 4))
    cache.tiers._places[0].tier.close()  # what memory still has must not hide the disk
    return cache


@pytest.mark.parametrize(
    ("prompt", "model", "hit_blocks", "verdict"),
    [
        (PROMPT, None, 4, MatchVerdict.ALL_FULL_BLOCKS),
        (range(5), None, 0, MatchVerdict.SHORTER_THAN_BLOCK),
        ([*range(32), *range(100, 132)], None, 2, MatchVerdict.NEVER_STORED),
        (PROMPT, "another model", 0, MatchVerdict.OTHER_NAMESPACE),
    ],
)
def test_verdict_is_named(
    stored: Cache, prompt: Sequence[int], model: str | None, hit_blocks: int, verdict: MatchVerdict
) -> None:
    found = explain_prompt(stored.tiers, namespace(model) if model else namespace(), prompt, 16)
    assert (found.hit_blocks, found.hit_tokens, found.verdict) == (hit_blocks, 16 * hit_blocks, verdict)
    assert found.elsewhere == ((namespace(),) if model else ())
    assert (found.first_missing is None) == (verdict in (MatchVerdict.ALL_FULL_BLOCKS, MatchVerdict.SHORTER_THAN_BLOCK))


@pytest.mark.parametrize("reason", ["evicted", "corrupt", "removed"])
def test_removed_block_is_explained_by_the_journal(reason: str, stored: Cache, layout: BlockLayout) -> None:
    stored.tiers.delete(metas_of(layout, 2)[1].id, reason)
    found = explain_prompt(stored.tiers, namespace(), PROMPT, 16)
    assert (found.hit_blocks, found.verdict) == (1, MatchVerdict[reason.upper()])


def test_corrupt_block_is_named_and_left(stored: Cache, tmp_path: Path) -> None:
    for record in stored_records(tmp_path):
        record.write_body(b"garbage" * 100)
    assert explain_prompt(stored.tiers, namespace(), PROMPT, 16).verdict is MatchVerdict.CORRUPT_NOW
    assert len(stored_records(tmp_path)) == 4


def test_profile_that_is_not_here_is_named(tmp_path: Path, layout: BlockLayout, open_cache: OpenCache) -> None:
    profile, bits = fitted("cachegen", layout), smooth_bits(layout, 1)
    tier = open_cache(tmp_path).tiers
    meta, codec = metas_of(layout, 1)[0], CachegenCodec(profile=profile)
    tier.put_from(meta.id, pack_object(meta, codec.codec_id, codec.encode(meta, bits), profile.digest))
    found = explain_prompt(tier, namespace(), PROMPT, 16, CodecRegistry())
    assert (found.hit_blocks, found.verdict) == (0, MatchVerdict.CODEC_ABSENT)
    assert found.needs.startswith(f"codec cachegen-2 with profile {profile.digest.hex()[:16]}, of model ")
    assert explain_prompt(tier, namespace(), PROMPT, 16, CodecRegistry([profile])).hit_blocks == 1
    (tmp_path / "mine").write_bytes(profile.to_bytes())
    for files, where in (([], ""), (["--profile", str(tmp_path / "mine")], str(tmp_path / "mine"))):
        said = CliRunner().invoke(app, ["profile", "ls", *files, "--json", "--store", str(tmp_path)]).stdout
        (row,) = json.loads(said)["rows"]
        assert (row["profile"], row["objects"], row["found"]) == (profile.digest.hex(), 1, where)


def test_object_of_a_tenant_is_no_problem_and_one_of_another_key_is(stored: Cache, layout: BlockLayout) -> None:
    first, second = metas_of(layout, 2)
    data = bytearray(1 << 20)
    packed = data[: stored.tiers.get_into(first.id, memoryview(data))]
    hashed = stored_namespace("a", first.id.namespace)
    for key in (first.id.key, second.id.key):
        stored.tiers.put_from(ObjectId(hashed, key), packed)
    for read in (read_header, read_object):
        found = read(stored.tiers, ObjectId(hashed, first.id.key))
        assert found is not None and found.meta.id == first.id
        with pytest.raises(CorruptPayload, match="the bytes are those of"):
            read(stored.tiers, ObjectId(hashed, second.id.key))


def test_header_that_says_too_much_takes_no_memory() -> None:
    tier = open_memory()
    tier.put_from(object_id(1), object_bytes(1, 64 << 20)[:5000])
    tracemalloc.start()
    with pytest.raises(CorruptPayload, match="5000 came"):
        read_object(tier, object_id(1))
    peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert peak < 8 << 20


NAMESPACE = Namespace(b"n" * 32)
COUNTS = {Decided(Choice.LOAD, Why.IN_TIME): 12, Decided(Choice.RECOMPUTE, Why.LINK_SLOWER): 3}


def test_counts_survive_their_text_which_fits_the_bound() -> None:
    assert decisions_text(COUNTS) == "load:in_time=12,recompute:link_slower=3"
    assert parse_decisions(decisions_text(COUNTS)) == COUNTS
    every = {Decided(choice, why): 10**12 for choice in Choice for why in Why}
    assert parse_decisions(decisions_text(every)) == dict.fromkeys(every, 10**9)
    assert len(decisions_text(every)) <= DECISIONS_TEXT_MAX


NO_COUNTS = "load load:in_time load:in_time=0 load:in_time=-1 load:in_time=1e3 load:in_time=1, load:why=1 a:in_time=1"


@pytest.mark.parametrize(
    "text", ["", *NO_COUNTS.split(), "load:in_time=\u0663", "load:in_time=99999999999", "load:in_time=1," * 99]
)
def test_text_that_is_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"decisions take|expected choice|is not a valid"):
        parse_decisions(text)


def test_every_way_has_a_reason() -> None:
    assert all(why.meaning for why in Why)


def test_counter_tells_each_token_once() -> None:
    counter, told = DecisionCounter(), []
    tell = partial(counter.tell, lambda namespace, counts: told.append((namespace, counts)))
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
