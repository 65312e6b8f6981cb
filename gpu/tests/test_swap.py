"""Pages out and in again through gathered pieces."""

from __future__ import annotations

import pytest
import torch
from tests.suites import smooth_bits

from gpu_swap import KernelSwapper
from kvtide.block import BlockLayout, KVDtype
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.pages import KernelPages
from ordered import Order, OrderedKernels
from twin import needs_compiler

pytestmark = needs_compiler


def engine_layers(device: torch.device) -> list[torch.Tensor]:
    """Pages of 4,112 bytes: two of a warp's pieces and a rest."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-128, 128, (9, 4112), dtype=torch.int8, generator=generator).to(device) for _ in range(3)]


@pytest.mark.parametrize("piece_bytes", [1, 30_000, 1 << 20])
def test_pages_come_back_as_they_went(kernels: Kernels, piece_bytes: int) -> None:
    layers = engine_layers(kernels.device)
    before = [layer.clone() for layer in layers]
    with KernelSwapper(kernels, layers, slots=12, piece_bytes=piece_bytes) as swapper:
        swapper.swap_out([8, 1, 2, 4, 5], [0, 3, 4, 11, 10]).wait()
        for layer in layers:
            layer.zero_()
        swapper.swap_in([4, 3, 0], [2, 1, 8]).wait()
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 2, 8]], old[[1, 2, 8]])
        assert not layer[[0, 3, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("is_out", [False, True])
def test_first_swap_waits_for_what_last_used_its_memory(is_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order()
    swapper = KernelSwapper(OrderedKernels(order), engine_layers(torch.device("cpu")), slots=4)
    with order.taking(monkeypatch):
        swapper.open()
    assert order.taken
    (swapper.swap_out if is_out else swapper.swap_in)([1, 2], [2, 1])
    swapper.close()


def test_blocks_come_in_behind_the_engine_and_not_behind_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, order = BlockLayout(2, 16, 2, 8, KVDtype.BFLOAT16), Order()
    pages = [torch.zeros((4, 2, 8, 16), dtype=torch.bfloat16) for _ in range(2)]
    pool = KernelPages(OrderedKernels(order), pages, layout)
    order.queued["1/2"] += 1
    pool.follow()
    with order.taking(monkeypatch):
        pool.scatter(smooth_bits(layout, 1), [1, 3], 0)
    # Streams for copies out, and what decodes, are not waited for.
    assert order.host == {"engine": order.queued["engine"], "1/4": order.queued["1/4"]}
    assert order.queued["1/4"] > 1
    pool.close()


def test_swapping_nothing_is_done_at_once(kernels: Kernels) -> None:
    with KernelSwapper(kernels, engine_layers(kernels.device), slots=1) as swapper:
        swapper.swap_out([], []).wait()
        swapper.swap_in([], []).wait()


def test_bad_input_is_refused(kernels: Kernels) -> None:
    layers = engine_layers(kernels.device)
    with pytest.raises(ValueError, match="int8"):
        KernelSwapper(kernels, [torch.zeros((2, 16))], slots=1)
    with pytest.raises(ValueError, match="whole 16 bytes"):
        KernelSwapper(kernels, [layer[:, :100].contiguous() for layer in layers], slots=1)
    with pytest.raises(ValueError, match="positive"):
        KernelSwapper(kernels, layers, slots=0)
    bad = [([0, 1], [0], "every page needs a slot"), ([9], [0], "pages below 9"), ([0], [2], "slots below 2")]
    with KernelSwapper(kernels, layers, slots=2) as swapper:
        for pages, slots, match in bad:
            with pytest.raises(ValueError, match=match):
                swapper.swap_out(pages, slots)
