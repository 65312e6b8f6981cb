"""Byte-fair sending over a fixed number of slots, without I/O: the server and the simulator run the same object."""

from kvtide.server.scheduler.base import Flow, Send, SendPolicy, Slice
from kvtide.server.scheduler.policies import POLICIES, policy_named
from kvtide.server.scheduler.scheduler import Scheduler, SchedulerSettings, TenantLoad

__all__ = [
    "POLICIES",
    "Flow",
    "Scheduler",
    "SchedulerSettings",
    "Send",
    "SendPolicy",
    "Slice",
    "TenantLoad",
    "policy_named",
]
