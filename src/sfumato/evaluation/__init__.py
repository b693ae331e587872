"""Evaluation of images and texts: ground truths, benchmarks, strategies, comparison, estimators of uncertainty."""
