"""A device that is honest is proved, one that lies or is late is refused, in every kind of pages."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.paged.emulated import EmulatedDevice, Lie, honest
from tests.engines.paged.pools import LAYOUT, empty_layers, engine_writes, host_pages, random_block

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.codec.base import RawCodec
from kvtide.engines.paged.device import DeviceLayer, DevicePages
from kvtide.engines.paged.pages import CellOrder, HostPages, cell_order, join_pages, keys_values, slot_page
from kvtide.engines.paged.proof import Proof, prove
from kvtide.types import Section

# Of the memory, where 4 is the layer.
AXES = [(4, 0, 1, 2, 3), (4, 0, 2, 1, 3), (4, 1, 0, 2, 3), (0, 4, 1, 2, 3), (0, 4, 2, 1, 3), (0, 1, 4, 2, 3)]
FLOATS = {KVDtype.BFLOAT16: torch.bfloat16, KVDtype.FLOAT16: torch.float16, KVDtype.FLOAT32: torch.float32}
# Sign, exponent and mantissa of what an element of so many bytes is taken for.
EXPONENTS = {1: 0x78, 2: 0x7F80, 4: 0x7F800000}


def rows(
    axes: Sequence[int] = AXES[0],
    dtype: KVDtype = KVDtype.BFLOAT16,
    slots: Sequence[tuple[int, ...]] | None = None,
    parts: int = 1,
    tokens: int = 4,
    pages: int = 40,
) -> DevicePages:
    """Keys and values of three layers of two heads, in pages that are `parts` of a kernel's pages each."""
    sizes = (pages * parts, 2, tokens, 12, 3)
    storage = torch.randint(-128, 128, (*(sizes[axis] for axis in axes[:-1]), 12 * dtype.item_bytes), dtype=torch.int8)
    views = storage.view(FLOATS[dtype]).permute([axes.index(axis) for axis in (4, 0, 1, 2, 3)])
    layers = [layer.unflatten(0, (-1, parts)) if parts > 1 else layer for layer in views]
    own: Sequence[tuple[int, ...] | None] = slots or [None] * 3
    given = [DeviceLayer(*each) for each in zip(layers, [2] * 3, own, strict=True)]
    return DevicePages(given, BlockLayout(3, 3 * parts * tokens, 2, 6, dtype), parts * tokens)


def whole(slots: Sequence[tuple[int, ...]] = ((0, 1), (0, 1), (2,)), pages: int = 40) -> DevicePages:
    """Latents of one byte in two strides, and states whose pages have a rest, as blocks of bytes."""
    first = torch.randint(0, 256, (pages + 1, 4, 2, 20), dtype=torch.uint8)[1:].transpose(1, 2)
    second = torch.randint(-9, 9, (pages, 2, 4, 20), dtype=torch.int8)
    states = torch.randint(0, 256, (pages, 50), dtype=torch.uint8)[:, :32]
    layers = [DeviceLayer(each, 1, own) for each, own in zip((first, second, states), slots, strict=True)]
    size = sum(len(own) * layer.pages[0].nbytes for own, layer in zip(slots, layers, strict=True))
    return DevicePages(layers, BlockLayout(1, 3, 1, size // 4, KVDtype.BFLOAT16), 1)


MADE: dict[str, Callable[[], DevicePages]] = {
    "plain": rows,
    "tokens before heads": lambda: rows((0, 4, 2, 1, 3)),
    "float32, heads outermost": lambda: rows((4, 1, 0, 2, 3), KVDtype.FLOAT32),
    "groups of one shape": lambda: rows(AXES[1], KVDtype.FLOAT16, ((0,), (1,), (0,))),
    "pages of several kernels' pages": lambda: rows(parts=2),
    "several shapes, states": whole,
}


def proof(monkeypatch: pytest.MonkeyPatch, make: Callable[[], DevicePages], lie: Lie = honest, late: str = "") -> Proof:
    made = make()
    with EmulatedDevice(monkeypatch, lie, late):
        return prove(type(made)(made.layers, made.layout, made.page_tokens), made.layers, SystemClock())


def given(name: str, change: Callable[[list[Any]], Any]) -> Lie:
    """Change what one kind of operation is given; None for what is not done at all."""

    def lie(called: str, do: Callable[..., Any], args: list[Any]) -> Any:
        changed = change(args) if called == name else args
        return None if changed is None else do(*changed)

    return lie


def result(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Change what is gathered from pages."""
    return lambda called, do, args: change(do(*args)) if called == "index" else do(*args)


def values(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Change what is written into pages."""
    return given("index_put_", lambda args: [*args[:2], change(args[2].contiguous()).reshape(args[2].shape)])


def numbers(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Lie:
    """Change which pages are gathered or written."""

    def lie(called: str, do: Callable[..., Any], args: list[Any]) -> Any:
        changed = [args[0], [change(each) for each in args[1]], *args[2:]] if called in names else args
        return do(*changed)

    return lie


def is_tiny(room: torch.Tensor) -> torch.Tensor:
    """Tell for each value whether its exponent is nothing, as zeros and denormals have it."""
    return (room & EXPONENTS[room.element_size()]) == 0


def over_keys(args: list[Any]) -> list[Any]:
    """Write or gather what lies one half before."""
    room, start = args[0], args[0].storage_offset() - args[0].shape[-1]
    return [room.as_strided(room.shape, room.stride(), start) if start >= 0 else room, *args[1:]]


def stale() -> Lie:
    """Write what was written the time before."""
    before: list[Any] = []

    def change(args: list[Any]) -> Any:
        before.append(args[2].clone())
        old = before[max(0, len(before) - 2)]
        return [*args[:2], old if (old.shape, old.dtype) == (args[2].shape, args[2].dtype) else args[2].flip(0)]

    return given("index_put_", change)


def spilled(called: str, do: Callable[..., Any], args: list[Any]) -> Any:
    """Write what should be, and into the page beside."""
    if called == "index_put_":
        args[0][args[1][0] - 1, ..., 0] += 1
    return do(*args)


OUT, IN = "index", "index_put_"
LIES: dict[str, Lie] = {
    "the page beside, in": numbers(lambda pages: pages - 1, IN),
    "the page beside, out": numbers(lambda pages: pages - 1, OUT),
    "the page beside, both ways": numbers(lambda pages: pages - 1, IN, OUT),
    "pages in another order, in": numbers(lambda pages: pages.flip(0), IN),
    "pages in another order, both ways": numbers(lambda pages: pages.flip(0), IN, OUT),
    "wrong stride": values(lambda room: room.reshape(len(room), -1, 2).transpose(1, 2)),
    "swapped axis": values(lambda room: room.transpose(0, 1) if len(room) == room.shape[1] else room.flip(1)),
    "values over keys, in": given(IN, over_keys),
    "values over keys, out": given(OUT, over_keys),
    "bytes swapped": values(lambda room: room.view(torch.uint8).reshape(-1, 2).flip(1).reshape(-1).view(room.dtype)),
    "denormals flushed, in": values(lambda room: torch.where(is_tiny(room), 0, room)),
    "denormals flushed, out": result(lambda room: torch.where(is_tiny(room), 0, room)),
    "every NaN the same": values(lambda room: torch.where(is_tiny(~room), -1, room)),
    "lowest bit lost": values(lambda room: room & ~1),
    "highest bit lost, out": result(lambda room: room & EXPONENTS[room.element_size()]),
    "another dtype between": values(lambda room: room.float().bfloat16().to(room.dtype) & ~1),
    "truncated, in": given(IN, lambda args: [args[0], [args[1][0][:-1]], args[2][:-1]]),
    "truncated on the way to the host": given("copy_", lambda args: [each[:-3] for each in args[:2]]),
    "stale memory": stale(),
    "dropped, in": given(IN, lambda args: None),
    "dropped on the way to the host": given("copy_", lambda args: args if len(args[0]) < 400 else None),
    "layers in another order": given("cat", lambda args: [args[0][::-1]]),
    "into the page beside too": spilled,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("lie", LIES)
def test_lie_of_a_device_is_caught(monkeypatch: pytest.MonkeyPatch, lie: str, kind: str) -> None:
    reason = proof(monkeypatch, MADE[kind], LIES[lie]).reason
    assert "differs in" in reason or "that nobody named" in reason, reason


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("late", ["finish", "event", "wait", "last"])
def test_lane_that_is_late_is_caught(monkeypatch: pytest.MonkeyPatch, late: str, kind: str) -> None:
    assert "differs in" in proof(monkeypatch, MADE[kind], late=late).reason


class _Hasty(DevicePages):
    """Does not put what it writes after what the engine has queued."""

    def follow(self) -> None:
        pass


class _Aside(DevicePages):
    """Gathers beside the engine, which writes on."""

    def capture(self, pages: Sequence[int]) -> Any:
        with self._copies.queue():
            return super().capture(pages)


@pytest.mark.parametrize("kind", [_Hasty, _Aside])
def test_pages_that_do_not_wait_for_engines_are_caught(
    monkeypatch: pytest.MonkeyPatch, kind: type[DevicePages]
) -> None:
    made = whole()
    assert "differs in" in proof(monkeypatch, lambda: kind(made.layers, made.layout, 1)).reason


def test_no_start_on_an_honest_device_is_refused_and_pages_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(45)
    for start in range(200):
        torch.manual_seed(start)
        options: Any = {"tokens": rng.choice([1, 2, 4, 16]), "pages": rng.choice([10, 11, 40, 200])}
        options["slots"] = rng.choice([None, ((0,), (1,), (0,)), ((2,), (0,), (1,))])
        axes, dtype, parts = rng.choice(AXES), rng.choice(list(FLOATS)), rng.choice([1, 2])
        made = whole() if start % 4 == 0 else rows(axes, dtype, parts=parts, **options)
        before = [layer.pages.clone().view(torch.uint8) for layer in made.layers]
        assert proof(monkeypatch, lambda: made).reason == "", (start, made.layout)  # noqa: B023
        held = [layer.pages.view(torch.uint8) for layer in made.layers]
        assert all(torch.equal(*each) for each in zip(held, before, strict=True))


def test_what_an_earlier_proof_left_in_memory_is_not_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, came = rows(), list[bytes]()
    scatter = pool.scatter
    monkeypatch.setattr(pool, "scatter", lambda bits, *where: (came.append(bits.tobytes()), scatter(bits, *where)))
    for _ in range(2):
        assert prove(pool, pool.layers, SystemClock()).reason == ""
    assert len(set(came)) == len(came) == 4


class _OffByOne(LosslessCodec):
    """Decodes the last value wrong."""

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        super().decode(meta, sections, out)
        out[-1, -1, -1, -1, -1] ^= 1


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_golden_object_of_each_codec_is_decoded_right(make: Callable[[], DevicePages]) -> None:
    pool = make()
    assert prove(pool, pool.layers, SystemClock(), [RawCodec(), LosslessCodec()]).reason == ""
    reason = prove(pool, pool.layers, SystemClock(), [RawCodec(), _OffByOne()]).reason
    assert reason.startswith("what was coded by lossless-2 differs in 1 of")


def test_too_few_pages_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proof(monkeypatch, lambda: rows(pages=3)).reason == "a proof takes 3 pages, there are 2"


# Blocks in and out of pages, for every order and stride that engines use.


@pytest.mark.parametrize("order", CellOrder)
@pytest.mark.parametrize("is_captured", [True, False])
def test_block_or_the_rest_of_one_goes_into_pages_as_the_engine_reads_it(order: CellOrder, is_captured: bool) -> None:
    pool, layers = host_pages(order)
    expected, bits = empty_layers(), random_block(1)
    fill: Callable[[list[int], int], object] = partial(pool.scatter, bits)
    if is_captured:
        engine_writes(layers, order, bits, [7, 2])
        fill = pool.capture([7, 2]).restore
        for layer in layers:
            layer[:] = 0
    fill([4], 1)
    fill([3, 5], 0)
    engine_writes(expected, order, bits, [3, 5])
    for layer in expected:
        layer[4] = layer[5]
    assert np.array_equal(layers, expected)


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
    # Strides, streams and devices are those of the proofs above.
    host, layers = host_pages(CellOrder.SPLIT)
    device = DevicePages.of_rows([torch.from_numpy(layer.view(np.int16)) for layer in layers], LAYOUT)
    bits = random_block(4)
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
