"""Auditing a data set with a model: listed pairs that are probably wrong, unlisted ones that probably match, and pages to check them."""

from sfumato.audit.scoring import (
    NEIGHBOURS,
    ListedScores,
    MissingScores,
    audit_pairs,
    wrong_probability,
    wrong_share,
)

__all__ = [
    "NEIGHBOURS",
    "ListedScores",
    "MissingScores",
    "audit_pairs",
    "wrong_probability",
    "wrong_share",
]
