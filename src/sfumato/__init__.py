"""sfumato: image-text search and matching that knows what it does not know.

Every image and every text is a Gaussian instead of a point. The public names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "sfumato.gaussian": ("GaussianEmbedding", "load_embeddings", "save_embeddings"),
    "sfumato.distances": (
        "DISTANCES",
        "average_l2",
        "average_l2_matrix",
        "bhattacharyya",
        "bhattacharyya_matrix",
        "csd",
        "csd_matrix",
        "elk",
        "elk_matrix",
        "get_distance",
        "js",
        "js_matrix",
        "kl",
        "kl_matrix",
        "min_kl",
        "min_kl_matrix",
        "squared_l2",
        "squared_l2_matrix",
        "wasserstein2",
        "wasserstein2_matrix",
        "wasserstein2_printed",
        "wasserstein2_printed_matrix",
    ),
    "sfumato.matching": ("MatchingLogits", "fit_logits", "match_probability", "sampled_match_log_probability"),
    "sfumato.losses": (
        "LOSSES",
        "InfoNCELoss",
        "PCMEPPLoss",
        "TripletLoss",
        "infonce_loss",
        "pcmepp_loss",
        "triplet_loss",
        "vib_loss",
    ),
    "sfumato.encoders.dual": ("DualEncoder",),
    "sfumato.encoders.heads": ("GaussianHead",),
    "sfumato.encoders.pooling": ("GPO", "POOLINGS"),
    "sfumato.metrics.relevance": ("Relevance",),
    "sfumato.evaluation.protocols": ("evaluate_retrieval",),
    "sfumato.search.index": ("GaussianIndex",),
    "sfumato.search.ranking": ("rank_relevant", "top_k"),
    "sfumato.data.emoji": ("load_emoji",),
    "sfumato.training.config": ("Recipe", "load_recipe"),
    "sfumato.training.loop": ("fit",),
    "sfumato.training.run": ("Run", "load_run"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DISTANCES",
    "GPO",
    "LOSSES",
    "POOLINGS",
    "DualEncoder",
    "GaussianEmbedding",
    "GaussianHead",
    "GaussianIndex",
    "InfoNCELoss",
    "MatchingLogits",
    "PCMEPPLoss",
    "Recipe",
    "Relevance",
    "Run",
    "TripletLoss",
    "__version__",
    "average_l2",
    "average_l2_matrix",
    "bhattacharyya",
    "bhattacharyya_matrix",
    "csd",
    "csd_matrix",
    "elk",
    "elk_matrix",
    "evaluate_retrieval",
    "fit",
    "fit_logits",
    "get_distance",
    "infonce_loss",
    "js",
    "js_matrix",
    "kl",
    "kl_matrix",
    "load_embeddings",
    "load_emoji",
    "load_recipe",
    "load_run",
    "match_probability",
    "min_kl",
    "min_kl_matrix",
    "pcmepp_loss",
    "rank_relevant",
    "sampled_match_log_probability",
    "save_embeddings",
    "squared_l2",
    "squared_l2_matrix",
    "top_k",
    "triplet_loss",
    "vib_loss",
    "wasserstein2",
    "wasserstein2_matrix",
    "wasserstein2_printed",
    "wasserstein2_printed_matrix",
]

if TYPE_CHECKING:
    from sfumato.data.emoji import load_emoji
    from sfumato.distances import (
        DISTANCES,
        average_l2,
        average_l2_matrix,
        bhattacharyya,
        bhattacharyya_matrix,
        csd,
        csd_matrix,
        elk,
        elk_matrix,
        get_distance,
        js,
        js_matrix,
        kl,
        kl_matrix,
        min_kl,
        min_kl_matrix,
        squared_l2,
        squared_l2_matrix,
        wasserstein2,
        wasserstein2_matrix,
        wasserstein2_printed,
        wasserstein2_printed_matrix,
    )
    from sfumato.encoders.dual import DualEncoder
    from sfumato.encoders.heads import GaussianHead
    from sfumato.encoders.pooling import GPO, POOLINGS
    from sfumato.evaluation.protocols import evaluate_retrieval
    from sfumato.gaussian import GaussianEmbedding, load_embeddings, save_embeddings
    from sfumato.losses import (
        LOSSES,
        InfoNCELoss,
        PCMEPPLoss,
        TripletLoss,
        infonce_loss,
        pcmepp_loss,
        triplet_loss,
        vib_loss,
    )
    from sfumato.matching import MatchingLogits, fit_logits, match_probability, sampled_match_log_probability
    from sfumato.metrics.relevance import Relevance
    from sfumato.search.index import GaussianIndex
    from sfumato.search.ranking import rank_relevant, top_k
    from sfumato.training.config import Recipe, load_recipe
    from sfumato.training.loop import fit
    from sfumato.training.run import Run, load_run


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
