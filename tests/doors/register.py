"""The register of doors: what kvtide can do, by the option that switches it on.

Invariant: a capability has one door, a documented option, and one test that goes through it and fails if nothing
happened. That test carries `@door("name")`, or is named as `proven_by` where it needs more than tests/doors has.
What has no door yet is in `LEFT`, with what would open it. All of it is docs/capabilities.md:
`python -m tests.doors.page --write`.

To open a door: take the entry out of left.py, add a `Capability` to one of the open_*.py and its test to a test_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tests.doors.capability import Capability
from tests.doors.left import LEFT
from tests.doors.open_commands import COMMANDS, LAB
from tests.doors.open_engines import ATTACH, VLLM
from tests.doors.open_servers import SERVE, STORES

__all__ = ["LEFT", "OPEN", "door"]

Test = TypeVar("Test", bound=Callable[..., object])

OPEN: Mapping[str, Sequence[Capability]] = {
    "Hugging Face transformers": ATTACH,
    "vLLM and SGLang": VLLM,
    "Stores by URL": STORES,
    "Servers": SERVE,
    "Commands": COMMANDS,
    "Measuring": LAB,
}
_NAMES = {capability.name for group in OPEN.values() for capability in group}


def door(name: str) -> Callable[[Test], Test]:
    """Mark the one test that goes through the door of a capability. KeyError for a name that is not registered."""
    if name not in _NAMES:
        raise KeyError(f"{name!r} is not in the register of doors")
    return lambda test: test
