"""Calibrated probabilities from distances: Platt scaling, abstention and conformal sets."""
