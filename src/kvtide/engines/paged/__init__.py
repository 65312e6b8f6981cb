"""The common parts of connectors to paged engines: pages to blocks and back, load and store orders, the judge.

No engine is imported here: all of it is tested without one.
"""

from kvtide.engines.paged.device import DevicePages
from kvtide.engines.paged.identity import files_fingerprint
from kvtide.engines.paged.orders import StepCommands, WorkerReport
from kvtide.engines.paged.pages import Captured, CellOrder, HostPages, PagePool, cell_order, keys_values
from kvtide.engines.paged.scheduler import ScheduledRequest, SchedulerHalf
from kvtide.engines.paged.sequence import Namespaces
from kvtide.engines.paged.worker import LoadOutcome, WorkerHalf

__all__ = [
    "Captured",
    "CellOrder",
    "DevicePages",
    "HostPages",
    "LoadOutcome",
    "Namespaces",
    "PagePool",
    "ScheduledRequest",
    "SchedulerHalf",
    "StepCommands",
    "WorkerHalf",
    "WorkerReport",
    "cell_order",
    "files_fingerprint",
    "keys_values",
]
