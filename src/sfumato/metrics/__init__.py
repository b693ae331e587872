"""Metrics from ranks, distances and uncertainties; they know nothing of models."""
