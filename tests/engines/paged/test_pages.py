"""Blocks in and out of pages, for every order and stride that engines use."""

import numpy as np
import pytest
import torch
from tests.engines.paged.pools import LAYOUT, PAGE_TOKENS, empty_layers, engine_writes, host_pages, random_block

from kvtide.engines.paged.device import DevicePages
from kvtide.engines.paged.pages import CellOrder, HostPages, cell_order, join_pages, keys_values, slot_page


@pytest.mark.parametrize("order", CellOrder)
def test_captured_pages_are_restored_into_others(order: CellOrder) -> None:
    pool, layers = host_pages(order)
    expected, bits = empty_layers(), random_block(1)
    engine_writes(layers, order, bits, [7, 2])
    captured = pool.capture([7, 2])
    for layer in layers:
        layer[:] = 0
    captured.restore([4], 1)
    captured.restore([3, 5], 0)
    engine_writes(expected, order, bits, [3, 5])
    for layer in expected:
        layer[4] = layer[5]
    assert np.array_equal(layers, expected)


@pytest.mark.parametrize("order", CellOrder)
def test_scattered_block_is_what_the_engine_reads(order: CellOrder) -> None:
    pool, layers = host_pages(order)
    expected, bits = empty_layers(), random_block(2)
    engine_writes(expected, order, bits, [3, 5])
    pool.scatter(bits, [3, 5], 0)
    assert np.array_equal(layers, expected)


def test_pages_that_were_skipped_stay_as_they_were() -> None:
    pool, layers = host_pages()
    bits = random_block(3)
    pool.scatter(bits, [4], 1)
    keys, values = keys_values(layers[1], CellOrder.TRANSPOSED_KEYS)
    assert np.array_equal(keys[4], bits[1, 0, PAGE_TOKENS:].transpose(1, 0, 2))
    assert np.array_equal(values[4], bits[1, 1, PAGE_TOKENS:].transpose(1, 0, 2))
    for layer in layers:
        layer[4] = 0
    assert not np.any(layers)


def test_transposed_keys_lie_as_the_research_says() -> None:
    # One cell of three tokens with two values each: keys by value index, then values by token.
    cell = np.array([1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60]).reshape(3, 4)
    keys, values = keys_values(cell, CellOrder.TRANSPOSED_KEYS)
    assert keys.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert values.tolist() == [[10, 20], [30, 40], [50, 60]]


@pytest.mark.parametrize("order", CellOrder)
def test_order_is_found_from_a_page_that_the_engine_wrote(order: CellOrder) -> None:
    cell = np.zeros((4, 12), np.uint16)
    keys, values = np.arange(24).reshape(4, 6), 100 + np.arange(24).reshape(4, 6)
    room_keys, room_values = keys_values(cell, order)
    room_keys[:], room_values[:] = keys, values
    assert cell_order(cell, keys, values) is order


def test_unknown_order_is_refused() -> None:
    keys = np.arange(24).reshape(4, 6)
    cell = np.concatenate([keys[::-1], keys], axis=1)
    with pytest.raises(ValueError, match="does not know"):
        cell_order(cell, keys, keys)


def test_device_pages_take_and_give_the_blocks_that_this_machine_s_do() -> None:
    # Strides, streams and devices are those of test_proof.py.
    host, layers = host_pages(CellOrder.SPLIT)
    device, bits = (
        DevicePages.of_rows([torch.from_numpy(layer.view(np.int16)) for layer in layers], LAYOUT),
        random_block(4),
    )
    device.scatter(bits, [9, 1], 0)
    assert np.array_equal(host.capture([9, 1]).block(), bits)
    device.capture([9, 1]).restore([5], 1)
    assert np.array_equal(device.capture([9, 5]).block(), bits)


def test_joined_pages_come_apart_again() -> None:
    joined = join_pages([[7, 0, (1 << 32) - 1], [2, 3, 0, 9]], [1, 1])
    assert [[slot_page(page, group) for page in joined] for group in (0, 1)] == [[7, 0, (1 << 32) - 1], [2, 3, 0]]


@pytest.mark.parametrize("order", CellOrder)
def test_groups_are_filled_from_their_own_pages_and_what_was_given_up_stays(order: CellOrder) -> None:
    layers = empty_layers()
    groups = [number % 2 for number in range(len(layers))]
    pool, bits, expected = HostPages(layers, LAYOUT, order, groups), random_block(3), empty_layers()
    # The second group has given up the block's first page.
    pool.scatter(bits, join_pages([[7, 2], [0, 5]], [1, 1]), 0)
    for number, own in enumerate(([7, 2], [None, 5])[group] for group in groups):
        one = empty_layers()
        engine_writes(one, order, bits, [1, 3])
        for source, target in zip((1, 3), own, strict=True):
            if target is not None:
                expected[number][target] = one[number][source]
    assert np.array_equal(layers, expected)
    whole = join_pages([[7, 2], [4, 5]], [1, 1])
    pool.scatter(bits, whole, 0)
    captured = pool.capture(whole)
    assert np.array_equal(captured.block(), bits)
    before = np.array(layers)
    captured.restore(join_pages([[0, 6], [0, 6]], [1, 1]), 0)
    assert np.array_equal(np.array(layers)[:, :6], before[:, :6])
    with pytest.raises(ValueError, match="given up a page"):
        pool.capture(join_pages([[7, 2], [0, 5]], [1, 1]))
