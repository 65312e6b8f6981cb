"""A gate in front of an engine's memory: who comes too late writes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WriteGate:
    """Keeps late writers out of memory that is the engine's again. `changed` guards what writers share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self._writers = 0

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Be a writer for the time of the `with`; False if the gate is closed and nothing may be written."""
        with self.changed:
            is_in = not self.is_closed
            self._writers += is_in
        try:
            yield is_in
        finally:
            with self.changed:
                self._writers -= is_in
                if self.is_closed:
                    self.changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; return when nobody is inside. Idempotent."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._writers == 0)
