"""Recipes: everything that decides a run, in one TOML file, checked before anything starts.

A recipe is complete and strict: an unknown key is an error that names the nearest one. Overrides have the form
``section.key=value`` and pass the same checks; the resolved recipe is saved beside every checkpoint.
"""

import difflib
import functools
import operator
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tomli_w
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
    model_validator,
)

from sfumato.data.sources import DataConfig, get_source
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.files import write_atomically
from sfumato.losses import LOSSES, LossOptions


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SmallImageConfig(_Section):
    """A small convolutional network that learns from pixels."""

    kind: Literal["small"] = "small"
    size: int = Field(64, ge=16, description="side of the square pictures in pixels")
    width: PositiveInt = Field(48, description="channels of the first stage; doubled at each of the later ones")
    augment: bool = Field(True, description="random geometry and colours while training")

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """How pictures are changed at random while training."""
        return "style" if self.augment else "none"


class SmallTextConfig(_Section):
    """A small network over word pieces, whose vocabulary is learnt from the training texts."""

    kind: Literal["small"] = "small"
    vocabulary: PositiveInt = Field(4000, description="number of word pieces; single characters are always among them")
    width: PositiveInt = Field(256, description="channels of the token features")
    max_tokens: PositiveInt = 64
    dropout: float = Field(0.1, ge=0, lt=1)


class WordTextConfig(_Section):
    """A GRU over whole words, those of the training texts."""

    kind: Literal["gru"] = "gru"
    width: PositiveInt = Field(300, description="of the word vectors")
    hidden: PositiveInt = Field(512, description="width of the GRU, in each direction")
    bidirectional: bool = Field(False, description="read backwards too")
    states: Literal["final", "all"] = Field(
        "final", description="token features: the state in which each direction ends, or those at all words"
    )
    min_count: PositiveInt = Field(1, description="how often the training texts must have a word for it to be known")
    max_tokens: PositiveInt = 64
    vectors: str = Field(
        "", description="start from the word vectors of this text file of GloVe; needed to begin training only"
    )
    freeze: bool = Field(False, description="vectors: they never learn")
    variance_gru: bool = Field(True, description="the log variance has a GRU of its own")

    def check(self) -> None:
        """Refuse values that would have no effect, or a bad one."""
        if self.freeze and not self.vectors:
            raise ValueError(
                "model.text.freeze is for word vectors from a file; give model.text.vectors, or leave it out"
            )


class FrozenImageConfig(_Section):
    """Token features of a pre-trained image backbone, computed once."""

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field(
        "efficientnet-lite0", description="efficientnet-lite0, a hub name, or a local transformers folder"
    )
    size: int | None = Field(None, ge=16, description="side of the pictures in pixels; the backbone's own if left out")
    grid: int | None = Field(
        None, ge=1, description="average a convolutional map down to grid x grid tokens; all if left out"
    )

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """Features are computed once: their pictures do not change."""
        return "none"


class FrozenTextConfig(_Section):
    """Token features of a pre-trained text backbone, computed once."""

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field("minilm-l6-v2", description="minilm-l6-v2, a hub name, or a local transformers folder")
    max_tokens: PositiveInt = 64


class EfficientNetImageConfig(_Section):
    """EfficientNet-Lite0 (extra ``offline``), fine-tuned from pixels."""

    kind: Literal["efficientnet"] = "efficientnet"
    size: int = Field(128, ge=32, description="side of the square pictures in pixels")
    pretrained: bool = Field(True, description="start from the weights of ImageNet")
    augment: Literal["none", "crop", "style"] = Field(
        "crop", description="while training: random crops and mirror images, or all that a drawing style may change"
    )
    in_memory: bool = Field(True, description="decode all pictures once instead of anew for each batch")

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """How pictures are changed at random while training."""
        return self.augment

    @property
    def starts_pretrained(self) -> bool:
        """Whether its weights come from elsewhere, so that they may rest while what is new learns."""
        return self.pretrained


class ResNetImageConfig(_Section):
    """A residual network of transformers, trained from pixels."""

    kind: Literal["resnet"] = "resnet"
    weights: str = Field("", description="hub name or local folder of a ResNet; random weights if empty")
    architecture: Literal["resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"] = Field(
        "resnet-50", description="without weights"
    )
    depths: tuple[PositiveInt, ...] | None = Field(
        None, min_length=1, description="without weights, in place of an architecture: blocks of each stage"
    )
    width: PositiveInt = Field(
        64, description="with depths: channels of the first stage; doubled at each of the later ones"
    )
    size: int = Field(224, ge=32, description="side of the square pictures in pixels")
    fit: Literal["squash", "crop"] = Field("squash", description="pictures to squares: by squeezing, or a centre crop")
    augment: Literal["none", "crop", "style"] = Field(
        "crop", description="while training: random crops and mirror images, or all that a drawing style may change"
    )
    in_memory: bool = Field(False, description="decode all pictures once instead of anew for each batch")

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """How pictures are changed at random while training."""
        return self.augment

    @property
    def starts_pretrained(self) -> bool:
        """Whether its weights come from elsewhere, so that they may rest while what is new learns."""
        return bool(self.weights)

    def check(self) -> None:
        """Refuse values that would have no effect."""
        set_to = {key for key in ("architecture", "depths", "width") if getattr(self, key) != _default(self, key)}
        useless = set_to if self.weights else (set_to & {"architecture"} if self.depths else set_to & {"width"})
        if useless:
            instead = "weights" if self.weights else "depths"
            how = "without" if instead == "depths" and "width" in useless else "beside"
            raise ValueError(f"model.image.{min(useless)} has no effect {how} model.image.{instead}; leave it out")


def _default(section: _Section, key: str) -> Any:
    return type(section).model_fields[key].default


class _ClipConfig(_Section):
    """What both sides of the CLIP family refuse."""

    def check(self, section: str) -> None:
        """Refuse values that would have no effect."""
        without_weights = {"architecture", "blocks", "activation", "vocabulary", "tokenizer"} & set(
            type(self).model_fields
        )
        for key in sorted(without_weights):
            if getattr(self, "weights", "") and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{section}.{key} is for random weights; leave it out beside {section}.weights")
        if getattr(self, "variance_token", False) and getattr(self, "variance_blocks", 1) > 1:
            raise ValueError(
                f"{section}.variance_token takes the place of variance_blocks; leave {section}.variance_blocks out"
            )


class ClipImageConfig(_ClipConfig):
    """A vision transformer of the CLIP family, trained from pixels, with blocks of its own for the log variance."""

    kind: Literal["clip"] = "clip"
    weights: str = Field("", description="hub name or local folder of a CLIP or SigLIP model; random weights if empty")
    architecture: Literal["ViT-Ti/16", "ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/14"] = Field(
        "ViT-B/32", description="without weights"
    )
    size: int | None = Field(None, ge=16, description="side of the square pictures; the model's own (224) if left out")
    blocks: PositiveInt | None = Field(None, description="without weights: number of blocks, if not the architecture's")
    activation: Literal["quick_gelu", "gelu"] = Field(
        "quick_gelu", description="without weights: OpenAI's or open_clip's"
    )
    variance_blocks: int = Field(1, ge=0, description="last blocks that the log variance has for itself")
    variance_start: Literal["random", "copy"] = Field("random", description="of these: as published, or the mean's")
    variance_token: bool = Field(
        False, description="ProLIP's way: the log variance from an extra token [UNC] instead of extra blocks"
    )
    final_norm: bool = Field(False, description="the backbone's last norm on the way to the mean")
    fit: Literal["squash", "crop"] = Field(
        "squash", description="pictures to squares: by squeezing, or CLIP's centre crop"
    )
    augment: Literal["none", "crop", "style"] = Field(
        "crop", description="while training: random crops and mirror images, or all that a drawing style may change"
    )
    in_memory: bool = Field(False, description="decode all pictures once instead of anew for each batch")
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """How pictures are changed at random while training."""
        return self.augment


class RegionImageConfig(_Section):
    """Region features made by another model, of data.source scan or a manifest of .npy files: VSRN, or VSE-infinity on regions."""

    kind: Literal["regions"] = "regions"
    channels: PositiveInt = Field(2048, description="c of the features")
    width: PositiveInt | None = Field(None, description="channels of what follows; model.dim if left out")
    graph_layers: int = Field(4, ge=0, description="layers of reasoning between the regions of a picture")
    recurrent: bool = Field(
        True, description="end in the last state of a GRU over the regions; otherwise they are pooled, model.pooling"
    )
    variance_layers: bool = Field(
        True, description="the log variance has these layers for itself, without sharing; otherwise a linear map alone"
    )

    @property
    def augment_mode(self) -> Literal["none", "crop", "style"]:
        """Features are what they are."""
        return "none"

    def check(self) -> None:
        """Refuse values that would have no effect."""
        for key in ("width", "variance_layers"):
            if not self.graph_layers and not self.recurrent and getattr(self, key) != _default(self, key):
                raise ValueError(
                    f"model.image.{key} has no effect with model.image.graph_layers=0 and recurrent=false, where the regions go to"
                    " the head as they are; leave it out"
                )


class ClipTextConfig(_ClipConfig):
    """The text transformer of the CLIP family, with blocks of its own for the log variance."""

    kind: Literal["clip"] = "clip"
    weights: str = Field("", description="hub name or local folder of a CLIP or SigLIP model; random weights if empty")
    architecture: Literal["ViT-Ti/16", "ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/14"] = Field(
        "ViT-B/32", description="without weights"
    )
    blocks: PositiveInt | None = Field(None, description="without weights: number of blocks, if not the architecture's")
    activation: Literal["quick_gelu", "gelu"] = Field(
        "quick_gelu", description="without weights: OpenAI's or open_clip's"
    )
    vocabulary: PositiveInt = Field(4000, description="without weights: word pieces, learnt from the training texts")
    tokenizer: str = Field(
        "", description="without weights: hub name or local folder whose word pieces to take instead of learning some"
    )
    max_tokens: int | None = Field(
        None,
        ge=3,
        description="longer texts are cut; as many as the encoder has positions if left out, 77 without weights",
    )
    variance_blocks: int = Field(1, ge=0, description="last blocks that the log variance has for itself")
    variance_start: Literal["random", "copy"] = Field("random", description="of these: as published, or the mean's")
    variance_token: bool = Field(
        False, description="ProLIP's way: the log variance from an extra token [UNC] instead of extra blocks"
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")


ImageConfig = Annotated[
    SmallImageConfig
    | FrozenImageConfig
    | EfficientNetImageConfig
    | ResNetImageConfig
    | ClipImageConfig
    | RegionImageConfig,
    Field(discriminator="kind"),
]
TextConfig = Annotated[
    SmallTextConfig | WordTextConfig | FrozenTextConfig | ClipTextConfig, Field(discriminator="kind")
]


class ModelConfig(_Section):
    """Encoders and Gaussian heads."""

    dim: PositiveInt = Field(256, description="d of the embeddings")
    image: ImageConfig = SmallImageConfig()
    text: TextConfig = SmallTextConfig()
    pooling: Literal["gpo", "average", "max", "first", "last", "token"] = Field(
        "gpo", description="token: the class token of images and the last token of texts"
    )
    mlp: bool = Field(False, description="a two-layer network beside the linear map of the mean")
    normalize: bool = Field(True, description="means of unit length")
    variance: bool = Field(True, description="False: points, the deterministic baselines")
    variance_norm: bool = Field(False, description="a layer norm on the log variance")
    variance_mlp: bool = Field(False, description="a two-layer network beside the linear map of the log variance")
    init_total_variance: PositiveFloat = Field(0.1, description="sum of an embedding's variances at the start")
    covariance: Literal["ellipsoidal", "spherical-average", "spherical-one"] = Field(
        "ellipsoidal", description="a variance for each dimension, their average for all, or one output for all"
    )
    variance_bounds: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="lowest and highest variance of a dimension; none if left out"
    )
    embeddings: PositiveInt = Field(
        1, description="embeddings of an item, each with dim dimensions, by local attention; for points only"
    )
    local_attention: bool = Field(
        False, description="PCME's heads: attended tokens (of a gru: words) add to the pooled mean and log variance"
    )
    feature_dropout: float = Field(0.0, ge=0, lt=1, description="share of the token features dropped before the heads")

    def check_variances(self) -> None:
        """Refuse variances that contradict each other."""
        if self.embeddings > 1 and self.variance:
            raise ValueError("model.embeddings above 1 is for points; set model.variance=false")
        if self.embeddings > 1 and self.local_attention:
            raise ValueError("model.embeddings above 1 come from local attention; leave out model.local_attention")
        if not self.variance and (self.variance_bounds or self.covariance != "ellipsoidal"):
            raise ValueError("model.covariance and model.variance_bounds are for variances, but model.variance=false")
        if self.covariance == "spherical-one" and self.variance_norm:
            raise ValueError("model.variance_norm of a single output is constant; leave it out with spherical-one")
        if self.variance_bounds:
            lowest, highest = self.variance_bounds
            if not lowest < self.init_total_variance / self.dim < highest:
                raise ValueError(
                    f"model.init_total_variance={self.init_total_variance:g} over model.dim={self.dim} dimensions must lie"
                    f" between model.variance_bounds, {lowest:g} and {highest:g} each; e.g."
                    f" {self.dim * (lowest * highest) ** 0.5:g}"
                )


class LossConfig(_Section):
    """The section of a loss: its name, and the options of the loss as keys."""

    name: str
    distance: str

    def options(self) -> LossOptions:
        """The options of the loss, checked."""
        return LOSSES[self.name].options(**self.model_dump(exclude={"name"}))


def loss_config(name: str, options: type[LossOptions]) -> type[LossConfig]:
    """The section of a loss, made from its options: the same keys, defaults, descriptions and bounds.

    Args:
        name: of the loss in LOSSES.
        options: class of its options.

    Returns:
        A pydantic model; its key ``name`` accepts this name alone.
    """
    kinds = get_type_hints(options)
    keys: dict[str, Any] = {o.name: (kinds[o.name], Field(o.default, **o.metadata)) for o in fields(options)}
    keys["name"] = (Literal[name], name)
    summary = (options.__doc__ or name).partition("\n")[0]
    return create_model(options.__name__.replace("Options", "Config"), __base__=LossConfig, __doc__=summary, **keys)


LOSS_CONFIGS = {name: loss_config(name, entry.options) for name, entry in LOSSES.items()}
"""The section of every loss by its name."""


if TYPE_CHECKING:
    LossConfigs = LossConfig
else:
    LossConfigs = functools.reduce(operator.or_, LOSS_CONFIGS.values())


class AugmentConfig(_Section):
    """Random changes of the training data, beside the geometry and colours of pictures that the image encoder names."""

    image_tokens: float = Field(0.0, ge=0, lt=1, description="SizeAugment: largest share of an image's tokens dropped")
    text_tokens: float = Field(
        0.0, ge=0, lt=1, description="SizeAugment: share of a text's tokens masked, replaced or deleted"
    )
    drop_words: float = Field(
        0.0, ge=0, lt=1, description="share of a text's words left out; 0.1 as published for PCME"
    )
    erase: float = Field(
        0.0, ge=0, le=1, description="share of the images with a rectangle erased; 0.2 as published for PCME"
    )
    mixed_share: float = Field(0.0, ge=0, le=1, description="share of the images mixed with another of the batch")
    mixup_alpha: NonNegativeFloat = Field(2.0, description="Beta distribution of Mixup's shares; 0: CutMix only")
    cutmix_alpha: NonNegativeFloat = Field(2.0, description="Beta distribution of CutMix's shares; 0: Mixup only")
    mix_choice: Literal["batch", "element"] = Field(
        "batch", description="Mixup or CutMix is chosen for each batch (the paper) or image (the released code)"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="labels lie in [this, 1 - this]")


class OptimConfig(_Section):
    """Optimiser and schedule."""

    name: Literal["adamw", "adamp"] = "adamw"
    lr: PositiveFloat = 5e-4
    weight_decay: NonNegativeFloat = Field(1e-4, description="of weights; biases, norms and logits have none")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    logits_lr_multiplier: NonNegativeFloat = Field(1.0, description="for the match logits' scale and bias")
    image_lr_multiplier: NonNegativeFloat = Field(1.0, description="for the image network below its head")
    text_lr_multiplier: NonNegativeFloat = Field(1.0, description="for the text network below its head")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="clip: learning rate of a block relative to the one above it"
    )
    freeze_image_epochs: int = Field(
        0,
        ge=0,
        description="epochs in which a pre-trained image network below its head, its variance blocks excepted, is frozen",
    )
    first_stage_epochs: int = Field(
        0,
        ge=0,
        description="epochs in which what came pre-trained below the heads rests (of a gru its vectors from a file);"
        " the rest of the run is a second stage, in which all learns; 0 for one stage",
    )
    second_stage_factor: PositiveFloat = Field(0.1, description="of all learning rates in the second stage")
    schedule: Literal["constant", "cosine", "step"] = Field("cosine", description="of each stage for itself")
    warmup_epochs: NonNegativeFloat = Field(1.0, description="linear warm-up, after the frozen epochs")
    step_at: float = Field(
        0.6, gt=0, le=1, description="step: share of the run after which lr is multiplied by step_factor"
    )
    step_factor: PositiveFloat = 0.1
    clip_norm: NonNegativeFloat = Field(2.0, description="largest gradient norm; 0 for none")

    @model_validator(mode="after")
    def _one_way_to_rest(self) -> "OptimConfig":
        if self.first_stage_epochs and self.freeze_image_epochs:
            raise ValueError(
                "the image network rests in all optim.first_stage_epochs; leave out optim.freeze_image_epochs"
            )
        return self


class TrainConfig(_Section):
    """The loop."""

    epochs: PositiveInt = 30
    batch_size: int = Field(128, ge=2)
    seed: int = Field(0, ge=0)
    threads: int = Field(
        0, ge=0, description="CPU threads; 0 leaves the choice to torch. Runs are bit-equal at equal threads"
    )
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1")
    evaluate_every: PositiveInt = Field(1, description="epochs between validations; the last epoch is always validated")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the encoders below the heads; never of distances"
    )
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="validate and keep an exponential moving average of the weights; 0 for none"
    )
    swa_epochs: int = Field(
        0, ge=0, description="validate and keep the mean of the weights after each of the last epochs; 0 for none"
    )
    micro_batch: int = Field(
        0, ge=0, description="pairs that are encoded at a time, at the price of a second pass; 0: the whole batch"
    )
    compile: bool = Field(False, description="compile the encoders with torch.compile")
    timeout_minutes: PositiveFloat = Field(10.0, description="several processes: longest wait for each other")
    select: Literal["auto", "rsum", "map@r", "last"] = Field(
        "auto",
        description="which epoch's weights to keep: the best by rsum or map@r (auto: by map@r where the truth is many-to-many), or the last",
    )


class SpreadConfig(_Section):
    """A second stage: all else at rest, log variances learn how widely an item's listed matches lie apart."""

    epochs: int = Field(0, ge=0, description="passes over the items; 0 for no second stage")
    sides: Literal["both", "images", "texts"] = "both"
    whiten: bool = Field(True, description="measure angles between the whitened means of the matches, not the means")
    floor: PositiveFloat = Field(0.02, description="total variance of an item with a single match")
    lr: PositiveFloat = 1e-2
    batch_size: PositiveInt = 256


class Recipe(_Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: Annotated[LossConfigs, Field(discriminator="name")] = LOSS_CONFIGS["pcmepp"].model_validate({})
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    spread: SpreadConfig = SpreadConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        distance = get_distance(self.loss.distance)
        if not self.model.variance and distance.needs_variance:
            raise ValueError(
                f"loss.distance={distance.name!r} needs variances, but model.variance=false; use csd or squared_l2"
            )
        beta: float = getattr(self.loss, "beta", 0.0)
        inclusion: float = getattr(self.loss, "inclusion_weight", 0.0)
        if not self.model.variance and beta:
            raise ValueError("loss.beta must be 0 when model.variance=false: the bottleneck of a point is infinite")
        if not self.model.variance and inclusion:
            raise ValueError("loss.inclusion_weight must be 0 when model.variance=false: points include nothing")
        if self.loss.name == "daa" and not self.data.graded:
            raise ValueError("loss.name='daa' learns from graded labels; set data.graded=true")
        if getattr(self.loss, "soft_margin", False) and not self.data.graded:
            raise ValueError("loss.soft_margin=true is for graded labels; set data.graded=true")
        self.model.check_variances()
        if self.model.embeddings != distance.embeddings:
            raise ValueError(
                f"model.embeddings={self.model.embeddings} does not fit loss.distance={distance.name!r}; with"
                " model.embeddings=2 use nearest_of_2, and with 1 any other"
            )
        if self.spread.epochs and not self.model.variance:
            raise ValueError("spread.epochs must be 0 when model.variance=false: points have no variance to fit")
        source = get_source(self.data.source)
        if self.spread.epochs and source.streamed:
            raise ValueError("spread.epochs needs all pairs at hand; shards are read as a stream, set it to 0")
        if self.spread.epochs and distance.name != "squared_l2":
            raise ValueError(
                f"spread.epochs changes variances after training, and loss.distance={distance.name!r} ranks by them; use squared_l2"
            )
        if self.augment.mixed_share and self.model.image.kind in ("frozen", "regions"):
            raise ValueError(
                f"augment.mixed_share mixes pixels; features have none (model.image.kind={self.model.image.kind!r}), set it to 0"
            )
        if self.augment.erase and self.model.image.kind in ("frozen", "regions"):
            raise ValueError(
                f"augment.erase erases pixels; features have none (model.image.kind={self.model.image.kind!r}), set it to 0"
            )
        if self.augment.drop_words and self.model.text.kind == "frozen":
            raise ValueError(
                "augment.drop_words leaves out words before the encoder reads them, and frozen features are read once; set it to 0"
            )
        regions = self.model.image.kind == "regions"
        if regions and source.inputs == "images":
            raise ValueError(
                f"model.image.kind='regions' reads features, and data.source={self.data.source!r} has pictures; make a folder of"
                " features from them with `sfumato regions`, for data.source=scan, or take model.image.kind=frozen"
            )
        if source.inputs == "regions" and not regions:
            raise ValueError(
                f"data.source={self.data.source!r} has region features, which model.image.kind={self.model.image.kind!r} does not read; set it to regions"
            )
        if self.augment.mixed_share and not (self.augment.mixup_alpha or self.augment.cutmix_alpha):
            raise ValueError("augment.mixed_share needs augment.mixup_alpha or augment.cutmix_alpha above 0")
        if self.augment.image_tokens and self.model.pooling in ("token", "first", "last") and not regions:
            raise ValueError(
                f"augment.image_tokens drops tokens that model.pooling={self.model.pooling!r} never looks at; set it to 0"
            )
        sides = {"image": self.model.image, "text": self.model.text}
        if self.optim.layer_decay != 1 and not any(side.kind == "clip" for side in sides.values()):
            raise ValueError(
                "optim.layer_decay is for the blocks of clip encoders, of which there is none; leave it out"
            )
        for name, side in sides.items():
            if isinstance(side, ClipImageConfig | ClipTextConfig):
                side.check(f"model.{name}")
            elif isinstance(side, WordTextConfig | ResNetImageConfig | RegionImageConfig):
                side.check()
        if self.optim.freeze_image_epochs and not _may_rest(self.model.image):
            raise ValueError(
                f"optim.freeze_image_epochs={self.optim.freeze_image_epochs} lets a pre-trained image network rest, and nothing of"
                f" model.image.kind={self.model.image.kind!r} as it is here came pre-trained; set it to 0"
            )
        if self.optim.first_stage_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.first_stage_epochs={self.optim.first_stage_epochs} leaves none of train.epochs={self.train.epochs} to the"
                " second stage"
            )
        if self.train.swa_epochs and self.train.ema_decay:
            raise ValueError("give either train.swa_epochs or train.ema_decay, not both")
        if self.train.swa_epochs > self.train.epochs:
            raise ValueError(f"train.swa_epochs={self.train.swa_epochs} is more than train.epochs={self.train.epochs}")
        return self


def _may_rest(image: ImageConfig) -> bool:
    if isinstance(image, ResNetImageConfig | EfficientNetImageConfig):
        return image.starts_pretrained
    return not isinstance(image, SmallImageConfig | RegionImageConfig)


_TAG_KEYS = ("loss.name", "model.image.kind", "model.text.kind")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: a TOML file.
        overrides: "section.key=value" each; values are TOML (``loss.alpha=0.01``), bare words are strings. Another loss.name or
            model.image.kind starts that section afresh.

    Raises:
        UserError: the file is missing or not TOML, or a key or value is wrong: the message names it and the nearest right one.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no recipe at {path}; `sfumato recipes` lists those that come with the package")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    _use_new_names(values, str(path))
    # What starts a section afresh comes first, wherever it stands.
    for override in sorted(overrides, key=lambda o: o.partition("=")[0].strip() not in _TAG_KEYS):
        _apply(values, override)
    return check_recipe(values, f"{path} with its overrides" if overrides else str(path))


def check_recipe(values: dict[str, Any], where: str) -> Recipe:
    """The recipe of these values, or a UserError that lists everything wrong with them."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise UserError(f"{where}: " + "\n  ".join(lines)) from error


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe, every default spelt out, as TOML."""
    write_atomically(path, tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True)))


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = _new_name(key.strip())
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r}: expected section.key=value, e.g. train.epochs=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {part!r} is a value, not a section")
        values = inner
    if key in _TAG_KEYS and values.get(parts[-1]) != value:
        values.clear()  # Another loss or encoder: the options of the old one mean nothing to it.
    values[parts[-1]] = value


def _old_names(model: type[BaseModel] | None = None, prefix: str = "") -> dict[str, str]:
    """Old key -> new key of every field that was renamed, by its AliasChoices."""
    found: dict[str, str] = {}
    model = model or Recipe
    for name, sections in _fields(model):
        alias = model.model_fields[name].validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else []
        found |= {f"{prefix}{old}": f"{prefix}{name}" for old in choices if old != name}
        for section in sections:
            found |= _old_names(section, f"{prefix}{name}.")
    return found


def _new_name(key: str) -> str:
    """The key under its new name, if it or a section above it was renamed."""
    for old, new in _old_names().items():
        if key == old or key.startswith(f"{old}."):
            key = new + key.removeprefix(old)
    return key


def _use_new_names(values: dict[str, Any], where: str) -> None:
    """Rename the old keys of a recipe, so that an override by either name replaces them."""
    for old, new in _old_names().items():
        *sections, last = old.split(".")
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last in inner:
            canonical = new.rpartition(".")[2]
            if canonical in inner:
                raise UserError(f"{where}: {old} is the old name of {new}; both are given, leave {old} out")
            inner[canonical] = inner.pop(last)


def _explain(item: Any) -> str:
    # Tags of discriminated unions ("small", "pcmepp") stand in the location but not in the file.
    path = [str(part) for part in item["loc"]]
    tags = {
        section.model_fields[key].default
        for model in (Recipe, ModelConfig)
        for _, sections in _fields(model)
        for section in sections
        for key in ("kind", "name")
        if key in section.model_fields
    }
    shown = ".".join(part for i, part in enumerate(path) if not (part in tags and i > 0))
    if item["type"] == "extra_forbidden":
        known = (_keys() | _old_names().keys()) - {shown}
        near = difflib.get_close_matches(shown, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            path[-1], [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.5
        )
        return f"unknown key {shown!r}" + (
            f"; did you mean {_new_name(near[0])!r}?" if near else f"; known: {', '.join(sorted(_keys()))}"
        )
    if item["type"] == "union_tag_invalid":
        known_tags = sorted(re.findall(r"'([^']+)'", item["ctx"]["expected_tags"]))
        key, tag = f"{shown}.{item['ctx']['discriminator'].strip(chr(39))}", item["ctx"]["tag"]
        near = difflib.get_close_matches(tag, known_tags, n=1)
        return f"{key}: unknown {tag!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known_tags)}"
        )
    if item["type"] == "union_tag_not_found":
        return f"{shown}: needs its {item['ctx']['discriminator']}, which decides what else may stand there"
    message = item["msg"].removeprefix("Value error, ")
    return f"{shown or 'recipe'}: {message}" + (
        "" if not shown or item["type"] == "missing" else f" (got {item['input']!r})"
    )


def _keys(model: type[BaseModel] = Recipe, prefix: str = "") -> set[str]:
    return {prefix + name for name, _ in _fields(model)} | {
        key for name, sections in _fields(model) for section in sections for key in _keys(section, f"{prefix}{name}.")
    }


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    for name, field in model.model_fields.items():
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        yield name, [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


def recipe_files() -> dict[str, Traversable]:
    """name -> file of every recipe in the package (or, in a checkout, in its recipes folder), by name."""
    packaged = resources.files("sfumato") / "recipe_files"
    folder: Traversable = packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "recipes"
    return {
        f.name.removesuffix(".toml"): f
        for f in sorted(folder.iterdir(), key=lambda f: f.name)
        if f.name.endswith(".toml")
    }


def find_recipe(name: str) -> Path:
    """The path of a recipe given as a path or as the name of one that comes with the package.

    Raises:
        UserError: there is neither such a file nor such a name.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipe_files()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`sfumato recipes` lists them"
        raise UserError(f"no recipe {name!r}: neither a file nor one that comes with the package; {hint}")
    return Path(str(known[name]))


def recipe_summary(file: Traversable) -> str:
    """The first comment line of a recipe: what it is."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()
