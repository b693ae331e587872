"""Uncertainties beyond the package: more estimators, damaged queries, and the score -S*R^2 of post-hoc papers."""
