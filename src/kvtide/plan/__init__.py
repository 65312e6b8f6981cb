"""Plans: pure functions from what is wanted, here and known of the link to what to do next."""

from kvtide.plan.base import (
    PASS_TOKENS,
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
from kvtide.plan.cut import CHUNK_TOKENS, cut, cut_for_meeting
from kvtide.plan.judge import Decision, Judge, JudgeRecord, LinkEstimate, Speed, Way, decide
from kvtide.plan.layered import ImportanceFirst, Layered, TwoEnded
from kvtide.plan.policies import POLICIES, is_by_level, policy_named
from kvtide.plan.prefill import PrefillSpeed

__all__ = [
    "CHUNK_TOKENS",
    "PASS_TOKENS",
    "POLICIES",
    "Chunk",
    "Decision",
    "Fetch",
    "ImportanceFirst",
    "Judge",
    "JudgeRecord",
    "Layered",
    "LinkEstimate",
    "Plan",
    "PrefillSpeed",
    "Progress",
    "Reason",
    "Request",
    "Speed",
    "StreamPolicy",
    "TwoEnded",
    "Way",
    "cut",
    "cut_for_meeting",
    "decide",
    "expected_s",
    "is_by_level",
    "is_ready",
    "leading_pass",
    "mean_kl",
    "pass_reach",
    "policy_named",
]
