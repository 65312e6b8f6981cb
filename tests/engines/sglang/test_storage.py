"""The storage backend against SGLang's interface as its callers use it; the engine itself needs a GPU."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtide.errors import UnsupportedModel
from kvtide.outcomes import Why

PAGE_TOKENS = 4
PAGE = (2, 3, PAGE_TOKENS, 2, 8)


class HostPool:
    """A page-first host pool: flat pages by the index of their first token."""

    page_size = PAGE_TOKENS
    layout = "page_first"

    def __init__(self, dtype: Any, start_layer: int) -> None:
        self.device_pool, self.start_layer = SimpleNamespace(dtype=dtype), start_layer
        self.pages = torch.zeros((8, *PAGE), dtype=torch.bfloat16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE, dtype=torch.bfloat16).flatten()

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.pages[index // PAGE_TOKENS]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.pages[index // PAGE_TOKENS] = data_page.reshape(PAGE)


class Interface:
    """The base class's part that its callers rely on."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host


@pytest.fixture
def backends(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make backends on one store, each with a host pool of its own."""
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.mem_cache.hicache_storage"].HiCacheStorage = Interface  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "kvtide.engines.sglang.storage", raising=False)
    from kvtide.engines.sglang.storage import KVTideStorage

    def make(rank: int = 0, is_mla: bool = False, dtype: Any = torch.bfloat16, start: int = 0, **options: Any) -> Any:
        ours = {"store": str(tmp_path / "store"), "fingerprint": "toy", **options}
        factory = {"backend_name": "kvtide", "module_path": "m", "class_name": "c"}
        config = SimpleNamespace(
            tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla,
            model_name="toy", extra_config={**factory, **ours},
        )  # fmt: skip
        backend = KVTideStorage(config, {})
        backend.register_mem_pool_host(HostPool(dtype, start))
        backend.register_mem_host_pool_v2(backend.mem_pool_host, "kv")  # as new controllers do
        return stack.enter_context(closing(backend))

    return make


def _filled(backend: Any) -> torch.Tensor:
    pool = backend.mem_pool_host
    pool.pages = torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    return pool.pages.clone()


def _indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


@pytest.fixture
def stored(backends: Callable[..., Any]) -> torch.Tensor:
    """Pages that another process has stored as a and b."""
    first = backends()
    pages = _filled(first)
    assert first.batch_set_v1(["a", "b"], _indices(5, 2)) == [True, True]
    first.close()
    return pages[[5, 2]]


def test_pages_come_back_in_another_process_pool(backends: Callable[..., Any], stored: torch.Tensor) -> None:
    second = backends()
    assert second.batch_exists(["a", "b", "c"]) == 2
    assert second.batch_get_v1(["a", "b"], _indices(1, 7)) == [True, True]
    assert torch.equal(second.mem_pool_host.pages[[1, 7]], stored)


def test_missing_page_ends_the_run_and_leaves_the_pool_alone(backends: Callable[..., Any]) -> None:
    backend = backends()
    pages = _filled(backend)
    backend.batch_set_v1(["a"], _indices(0))
    assert backend.store.cache.flush(60)
    assert backend.batch_get_v1(["x", "a"], _indices(3, 4)) == [False, False]
    assert torch.equal(backend.mem_pool_host.pages, pages)


def test_single_pages_by_tensor(backends: Callable[..., Any]) -> None:
    backend = backends()
    page = torch.arange(2 * 3 * PAGE_TOKENS * 2 * 8, dtype=torch.float32).to(torch.bfloat16)
    assert backend.set("a", page)
    assert backend.store.cache.flush(60)
    target = torch.zeros_like(page)
    assert backend.get("a", target) is target
    assert torch.equal(target, page)
    assert backend.get("b", target) is None
    assert backend.batch_set(["c", "d"], [page, page])
    assert backend.exists("a") and not backend.exists("z")


@pytest.mark.usefixtures("stored")
def test_shards_layers_and_dtypes_do_not_share_pages(backends: Callable[..., Any]) -> None:
    for other in ({"rank": 1}, {"dtype": torch.float8_e5m2}, {"start": 3}):
        assert not backends(**other).exists("a")


def test_latents_that_the_first_rank_stored_are_every_rank_s(backends: Callable[..., Any]) -> None:
    first = backends(is_mla=True)
    pages = _filled(first)
    # SGLang has no other rank store them, and loads what all of them find.
    assert first.batch_set_v1(["a"], _indices(5)) == [True]
    first.close()
    second = backends(rank=1, is_mla=True)
    assert second.batch_get_v1(["a"], _indices(1)) == [True]
    assert torch.equal(second.mem_pool_host.pages[1], pages[5])


@pytest.mark.usefixtures("stored")
def test_clearing_serves_nothing_that_was_stored_before(backends: Callable[..., Any]) -> None:
    backend = backends()
    assert backend.exists("a")
    backend.clear()
    assert backend.batch_exists(["a", "b"]) == 0 and backend.batch_get_v1(["a"], _indices(1)) == [False]
    assert backend.batch_set_v1(["a"], _indices(5)) == [True]
    assert backend.exists("a")


def test_store_that_is_silent_holds_up_one_look_up(backends: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        backend = backends(store=f"http://127.0.0.1:{silent.getsockname()[1]}", match_s_max=0.2)
        started_s = time.monotonic()
        assert not any(backend.exists(name) for name in "abc")
        assert backend.batch_exists(["a", "b"]) == 0
        # Without a bound of its own each would wait for 10 s.
        assert time.monotonic() - started_s < 5
        backend.close()


def test_bad_calls_and_options_are_refused(backends: Callable[..., Any]) -> None:
    backend = backends()
    refusals: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "tensor to be read into", lambda: backend.get("a")),
        (ValueError, "as value", lambda: backend.set("a")),
        (ValueError, "need as many pages", lambda: backend.batch_get_v1(["a", "b"], _indices(0))),
        (ValueError, "bytes", lambda: backend.set("a", torch.zeros(3))),
        (ValueError, "contiguous", lambda: backend.set("a", torch.zeros((4, 4)).T)),
        (UnsupportedModel, "mamba", lambda: backend.register_mem_host_pool_v2(None, "mamba")),
        (ValueError, "fingerprint", lambda: backends(fingerprint="")),
        (ValueError, "device_kernels is an option of vLLM's connector", lambda: backends(device_kernels="on")),
        (ValueError, "load is an option of vLLM's connector", lambda: backends(load="layers")),
        (ValueError, "lossless", lambda: backends(codec="chunkwise:1")),
        (ValueError, "prefill_tokens_per_s", lambda: backends(prefill_tokens_per_s=-1.0)),
    ]
    for error, complaint, call in refusals:
        with pytest.raises(error, match=complaint):
            call()


@pytest.mark.usefixtures("stored")
def test_pages_that_come_slower_than_they_are_computed_are_left_alone(backends: Callable[..., Any]) -> None:
    for tokens_per_s, pages in ((1e9, 0), (1e-3, 2), (0.0, 2)):
        backend = backends(prefill_tokens_per_s=tokens_per_s)
        cache = backend.store.cache
        # What loads have taken here: a second for 64 tokens.
        cache.judge.note_load(64, 1.0, backend.store._clock.monotonic_s())
        assert backend.batch_exists(["a", "b", "c"]) == pages
        counted = {decided.why for decided in cache.decisions.counts()}
        assert (Why.LINK_SLOWER in counted) == (pages == 0)
        # A page by itself is there all the same.
        assert backend.exists("a")
        backend.close()


@pytest.mark.usefixtures("stored")
def test_load_that_takes_longer_than_computing_is_given_up_and_the_next_declined(
    backends: Callable[..., Any],
) -> None:
    backend, gate, started_s = backends(prefill_tokens_per_s=1000.0), threading.Event(), time.monotonic()
    backend.store.cache.tiers.get_into = lambda *arguments: (gate.wait(60), None)[1]
    names, pages = ["a", "b", *map(str, range(18))], [torch.zeros(PAGE, dtype=torch.bfloat16) for _ in range(20)]
    assert backend.batch_get(names, pages) == [None] * 20
    assert time.monotonic() - started_s < 20
    assert backend.batch_exists(["a", "b"]) == 0
    gate.set()
