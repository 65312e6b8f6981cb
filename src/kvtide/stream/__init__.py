"""Streaming, decided without I/O: how fast the link is, what to ask for next."""

from kvtide.stream.bandwidth import Estimator
from kvtide.stream.receiver import Receiver

__all__ = ["Estimator", "Receiver"]
