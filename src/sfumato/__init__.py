"""sfumato: image-text search and matching that knows what it does not know.

Every image and every text is a Gaussian instead of a point. The public names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "sfumato.gaussian": (
        "GaussianEmbedding",
        "load_embeddings",
        "save_embeddings",
    ),
    "sfumato.distances": (
        "DISTANCES",
        "average_l2",
        "average_l2_matrix",
        "bhattacharyya",
        "bhattacharyya_matrix",
        "csd",
        "csd_matrix",
        "daa_loss",
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
    "sfumato.densities": (
        "Laplace",
        "VonMisesFisher",
        "sampled_csd",
        "sampled_csd_matrix",
    ),
    "sfumato.matching": (
        "MatchingLogits",
        "fit_logits",
        "match_probability",
        "sampled_match_log_probability",
    ),
    "sfumato.losses": (
        "DAALoss",
        "InfoNCELoss",
        "LOSSES",
        "PCMELoss",
        "PCMEPPLoss",
        "PVSELoss",
        "ProLIPLoss",
        "TripletLoss",
        "daa_loss",
        "inclusion_loss",
        "inclusion_test",
        "infonce_loss",
        "log_inclusion",
        "pcme_loss",
        "pcmepp_loss",
        "prolip_loss",
        "pvse_loss",
        "triplet_loss",
        "vib_loss",
    ),
    "sfumato.encoders.dual": ("DualEncoder",),
    "sfumato.encoders.heads": ("GaussianHead",),
    "sfumato.encoders.pooling": (
        "GPO",
        "POOLINGS",
    ),
    "sfumato.encoders.clip": (
        "ClipImageEncoder",
        "ClipTextEncoder",
    ),
    "sfumato.encoders.hub": (
        "Published",
        "load_published",
    ),
    "sfumato.encoders.checkpoints": ("read_checkpoint",),
    "sfumato.metrics.relevance": ("Relevance",),
    "sfumato.evaluation.protocols": ("evaluate_retrieval",),
    "sfumato.search.collection": (
        "GaussianCollection",
        "copy_gallery",
    ),
    "sfumato.search.index": ("GaussianIndex",),
    "sfumato.search.parts": ("read_parts",),
    "sfumato.search.ranking": (
        "rank_relevant",
        "top_k",
    ),
    "sfumato.search.stores.base": ("Filter",),
    "sfumato.data.emoji": ("load_emoji",),
    "sfumato.data.pairs": ("PairData",),
    "sfumato.data.manifest": (
        "read_image_folder",
        "read_manifest",
    ),
    "sfumato.data.sources": ("read_karpathy",),
    "sfumato.data.noise": ("noisy_pairs",),
    "sfumato.data.shards": (
        "ShardStream",
        "read_shards",
        "write_shards",
    ),
    "sfumato.training.config": (
        "Recipe",
        "load_recipe",
    ),
    "sfumato.training.loop": ("fit",),
    "sfumato.training.run": (
        "Run",
        "load_run",
    ),
    "sfumato.training.export": (
        "export_run",
        "load_exported",
        "load_model",
    ),
    "sfumato.calibration": ("Calibration",),
    "sfumato.audit": ("audit_pairs", "wrong_probability", "wrong_share"),
    "sfumato.evaluation.truths": (
        "Truth",
        "read_truth",
    ),
    "sfumato.evaluation.benchmarks": (
        "evaluate_benchmarks",
        "evaluate_ranked_lists",
        "evaluate_score_matrix",
    ),
    "sfumato.evaluation.estimators": (
        "ESTIMATORS",
        "Estimator",
        "estimate_uncertainty",
    ),
    "sfumato.evaluation.trust": ("measure_trust",),
    "sfumato.evaluation.strategies": (
        "STRATEGIES",
        "evaluate_strategies",
    ),
    "sfumato.evaluation.published": ("published_rows",),
    "sfumato.evaluation.compare": ("compare_per_query",),
    "sfumato.foreign": ("read_embeddings",),
    "sfumato.data.problems": ("Problems",),
    "sfumato.analysis.corruption": ("corruption_curves",),
    "sfumato.analysis.maps": ("map_items",),
    "sfumato.analysis.projection": ("fit_map",),
    "sfumato.analysis.sets": ("PictureSets", "measure_sets"),
    "sfumato.analysis.studies": ("AnalysisOptions", "analyse_model"),
    "sfumato.analysis.words": ("words_by_uncertainty",),
    "sfumato.prompts": ("pool_prompts",),
    "sfumato.zeroshot": ("evaluate_zeroshot",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DISTANCES",
    "ESTIMATORS",
    "GPO",
    "LOSSES",
    "POOLINGS",
    "STRATEGIES",
    "AnalysisOptions",
    "Calibration",
    "ClipImageEncoder",
    "ClipTextEncoder",
    "DAALoss",
    "DualEncoder",
    "Estimator",
    "Filter",
    "GaussianCollection",
    "GaussianEmbedding",
    "GaussianHead",
    "GaussianIndex",
    "InfoNCELoss",
    "Laplace",
    "MatchingLogits",
    "PCMELoss",
    "PCMEPPLoss",
    "PVSELoss",
    "PairData",
    "PictureSets",
    "ProLIPLoss",
    "Problems",
    "Published",
    "Recipe",
    "Relevance",
    "Run",
    "ShardStream",
    "TripletLoss",
    "Truth",
    "VonMisesFisher",
    "__version__",
    "analyse_model",
    "audit_pairs",
    "average_l2",
    "average_l2_matrix",
    "bhattacharyya",
    "bhattacharyya_matrix",
    "compare_per_query",
    "copy_gallery",
    "corruption_curves",
    "csd",
    "csd_matrix",
    "daa_loss",
    "elk",
    "elk_matrix",
    "estimate_uncertainty",
    "evaluate_benchmarks",
    "evaluate_ranked_lists",
    "evaluate_retrieval",
    "evaluate_score_matrix",
    "evaluate_strategies",
    "evaluate_zeroshot",
    "export_run",
    "fit",
    "fit_logits",
    "fit_map",
    "get_distance",
    "inclusion_loss",
    "inclusion_test",
    "infonce_loss",
    "js",
    "js_matrix",
    "kl",
    "kl_matrix",
    "load_embeddings",
    "load_emoji",
    "load_exported",
    "load_model",
    "load_published",
    "load_recipe",
    "load_run",
    "log_inclusion",
    "map_items",
    "match_probability",
    "measure_sets",
    "measure_trust",
    "min_kl",
    "min_kl_matrix",
    "noisy_pairs",
    "pcme_loss",
    "pcmepp_loss",
    "pool_prompts",
    "prolip_loss",
    "published_rows",
    "pvse_loss",
    "rank_relevant",
    "read_checkpoint",
    "read_embeddings",
    "read_image_folder",
    "read_karpathy",
    "read_manifest",
    "read_parts",
    "read_shards",
    "read_truth",
    "sampled_csd",
    "sampled_csd_matrix",
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
    "words_by_uncertainty",
    "write_shards",
    "wrong_probability",
    "wrong_share",
]

if TYPE_CHECKING:
    from sfumato.analysis.corruption import corruption_curves
    from sfumato.analysis.maps import map_items
    from sfumato.analysis.projection import fit_map
    from sfumato.analysis.sets import PictureSets, measure_sets
    from sfumato.analysis.studies import AnalysisOptions, analyse_model
    from sfumato.analysis.words import words_by_uncertainty
    from sfumato.audit import audit_pairs, wrong_probability, wrong_share
    from sfumato.calibration import Calibration
    from sfumato.data.emoji import load_emoji
    from sfumato.data.manifest import read_image_folder, read_manifest
    from sfumato.data.noise import noisy_pairs
    from sfumato.data.pairs import PairData
    from sfumato.data.problems import Problems
    from sfumato.data.shards import ShardStream, read_shards, write_shards
    from sfumato.data.sources import read_karpathy
    from sfumato.densities import Laplace, VonMisesFisher, sampled_csd, sampled_csd_matrix
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
    from sfumato.encoders.checkpoints import read_checkpoint
    from sfumato.encoders.clip import ClipImageEncoder, ClipTextEncoder
    from sfumato.encoders.dual import DualEncoder
    from sfumato.encoders.heads import GaussianHead
    from sfumato.encoders.hub import Published, load_published
    from sfumato.encoders.pooling import GPO, POOLINGS
    from sfumato.evaluation.benchmarks import evaluate_benchmarks, evaluate_ranked_lists, evaluate_score_matrix
    from sfumato.evaluation.compare import compare_per_query
    from sfumato.evaluation.estimators import ESTIMATORS, Estimator, estimate_uncertainty
    from sfumato.evaluation.protocols import evaluate_retrieval
    from sfumato.evaluation.published import published_rows
    from sfumato.evaluation.strategies import STRATEGIES, evaluate_strategies
    from sfumato.evaluation.trust import measure_trust
    from sfumato.evaluation.truths import Truth, read_truth
    from sfumato.foreign import read_embeddings
    from sfumato.gaussian import GaussianEmbedding, load_embeddings, save_embeddings
    from sfumato.losses import (
        LOSSES,
        DAALoss,
        InfoNCELoss,
        PCMELoss,
        PCMEPPLoss,
        ProLIPLoss,
        PVSELoss,
        TripletLoss,
        daa_loss,
        inclusion_loss,
        inclusion_test,
        infonce_loss,
        log_inclusion,
        pcme_loss,
        pcmepp_loss,
        prolip_loss,
        pvse_loss,
        triplet_loss,
        vib_loss,
    )
    from sfumato.matching import MatchingLogits, fit_logits, match_probability, sampled_match_log_probability
    from sfumato.metrics.relevance import Relevance
    from sfumato.prompts import pool_prompts
    from sfumato.search.collection import (
        GaussianCollection,
        copy_gallery,
    )
    from sfumato.search.index import GaussianIndex
    from sfumato.search.parts import read_parts
    from sfumato.search.ranking import rank_relevant, top_k
    from sfumato.search.stores.base import Filter
    from sfumato.training.config import Recipe, load_recipe
    from sfumato.training.export import export_run, load_exported, load_model
    from sfumato.training.loop import fit
    from sfumato.training.run import Run, load_run
    from sfumato.zeroshot import evaluate_zeroshot


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
