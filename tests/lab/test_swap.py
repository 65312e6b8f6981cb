"""Pages out and in again: bytes, bounds and bad input."""

import pytest
import torch

from kvtide_lab.swap import PageSwapper, runs


def _layers(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-128, 128, (6, 64), dtype=torch.int8, generator=generator).to(device) for _ in range(3)]


def _round_trip(device: str) -> None:
    layers = _layers(device)
    before = [layer.clone() for layer in layers]
    with PageSwapper(layers, slots=4) as swapper:
        swapper.swap_out([5, 1], [0, 3]).wait()
        for layer in layers:
            layer.zero_()
        swapper.swap_in([3, 0], [1, 5]).wait()
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 5]], old[[1, 5]])
        assert not layer[[0, 2, 3, 4]].any()


def test_pages_come_back_as_they_went() -> None:
    _round_trip("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_come_back_to_a_gpu_as_they_went() -> None:
    _round_trip("cuda")


def test_neighbours_are_copied_at_once() -> None:
    assert runs([4, 5, 6, 2, 3], [0, 1, 2, 7, 3]) == [(4, 0, 3), (2, 7, 1), (3, 3, 1)]
    assert runs([], []) == []
