"""What the driver does to a world. Each operation checks at once what it can."""

import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from tests.joints import truth
from tests.joints.changes import CHANGES, USES, use_cache
from tests.joints.conftest import no_threads as refused_threads
from tests.joints.truth import WrongAnswer
from tests.joints.world import ANSWER, FLUSH_S_MAX, Seat, World

# Far more than a child's work takes, and less than one load waits for threads that are not there.
CHILD_S_MAX = 60.0
CHANGES_MAX = 2
DAMAGES = ("flip", "cut", "remove", "forbid", "folder", "fifo", "all")


def error_of(action: Callable[[], None]) -> Exception | None:
    """What an action raised, or None."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever leaves an operation is what the driver looks for
        return error
    return None


def ask(world: World) -> None:
    seat, ids = world.seat(), world.prompt()
    world.ask(seat, ids)
    world.audit(seat, ids)


def talk(world: World) -> None:
    seat, ids = world.seat(), world.prompt()
    for _ in range(world.rng.randrange(2, 4)):
        ids = torch.cat([world.ask(seat, ids).sequences, world.words(world.rng.randrange(1, 20))], 1)
        world.prompts.append(ids)
        world.audit(seat, ids)


def go_on(world: World) -> None:
    """Use the cache that a call has just returned, as callers may."""
    seat, ids = world.seat(is_exact=True), world.prompt()
    output = world.ask(seat, ids)
    past, model = output.past_key_values, world.models[seat.model]
    kind = world.rng.choice(USES)
    back = world.rng.randrange(1, past.get_seq_length() + 1)
    world.note(f"{kind} by {back} on {seat}")
    use_cache(kind, model, past, output.sequences, back)
    assert world.open(seat).cache.flush(FLUSH_S_MAX)
    world.audit(seat, output.sequences)
    world.prompts.append(output.sequences)


def flush(world: World) -> None:
    for cached in world.seats.values():
        assert cached.cache.flush(FLUSH_S_MAX)
        cached.cache.check()
    world.audit_all()


def change(world: World, kind: str) -> None:
    """Change a model under its open caches; look at what is restored, or answer first."""
    seat, ids = _stored(world)
    world.note(f"change of {seat.model} {kind}")
    undo = ExitStack()
    undo.enter_context(CHANGES[kind](world.models[seat.model]))
    world.undo.append((seat.model, kind, undo))
    _follow(world, seat, ids)
    while len(world.undo) > CHANGES_MAX:
        change_back(world)


def change_back(world: World) -> None:
    seat, ids = _stored(world)
    if world.undo:
        model, kind, undo = world.undo.pop()
        world.note(f"back from a change of {model} {kind}")
        undo.close()
    _follow(world, seat, ids)


def _stored(world: World) -> tuple[Seat, torch.Tensor]:
    seat, ids = world.seat(), world.prompt()
    world.ask(seat, ids)
    assert world.open(seat).cache.flush(FLUSH_S_MAX)
    return seat, ids


def _follow(world: World, seat: Seat, ids: torch.Tensor) -> None:
    if world.rng.random() < 0.5:
        world.audit(seat, ids)
    world.ask(seat, ids)
    world.audit(seat, ids)


def reopen(world: World) -> None:
    """Close a cache; whoever needs it opens it again."""
    if world.seats:
        seat = world.rng.choice(list(world.seats))
        world.note(f"close {seat}")
        world.seats.pop(seat).__exit__(None, None, None)


def after_close(world: World) -> None:
    seat, ids = world.seat(), world.prompt()
    cached = world.attached(seat)
    world.ask(seat, ids, cached)
    cached.__exit__(None, None, None)
    world.ask(seat, ids, cached)
    world.audit(seat, ids, cached)


def before_open(world: World) -> None:
    seat, ids = world.seat(), world.prompt()
    world.ask(seat, ids, world.made(seat))


def restart(world: World) -> None:
    """End all caches, and audit every prompt in a process that has none of their threads."""
    world.close()
    in_child(partial(_audit_anew, world))


def _audit_anew(world: World) -> None:
    for seat in world.chairs:
        for ids in world.prompts:
            world.audit(seat, ids)
        world.ask(seat, world.prompt())
    world.close()


def fork(world: World) -> None:
    """Fork while caches are open: parent and child answer on them; the child closes them, or ends at once."""
    ids, flushes, closes = world.prompt(), world.rng.random() < 0.5, world.rng.random() < 0.5
    for seat in world.chairs[:2]:
        cached = world.open(seat)
        world.ask(seat, ids)
        assert not flushes or cached.cache.flush(FLUSH_S_MAX)

    def act() -> None:
        for seat in list(world.seats):
            world.ask(seat, ids)
            world.audit(seat, ids)
        if closes:
            world.close()

    in_child(act)
    world.audit_all()


def in_child(action: Callable[[], None]) -> None:
    """Run an action in a fork and raise what it raised. TimeoutError if it takes too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        error = error_of(action)
        told = "" if error is None else "".join(traceback.format_exception(error))
        os.write(writing, f"{'wrong ' if isinstance(error, WrongAnswer) else ''}{told}"[:60_000].encode())
        os._exit(0)
    os.close(writing)
    try:
        is_told = bool(select.select([reading], [], [], CHILD_S_MAX)[0])
        said = os.read(reading, 1 << 16).decode() if is_told else ""
    finally:
        os.close(reading)
        if not is_told:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not is_told:
        raise TimeoutError(f"a child did not end within {CHILD_S_MAX:g} s")
    if said:
        raise (WrongAnswer if said.startswith("wrong ") else RuntimeError)(f"in a child: {said}")


def damage(world: World, kind: str) -> None:
    """Damage a file of the store, as disks and people do, and go on."""
    files = sorted(path for path in world.store.rglob("*") if path.is_file())
    if not files:
        return
    path = world.rng.choice(files)
    world.note(f"{kind} {path.relative_to(world.store)}")
    if kind == "flip":
        data = bytearray(path.read_bytes())
        for _ in range(world.rng.choice([1, 3, 64]) if data else 0):
            data[world.rng.randrange(len(data))] ^= 1 << world.rng.randrange(8)
        with path.open("r+b") as file:
            file.write(data)
    elif kind == "cut":
        os.truncate(path, world.rng.randrange(path.stat().st_size + 1))
    elif kind == "forbid":
        path.chmod(0)
    elif kind == "all":
        shutil.rmtree(world.store)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
    ask(world)
    reopen(world)


def no_threads(world: World) -> None:
    seat, ids = world.seat(), world.prompt()
    cached = world.attached(seat)
    with refused_threads():
        world.ask(seat, ids, cached)
        world.audit(seat, ids, cached)
        world.ask(seat, ids)
    cached.__exit__(None, None, None)


def two_threads(world: World) -> None:
    asked = [world.prompt() for _ in range(3)]
    one, other = (next(seat for seat in world.chairs if seat.model == name) for name in ("plain", "cast"))
    for seat in (one, other):
        world.open(seat)
    with _beside(partial(_answer_all, world, other, asked)):
        _answer_all(world, one, asked)


def close_meanwhile(world: World) -> None:
    seat, asked, wait_s = world.seat(), [world.prompt() for _ in range(4)], world.rng.random() * 0.1
    cached = world.open(seat)
    with _beside(partial(_answer_all, world, seat, asked)):
        time.sleep(wait_s)
        cached.__exit__(None, None, None)
    del world.seats[seat]


def _answer_all(world: World, seat: Seat, asked: list[torch.Tensor]) -> None:
    for ids in asked * 2:
        world.ask(seat, ids)
        world.audit(seat, ids)


@contextmanager
def _beside(action: Callable[[], None]) -> Iterator[None]:
    """Run an action in another thread meanwhile, and raise what it raised."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(action)
        yield
    running.result()


def odd_arguments(world: World) -> None:
    """Answer with arguments that wrappers pass on, and ask for more than tokens."""
    seat, ids = world.seat(is_exact=True), world.prompt()
    more: dict[str, Any] = world.rng.choice(
        [{"past_key_values": None}, {"output_hidden_states": True}, {"output_attentions": True}, {"use_cache": None}]
    )
    world.note(str(more))
    output = world.ask(seat, ids, **more)
    truth.check_shapes(world.models[seat.model], ids, output, {**ANSWER, **more})


OPERATIONS: dict[str, Callable[[World], None]] = {
    each.__name__: each
    for each in (
        *(ask, talk, go_on, flush, change_back, reopen, after_close, before_open, restart, fork),
        *(no_threads, two_threads, close_meanwhile, odd_arguments),
    )
}
OPERATIONS |= {f"damage {kind}": partial(damage, kind=kind) for kind in DAMAGES}
OPERATIONS |= {f"change {kind}": partial(change, kind=kind) for kind in CHANGES}
