"""Byte-fair sending over a fixed number of slots, without I/O: the server and the simulator run the same object."""

from kvtide.server.scheduler.policies import Send, Slice
from kvtide.server.scheduler.scheduler import Scheduler, SchedulerSettings, TenantLoad

__all__ = ["Scheduler", "SchedulerSettings", "Send", "Slice", "TenantLoad"]
