"""Calibrated probabilities from distances: Platt scaling, isotonic regression, abstention and conformal sets."""
