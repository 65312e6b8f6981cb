"""Plans: pure functions from what is wanted, here and known of the link to what to do. Streams' are in `policies`."""

from kvtide.plan.judge import SAMPLE_TOKENS_MIN, Decision, Judge, JudgeRecord, LinkEstimate, Speed, Way, decide
from kvtide.plan.speeds import PrefillSpeed

__all__ = [
    "SAMPLE_TOKENS_MIN",
    "Decision",
    "Judge",
    "JudgeRecord",
    "LinkEstimate",
    "PrefillSpeed",
    "Speed",
    "Way",
    "decide",
]
