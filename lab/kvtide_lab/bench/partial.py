"""Results of a bench of quality so far, in a file, so that a run that was broken off goes on from there.

Invariant: results of other inputs than this run's are never taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

_Inputs = TypeVar("_Inputs", bound=msgspec.Struct)
_Result = TypeVar("_Result")


class _File(msgspec.Struct, Generic[_Inputs, _Result], frozen=True):
    inputs: _Inputs
    results: dict[str, list[_Result]]


class Partial(Generic[_Inputs, _Result]):
    """Results, of one type, by case and context. Without a path they are kept in memory only."""

    def __init__(self, inputs: _Inputs, result: type[_Result], path: Path | None = None) -> None:
        """Read the file if it is there. ValueError if it is of other inputs, naming them, or is no such file."""
        self._inputs = inputs
        self._type: Any = _File[type(inputs), result]  # type: ignore[misc]  # types that msgspec reads at run time
        self._path = path
        self._results: dict[str, list[_Result]] = {}
        if path is not None and path.exists():
            self._results = self._read(path)

    def _read(self, path: Path) -> dict[str, list[_Result]]:
        try:
            found: _File[_Inputs, _Result] = msgspec.json.decode(path.read_bytes(), type=self._type)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} holds no results of this bench: {error}") from error
        fields = self._inputs.__struct_fields__
        others = [name for name in fields if getattr(found.inputs, name) != getattr(self._inputs, name)]
        if others:
            raise ValueError(f"{path} is of a run with another {', '.join(others)}: name another file, or delete it")
        return found.results

    def __len__(self) -> int:
        return len(self._results)

    def get(self, case: str, context: int) -> list[_Result] | None:
        """Return what was found, in order; None if it was not yet."""
        return self._results.get(f"{context} {case}")

    def put(self, case: str, context: int, found: list[_Result]) -> None:
        """Add a result, and write all to a new file, then rename it."""
        self._results[f"{context} {case}"] = found
        if self._path is not None:
            aside = self._path.with_name(f"{self._path.name}.new")
            aside.write_bytes(msgspec.json.encode(_File(self._inputs, self._results)))
            aside.rename(self._path)


def ids_digest(ids: Sequence[int]) -> str:
    """Return a digest of token ids, in hex."""
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()
