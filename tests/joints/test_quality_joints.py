"""Who asks for a quality gets it or better, or computes; and replaces what was too coarse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.joints.conftest import attached_lossy
from tests.servers import running_server
from tests.stores import stored_records

from kvtide.cli.explain import MatchVerdict, explain_prompt
from kvtide.wire import parse_header
from kvtide_lab.bench.services import valkey_server

GREEDY: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


def hits(model: Any, store: Path | str, codec: str, prompt: torch.Tensor) -> int:
    """What a process with this codec restores; it stores what it computes."""
    with attached_lossy(model, store, codec) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(20) and cached.last is not None
        return cached.last.hit_tokens


def codecs_in(store: Path) -> set[str]:
    return {parse_header(memoryview(record.body())).codec_id for record in stored_records(store)}


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        ("cachegen:4", "tide:5e-3"),
        ("tide:5e-2", "tide:5e-3"),
        ("cachegen:3", "cachegen:1"),
        ("chunkwise:3", "cachegen:2"),
    ],
)
def test_a_coarser_block_is_a_miss_and_is_replaced(
    coarse: str, fine: str, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    assert hits(tiny_model, tmp_path, coarse, prompt) == 0
    assert hits(tiny_model, tmp_path, fine, prompt) == 0
    # Now the finer one is there, for everybody, and stays.
    assert hits(tiny_model, tmp_path, fine, prompt) == 96
    assert hits(tiny_model, tmp_path, coarse, prompt) == 96
    assert hits(tiny_model, tmp_path, fine, prompt) == 96


def test_a_finer_block_serves_who_asks_for_less_and_is_not_replaced(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    hits(tiny_model, tmp_path, "cachegen:1", prompt)
    before = codecs_in(tmp_path)
    assert hits(tiny_model, tmp_path, "tide:5e-2", prompt) == 96
    assert codecs_in(tmp_path) == before == {"cachegen-2"}


def test_two_qualities_live_beside_each_other(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    """Both open: the coarse one computes nothing again once the finer one has stored."""
    with (
        attached_lossy(tiny_model, tmp_path, "cachegen:4") as coarse,
        attached_lossy(tiny_model, tmp_path, "cachegen:1") as fine,
    ):
        for cached, expected in ((coarse, 0), (fine, 0), (coarse, 96), (fine, 96), (coarse, 96)):
            cached.generate(prompt, **GREEDY)
            assert cached.flush(20) and cached.last is not None
            assert cached.last.hit_tokens == expected


@pytest.mark.parametrize("tier", ["memory://", "disk"])
def test_servers_hold_the_finest(tier: str, tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with running_server(tiers=(tier if tier == "memory://" else f"disk://{tmp_path}",)) as server:
        expected = {"cachegen:4": 0, "cachegen:1": 0, "tide:5e-2": 96}
        assert {codec: hits(tiny_model, server.url, codec, prompt) for codec in expected} == expected
        assert hits(tiny_model, server.url, "cachegen:4", prompt) == 96
        assert hits(tiny_model, server.url, "cachegen:1", prompt) == 96


def test_valkey_holds_the_finest(tiny_model: Any, prompt: torch.Tensor) -> None:
    with valkey_server() as valkey:
        for codec, expected in (("cachegen:4", 0), ("cachegen:1", 0), ("cachegen:4", 96), ("cachegen:1", 96)):
            assert hits(tiny_model, f"valkey://127.0.0.1:{valkey.port}", codec, prompt) == expected


def test_explain_says_that_a_block_is_too_coarse(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    with attached_lossy(tiny_model, tmp_path, "cachegen:4") as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(20)
        look = partial(explain_prompt, cached.cache.tiers, cached.namespace, prompt[0].tolist(), 16, None)
        assert look(0.1).verdict is look(None).verdict is MatchVerdict.ALL_FULL_BLOCKS
        found = look(5e-3)
        assert (found.verdict, found.hit_blocks) == (MatchVerdict.COARSE, 0)
        assert found.needs == "a quality of 0.005; cachegen-2 has 0.074"
