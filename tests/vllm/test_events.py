"""KV events without an engine: what routers read of them, and that what leaves is withdrawn.

What llm-d and Dynamo read: llm-d/llm-d-kv-cache `pkg/kvevents/engineadapter/vllm_adapter.go` with its pull request 661
(maps since vLLM's pull request 42892; hashes as bytes or numbers, of bytes the last eight, big-endian; a missing field
is nil); ai-dynamo/dynamo `lib/kv-router/src/zmq_wire` (maps with the tag in `type`; a medium it does not know is the
device) and `StorageTier::from_kv_medium` in its `protocols.rs` ("STORAGE" is its disk, "CPU" its host memory).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtide.engines.paged import BlockRef, StepCommands, WorkerReport
from kvtide.engines.paged.sequence import LoadOrder, StoreOrder
from kvtide.engines.vllm.events import BlockEvents
from kvtide.store import Move
from kvtide.types import BlockKey, Namespace, ObjectId

PAGE, BLOCK = 4, 8
KEYS = [BlockKey(bytes([each]) * 16) for each in range(3)]
DYNAMO_TIERS = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}


def _blocks() -> list[BlockRef]:
    return [BlockRef((ObjectId(Namespace(bytes(16)), key),), (key,), place * BLOCK) for place, key in enumerate(KEYS)]


def _request(**changes: Any) -> Any:
    hashes = [bytes([each]) * 32 for each in range(1, 7)]
    said = {"block_hashes": hashes, "all_token_ids": list(range(26)), "cache_salt": None, "session_id": "talk"}
    said |= {"lora_request": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(**{**said, **changes})


@pytest.fixture
def events() -> Any:
    shape: Any = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=16)]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return BlockEvents(SimpleNamespace(kv_cache_groups=groups, hash_block_size=PAGE), BLOCK, "disk")


def _stored(events: Any, request: Any, blocks: list[BlockRef]) -> None:
    stores = tuple(StoreOrder("r", block, ()) for block in blocks)
    events.ordered(StepCommands(1, (), stores, is_idle=False), {"r": request})


def _moved(events: Any, *moves: Move) -> None:
    events.heard(WorkerReport(1, moves=moves))


def _wire(events: Any) -> list[dict[str, Any]]:
    """Return what a router decodes of what vLLM's publisher sends."""
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events.take()), data_parallel_rank=0))
    _, found, rank = msgspec.msgpack.decode(sent)
    assert rank == 0
    return list(found)


def test_llm_d_reads_the_block_its_parent_its_tier_and_its_group(events: Any) -> None:
    _stored(events, _request(), _blocks())
    _moved(events, Move(KEYS[1], "disk", True))
    full, window = _wire(events)
    assert full["type"] == "BlockStored"
    # Numbers of the last eight bytes, unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0.
    assert full["block_hashes"] == [0x0303030303030303, 0x0404040404040404]
    assert full["parent_block_hash"] == 0x0202020202020202
    assert (full["token_ids"], full["block_size"], full["medium"]) == (list(range(8, 16)), PAGE, "STORAGE")
    assert [each["group_idx"] for each in (full, window)] == [0, 1]
    assert [each["kv_cache_spec_kind"] for each in (full, window)] == ["full_attention", "sliding_window"]
    assert window["kv_cache_spec_sliding_window"] == 16
    assert full["session_id"] == "talk"


def test_dynamo_tells_host_memory_disk_and_servers_from_the_device(events: Any) -> None:
    _stored(events, _request(), _blocks())
    tiers = ("memory", "disk", "http-2")
    _moved(events, *(Move(KEYS[0], tier, True) for tier in tiers))
    found = _wire(events)[::2]
    assert [DYNAMO_TIERS[each["medium"]] for each in found] == ["host", "disk", "disk"]
    assert [each["locality"] for each in found] == ["LOCAL", "LOCAL", "REMOTE"]
    # It drops events that name a block twice.
    assert all(len({each["parent_block_hash"], *each["block_hashes"]}) == 3 for each in found)


def test_what_leaves_is_withdrawn_once_by_the_hashes_that_announced_it(events: Any) -> None:
    _stored(events, _request(), _blocks())
    _moved(events, Move(KEYS[0], "disk", True), Move(KEYS[0], "disk", True), Move(KEYS[0], "memory", True))
    stored = _wire(events)
    assert len(stored) == 4
    _moved(events, Move(KEYS[0], "memory", False), Move(KEYS[0], "memory", False), Move(KEYS[2], "disk", False))
    events.heard(WorkerReport(1, lost=(KEYS[0],)))
    removed = _wire(events)
    assert [(each["type"], each["medium"]) for each in removed[::2]] == [
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "STORAGE"),
    ]
    assert all(each["block_hashes"] == stored[0]["block_hashes"] for each in removed)
    assert events.take_counts() == {"block_events|stored|STORAGE": 1, "block_events|stored|CPU": 1} | {
        "block_events|removed|CPU": 1,
        "block_events|removed|STORAGE": 1,
    }


def test_blocks_of_nobody_and_those_beside_the_pages_are_not_told(events: Any) -> None:
    _moved(events, Move(KEYS[0], "disk", True))
    _stored(events, _request(block_hashes=[]), _blocks())
    _stored(events, _request(), _blocks()[:1])
    _moved(events, Move(KEYS[0], "device", True), Move(KEYS[1], "disk", True))
    assert _wire(events) == []


def test_salt_is_told_as_vllm_s_own_events_do_and_a_reset_withdraws(events: Any) -> None:
    events.ordered(
        StepCommands(1, (LoadOrder("r", tuple(_blocks()[:2]), (), 0, 1.0),), (), False),
        {"r": _request(cache_salt="tenant")},
    )
    first, second = _wire(events)[::2]
    assert (first["extra_keys"], second["extra_keys"]) == ([["tenant"], None], [None, None])
    events.reset()
    assert [each["type"] for each in _wire(events)] == ["BlockRemoved"] * 4
