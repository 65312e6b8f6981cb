"""Plans: pure functions from what is wanted, here and known of the link to what to do. Streams' are in `policies`."""

from kvtide.plan.judge import Decision, Judge, JudgeRecord, LinkEstimate, Speed, decide
from kvtide.plan.speeds import PrefillSpeed

__all__ = ["Decision", "Judge", "JudgeRecord", "LinkEstimate", "PrefillSpeed", "Speed", "decide"]
