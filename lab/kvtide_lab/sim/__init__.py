"""Replays of public traces and of the report's experiments through the real index, on a clock of their own."""

from kvtide_lab.sim.belady import belady_hits
from kvtide_lab.sim.hints import HINTS
from kvtide_lab.sim.made import MADE, MADE_PREFIX, made_trace
from kvtide_lab.sim.prompts import PROBABILITIES, PromptPoint, PromptSetup, run_prompts
from kvtide_lab.sim.replay import (
    BELADY,
    Comparison,
    PolicyStanding,
    ReplayResult,
    TenantResult,
    capacity_blocks,
    compare,
    prefill_cost,
    replay,
    standing,
)
from kvtide_lab.sim.workload import (
    Trace,
    TraceRequest,
    TraceSource,
    WekaReplay,
    build_trace,
    joined,
    read_trace,
    tenant_namespace,
)

__all__ = [
    "BELADY",
    "HINTS",
    "MADE",
    "MADE_PREFIX",
    "PROBABILITIES",
    "Comparison",
    "PolicyStanding",
    "PromptPoint",
    "PromptSetup",
    "ReplayResult",
    "TenantResult",
    "Trace",
    "TraceRequest",
    "TraceSource",
    "WekaReplay",
    "belady_hits",
    "build_trace",
    "capacity_blocks",
    "compare",
    "joined",
    "made_trace",
    "prefill_cost",
    "read_trace",
    "replay",
    "run_prompts",
    "standing",
    "tenant_namespace",
]
