"""The register of doors: what kvtide can do, by the option that switches it on.

Invariant: a capability has one door, a documented option, and one test that goes through it and fails if nothing
happened. That test carries `@door("name")`, or is named in the row where it needs more than tests/doors has.
What has no door yet is in `LEFT`, with what would open it. All of it is docs/capabilities.md:
`python -m tests.doors.page --write`.

To open a door: take its row out of `LEFT`, put one into a table of an open_*.py, and its test into a test_*.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tests.doors.capability import Capability, left_table
from tests.doors.open_commands import COMMANDS, LAB
from tests.doors.open_engines import ATTACH, LLAMA, VLLM
from tests.doors.open_servers import SERVE, STORES

__all__ = ["LEFT", "OPEN", "door"]

Test = TypeVar("Test", bound=Callable[..., object])

OPEN: Mapping[str, Sequence[Capability]] = {
    "Hugging Face transformers": ATTACH,
    "vLLM and SGLang": VLLM,
    "llama.cpp": LLAMA,
    "Stores by URL": STORES,
    "Servers": SERVE,
    "Commands": COMMANDS,
    "Measuring": LAB,
}
_NAMES = {capability.name for group in OPEN.values() for capability in group}

# No user can switch it on, or no test goes through the option.
LEFT = left_table("""
amount and number of what is sent at a time | slots slice_bytes tenant_slots_max | a test on a server process | CACHEGEN
quotas in an engine's memory and disk | limits by tenant salt | quotas that local tiers ask | OURS
blocks that stay longer | priority of a namespace | hints that rankings ask | OURS
encode stored blocks anew | kvtide recompress | a command that decodes and encodes a store | ASCEND
importance says what stays in memory | importance=0.25 | a test with a memory that is too small | IMPRESS
chunks move up, not objects | importance=0.25 | tiers that hold parts of objects | IMPRESS
refinements of single chunks | codec="tide-chunked" | an object format for them | IMPRESS
layers within the step on a GPU | "load": "layers" | pages of a device that are filled by layers | OFFLOADING
multiprocessors of the kernels | device_multiprocessors | a GPU | OFFLOADING
blocks that are not full | block_tokens | keys of partial blocks | PREFIX
fingerprint, queue and threads of vLLM | fingerprint store_queue_bytes_max load_threads | tests in vLLM's environment
    OURS
Google's store | gs:// | a bucket there to test on | OURS
""")


def door(name: str) -> Callable[[Test], Test]:
    """Mark the one test that goes through the door of a capability. KeyError for a name that is not registered."""
    if name not in _NAMES:
        raise KeyError(f"{name!r} is not in the register of doors")
    return lambda test: test
