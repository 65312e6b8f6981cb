"""Fitting profiles to a model: what moves in its cache, and what the model says of the outcome."""

from kvtide.engines.calibrate.calibration import TideCalibration
from kvtide.engines.calibrate.judge import capture_blocks, restored_kl
from kvtide.engines.calibrate.texts import calibration_texts, read_texts, snippets

__all__ = [
    "TideCalibration",
    "calibration_texts",
    "capture_blocks",
    "read_texts",
    "restored_kl",
    "snippets",
]
