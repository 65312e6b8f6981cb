"""The common parts of connectors to paged engines: pages to blocks and back, load and store orders, the judge.

No engine is imported here: all of it is tested without one. Pages on a GPU, `device`, are apart.
"""

from kvtide.engines.paged.identity import file_digest, files_fingerprint, gguf_files, gguf_fingerprint
from kvtide.engines.paged.pages import (
    Captured,
    CellOrder,
    HostPages,
    OpaquePages,
    PagePool,
    cell_order,
    join_pages,
    keys_values,
)
from kvtide.engines.paged.scheduler import ScheduledRequest, SchedulerHalf
from kvtide.engines.paged.sequence import StepCommands, WorkerReport
from kvtide.engines.paged.worker import LoadOutcome, WorkerHalf

__all__ = [
    "Captured",
    "CellOrder",
    "HostPages",
    "LoadOutcome",
    "OpaquePages",
    "PagePool",
    "ScheduledRequest",
    "SchedulerHalf",
    "StepCommands",
    "WorkerHalf",
    "WorkerReport",
    "cell_order",
    "file_digest",
    "files_fingerprint",
    "gguf_files",
    "gguf_fingerprint",
    "join_pages",
    "keys_values",
]
