"""Uncertainty for a frozen image-text model that somebody already has.

METHODS holds every method by its name. Each is fitted on :class:`FrozenPairs` and gives one number for a query, larger
is less certain; methods with ``per_item`` also give a Gaussian for every item. NOT_BUILT says what is left out and why.
"""

from sfumato.posthoc.adapter_networks import AdapterTraining
from sfumato.posthoc.asymvlm import AsymVLM
from sfumato.posthoc.laplace import LaplaceProjections
from sfumato.posthoc.margins import AdversarialMargin, CosineMargin
from sfumato.posthoc.method import FrozenPairs, PosthocMethod, Side
from sfumato.posthoc.method_registry import METHODS, NOT_BUILT, load_method, save_method
from sfumato.posthoc.probvlm import ProbVLM
from sfumato.posthoc.top1 import Top1Distance, fit_hit_logits
from sfumato.posthoc.variance_adapters import PCMEPPAdapter, PFEAdapter, ProLIPAdapter
from sfumato.posthoc.whitened import WhitenedNorm

__all__ = [
    "METHODS",
    "NOT_BUILT",
    "AdapterTraining",
    "AdversarialMargin",
    "AsymVLM",
    "CosineMargin",
    "FrozenPairs",
    "LaplaceProjections",
    "PCMEPPAdapter",
    "PFEAdapter",
    "PosthocMethod",
    "ProLIPAdapter",
    "ProbVLM",
    "Side",
    "Top1Distance",
    "WhitenedNorm",
    "fit_hit_logits",
    "load_method",
    "save_method",
]
