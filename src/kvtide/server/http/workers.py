"""Threads that wait for tiers, shared fairly between those on whose account they wait.

Invariant: one owner's slow calls leave a thread to others, and slow reads leave one to those who write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

from kvtide.server.http.shares import Shares

_Result = TypeVar("_Result")


class Workers:
    """`io_threads` threads for reading, and one more so that a write finds one. Used from one event loop."""

    def __init__(self, io_threads: int) -> None:
        self._executor = ThreadPoolExecutor(io_threads + 1, "kvtide-tiers")
        owner_max = max(1, io_threads - 1)
        self._reading = Shares(io_threads, owner_max)
        self._writing = Shares(io_threads, owner_max)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for what runs."""
        self._executor.shutdown()

    async def read(
        self, owner: str, action: Callable[[], _Result], undo: Callable[[_Result], None] | None = None
    ) -> _Result:
        """Run what may wait for a tier. If we are cancelled meanwhile, its result goes to `undo`."""
        return await self._run(self._reading, owner, action, undo)

    async def write(self, owner: str, action: Callable[[], _Result], drop: Callable[[], None] | None = None) -> _Result:
        """Run what may wait for a tier to take something, or call `drop` if we are cancelled before a thread has it."""
        return await self._run(self._writing, owner, action, drop=drop)

    async def _run(
        self,
        shares: Shares,
        owner: str,
        action: Callable[[], _Result],
        undo: Callable[[_Result], None] | None = None,
        drop: Callable[[], None] | None = None,
    ) -> _Result:
        try:
            await shares.take(owner)
        except asyncio.CancelledError:
            if drop is not None:
                drop()
            raise
        future = asyncio.get_running_loop().run_in_executor(self._executor, action)
        # The thread is the owner's until it is done, also if nobody waits for it any more.
        future.add_done_callback(lambda _: shares.give_back(owner))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(partial(_undo, undo))
            raise


def _undo(undo: Callable[[_Result], None], future: asyncio.Future[_Result]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())
