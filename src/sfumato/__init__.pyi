"""Public names of sfumato and the modules that define them. ``__init__.py`` imports each on first use."""

from .arrays import (
    as_tensor as as_tensor,
)
from .calibration.calibrator import (
    Calibration as Calibration,
)
from .calibration.platt import (
    fit_logits as fit_logits,
)
from .calibration.query_scores import (
    QueryScores as QueryScores,
)
from .data.captioned import (
    read_image_folder as read_image_folder,
)
from .data.emoji import (
    load_emoji as load_emoji,
)
from .data.feature_tables import (
    read_embeddings as read_embeddings,
)
from .data.images import (
    Problems as Problems,
)
from .data.layouts import (
    read_karpathy as read_karpathy,
)
from .data.manifest import (
    read_manifest as read_manifest,
)
from .data.pairs import (
    PairData as PairData,
)
from .data.shards import (
    ShardStream as ShardStream,
)
from .data.shards import (
    read_shards as read_shards,
)
from .data.shards import (
    write_shards as write_shards,
)
from .data.splits import (
    noisy_pairs as noisy_pairs,
)
from .distances import (
    DISTANCES as DISTANCES,
)
from .distances import (
    csd as csd,
)
from .distances import (
    csd_matrix as csd_matrix,
)
from .distances import (
    get_distance as get_distance,
)
from .encoders.clip_transformers import (
    ClipImageEncoder as ClipImageEncoder,
)
from .encoders.clip_transformers import (
    ClipTextEncoder as ClipTextEncoder,
)
from .encoders.dual import (
    DualEncoder as DualEncoder,
)
from .encoders.encoder_registry import (
    ENCODERS as ENCODERS,
)
from .encoders.encoder_registry import (
    register_encoder as register_encoder,
)
from .encoders.heads import (
    GPO as GPO,
)
from .encoders.heads import (
    POOLINGS as POOLINGS,
)
from .encoders.heads import (
    GaussianHead as GaussianHead,
)
from .encoders.heads import (
    HeadOptions as HeadOptions,
)
from .evaluation.estimators import (
    ESTIMATORS as ESTIMATORS,
)
from .evaluation.estimators import (
    Estimator as Estimator,
)
from .evaluation.estimators import (
    estimate_uncertainty as estimate_uncertainty,
)
from .evaluation.estimators import (
    register_estimator as register_estimator,
)
from .evaluation.ground_truth import (
    GroundTruth as GroundTruth,
)
from .evaluation.ground_truth import (
    read_ground_truth as read_ground_truth,
)
from .evaluation.protocols import (
    evaluate_retrieval as evaluate_retrieval,
)
from .evaluation.trust import (
    measure_trust as measure_trust,
)
from .gaussian import (
    GaussianEmbedding as GaussianEmbedding,
)
from .gaussian import (
    load_embeddings as load_embeddings,
)
from .gaussian import (
    save_embeddings as save_embeddings,
)
from .inclusion import (
    inclusion_loss as inclusion_loss,
)
from .inclusion import (
    inclusion_test as inclusion_test,
)
from .inclusion import (
    log_inclusion as log_inclusion,
)
from .losses import (
    LOSSES as LOSSES,
)
from .losses import (
    DAALoss as DAALoss,
)
from .losses import (
    DAAOptions as DAAOptions,
)
from .losses import (
    InfoNCELoss as InfoNCELoss,
)
from .losses import (
    InfoNCEOptions as InfoNCEOptions,
)
from .losses import (
    PCMELoss as PCMELoss,
)
from .losses import (
    PCMEOptions as PCMEOptions,
)
from .losses import (
    PCMEPPLoss as PCMEPPLoss,
)
from .losses import (
    PCMEPPOptions as PCMEPPOptions,
)
from .losses import (
    ProLIPLoss as ProLIPLoss,
)
from .losses import (
    ProLIPOptions as ProLIPOptions,
)
from .losses import (
    PVSELoss as PVSELoss,
)
from .losses import (
    PVSEOptions as PVSEOptions,
)
from .losses import (
    TripletLoss as TripletLoss,
)
from .losses import (
    TripletOptions as TripletOptions,
)
from .losses import (
    daa_loss as daa_loss,
)
from .losses import (
    infonce_loss as infonce_loss,
)
from .losses import (
    pcme_loss as pcme_loss,
)
from .losses import (
    pcmepp_loss as pcmepp_loss,
)
from .losses import (
    prolip_loss as prolip_loss,
)
from .losses import (
    pvse_loss as pvse_loss,
)
from .losses import (
    triplet_loss as triplet_loss,
)
from .losses import (
    vib_loss as vib_loss,
)
from .matching import (
    MatchingLogits as MatchingLogits,
)
from .matching import (
    match_probability as match_probability,
)
from .matching import (
    match_probability_distance as match_probability_distance,
)
from .matching import (
    sampled_match_log_probability as sampled_match_log_probability,
)
from .metrics.relevance import (
    Relevance as Relevance,
)
from .metrics.reliability_plot import (
    Reliability as Reliability,
)
from .models.load import (
    load_model as load_model,
)
from .models.model import (
    Model as Model,
)
from .models.pretrained import (
    load_pretrained as load_pretrained,
)
from .models.pretrained_tensors import (
    read_checkpoint as read_checkpoint,
)
from .models.recipe import (
    Recipe as Recipe,
)
from .models.recipe import (
    find_recipe as find_recipe,
)
from .models.recipe import (
    load_recipe as load_recipe,
)
from .models.run import (
    Run as Run,
)
from .models.run import (
    load_run as load_run,
)
from .search.answer import (
    Answer as Answer,
)
from .search.answer import (
    Hit as Hit,
)
from .search.collection import (
    GaussianCollection as GaussianCollection,
)
from .search.collection import (
    copy_gallery as copy_gallery,
)
from .search.exact import (
    rank_relevant as rank_relevant,
)
from .search.exact import (
    top_k as top_k,
)
from .search.index import (
    GaussianIndex as GaussianIndex,
)
from .search.parts import (
    read_parts as read_parts,
)
from .search.searcher import (
    Searcher as Searcher,
)
from .search.stores.protocol import (
    Filter as Filter,
)
from .studies.analyse import (
    AnalysisOptions as AnalysisOptions,
)
from .studies.analyse import (
    analyse_model as analyse_model,
)
from .studies.maps import (
    fit_map as fit_map,
)
from .studies.maps import (
    map_items as map_items,
)
from .studies.sets import (
    ImageSets as ImageSets,
)
from .studies.sets import (
    measure_sets as measure_sets,
)
from .studies.words import (
    words_by_uncertainty as words_by_uncertainty,
)
from .studies.zeroshot import (
    evaluate_zeroshot as evaluate_zeroshot,
)
from .studies.zeroshot import (
    pool_prompts as pool_prompts,
)
from .training.loop import (
    fit as fit,
)
from .workflows.adopt import (
    AdoptedModel as AdoptedModel,
)
from .workflows.adopt import (
    adopt as adopt,
)
from .workflows.adopt import (
    adopt_encoders as adopt_encoders,
)
from .workflows.audit import (
    audit_pairs as audit_pairs,
)
from .workflows.audit import (
    wrong_fraction as wrong_fraction,
)
from .workflows.audit import (
    wrong_probability as wrong_probability,
)
from .workflows.export import (
    export_run as export_run,
)
from .workflows.search import (
    LoadedModel as LoadedModel,
)
from .workflows.search import (
    load as load,
)
from .workflows.search import (
    load_index as load_index,
)

__version__: str
