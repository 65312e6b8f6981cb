"""Plans: pure functions from what is wanted, here and known of the link to what to do next."""

from kvtide.stream.plan.base import (
    PASS_TOKENS,
    PLAN_FETCHES_MAX,
    Chunk,
    Fetch,
    Plan,
    Progress,
    Reason,
    Request,
    StreamPolicy,
    expected_s,
    is_ready,
    leading_pass,
    mean_kl,
    pass_reach,
)
from kvtide.stream.plan.breakeven import Decision, Way, decide
from kvtide.stream.plan.cut import CHUNK_TOKENS, cut, cut_for_meeting
from kvtide.stream.plan.layered import TwoEnded
from kvtide.stream.plan.prefill import PrefillMeter, PrefillSpeed

__all__ = [
    "CHUNK_TOKENS",
    "PASS_TOKENS",
    "PLAN_FETCHES_MAX",
    "Chunk",
    "Decision",
    "Fetch",
    "Plan",
    "PrefillMeter",
    "PrefillSpeed",
    "Progress",
    "Reason",
    "Request",
    "StreamPolicy",
    "TwoEnded",
    "Way",
    "cut",
    "cut_for_meeting",
    "decide",
    "expected_s",
    "is_ready",
    "leading_pass",
    "mean_kl",
    "pass_reach",
]
