"""Metrics from ranks, distances and uncertainties, independent of models."""
