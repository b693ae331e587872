"""Calibrated probabilities from distances: Platt scaling, isotonic regression, abstention and conformal sets."""

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.conditional import ConditionalLogits
from sfumato.calibration.drift import DriftMonitor, DriftState
from sfumato.calibration.platt import fit_logits
from sfumato.calibration.query_scores import QueryScores

__all__ = [
    "Calibration",
    "ConditionalLogits",
    "DirectionCalibration",
    "DriftMonitor",
    "DriftState",
    "QueryScores",
    "fit_logits",
]
