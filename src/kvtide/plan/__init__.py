"""Plans: pure functions from what is wanted, here and known of the link to what to do next.

What streams plan by, `base` and `policies`, is apart, for who streams.
"""

from kvtide.plan.judge import Decision, Judge, JudgeRecord, LinkEstimate, Speed, Way, decide
from kvtide.plan.speeds import PrefillSpeed

__all__ = ["Decision", "Judge", "JudgeRecord", "LinkEstimate", "PrefillSpeed", "Speed", "Way", "decide"]
