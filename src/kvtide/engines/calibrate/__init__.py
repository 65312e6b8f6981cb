"""Fitting profiles to a model: what moves in its cache, and what the model says of the outcome."""

from kvtide.engines.calibrate.calibration import JUDGED_TOKENS, TideCalibration
from kvtide.engines.calibrate.texts import (
    HELD_OUT_UNLIKE,
    TextSplit,
    calibration_texts,
    held_out_texts,
    read_texts,
    snippets,
    split_texts,
)

__all__ = [
    "HELD_OUT_UNLIKE",
    "JUDGED_TOKENS",
    "TextSplit",
    "TideCalibration",
    "calibration_texts",
    "held_out_texts",
    "read_texts",
    "snippets",
    "split_texts",
]
