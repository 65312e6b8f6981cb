"""What `with` needs of things that are opened and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Opened(ABC):
    """Opens at the `with` and closes behind it."""

    @abstractmethod
    def open(self) -> None:
        """Take the resources."""

    @abstractmethod
    def close(self) -> None:
        """Give them back. Idempotent."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
