"""The sections of a recipe: model, augmentation, optimiser, training and variance stage."""

from functools import partial
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.encoder_registry import encoder_section
from sfumato.encoders.small import SmallImageConfig, SmallTextConfig

_ImageSection = Annotated[SerializeAsAny[ImageEncoderConfig], BeforeValidator(partial(encoder_section, "image"))]
_TextSection = Annotated[SerializeAsAny[TextEncoderConfig], BeforeValidator(partial(encoder_section, "text"))]


class ModelConfig(BaseModel):
    """Encoders and Gaussian heads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dim: PositiveInt = Field(256, description="number of dimensions of the embeddings")
    image: _ImageSection = Field(SmallImageConfig(), description="image encoder; kind decides which keys it has")
    text: _TextSection = Field(SmallTextConfig(), description="text encoder; kind decides which keys it has")
    pooling: Literal["gpo", "average", "max", "first", "last", "token"] = Field(
        "gpo",
        description="how token features become one vector; token: the class token of images, the last token of texts",
    )
    mlp: bool = Field(False, description="add a two-layer network to the linear map of the mean")
    normalize: bool = Field(True, description="scale means to unit length")
    variance: bool = Field(True, description="embeddings have variances; false: points, the deterministic baselines")
    variance_norm: bool = Field(False, description="a layer norm on the log variance")
    variance_mlp: bool = Field(False, description="add a two-layer network to the linear map of the log variance")
    init_total_variance: PositiveFloat = Field(0.1, description="sum of an embedding's variances at the start")
    covariance: Literal["ellipsoidal", "spherical-average", "spherical-one"] = Field(
        "ellipsoidal",
        description="ellipsoidal: a variance for each dimension; spherical-average: their average for all dimensions;"
        " spherical-one: a single output for all dimensions",
    )
    variance_bounds: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="lowest and highest variance of a dimension; no bounds if left out"
    )
    embeddings: PositiveInt = Field(
        1,
        description=(
            "number of embeddings of an item, made by local attention, each with dim dimensions; only for points"
        ),
    )
    local_attention: bool = Field(
        False,
        description="use PCME's heads: they add attended tokens (of a gru: words) to the pooled mean and log variance",
    )
    feature_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "fraction of the features of frozen backbones and of regions that is dropped in training; 0 for none"
        ),
    )

    def check_variances(self) -> None:
        """Refuse settings of the variances that contradict each other.

        Raises:
            ValueError: there are some; the message names them.
        """
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
                    f"model.init_total_variance={self.init_total_variance:g} over model.dim={self.dim} dimensions"
                    f" must lie between model.variance_bounds, {lowest:g} and {highest:g} each; e.g."
                    f" {self.dim * (lowest * highest) ** 0.5:g}"
                )


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AugmentConfig(_Section):
    """Random changes of the training data, beside model.image.augment."""

    image_tokens: float = Field(
        0.0, ge=0, lt=1, description="SizeAugment: largest fraction of an image's tokens that are dropped; 0 for none"
    )
    text_tokens: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="SizeAugment: fraction of a text's tokens that are masked, replaced or deleted; 0 for none",
    )
    drop_words: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of a text's tokens that are left out; 0 for none, 0.1 as published for PCME",
    )
    erase: float = Field(
        0.0,
        ge=0,
        le=1,
        description="fraction of the images with a random rectangle erased; 0 for none, 0.2 as published for PCME",
    )
    mixed_share: float = Field(
        0.0, ge=0, le=1, description="fraction of the images that are mixed with another one of the batch; 0 for none"
    )
    mixup_alpha: NonNegativeFloat = Field(
        2.0, description="alpha of the Beta distribution of Mixup's mixing ratio; 0: CutMix only"
    )
    cutmix_alpha: NonNegativeFloat = Field(
        2.0, description="alpha of the Beta distribution of CutMix's mixing ratio; 0: Mixup only"
    )
    mix_choice: Literal["batch", "element"] = Field(
        "batch",
        description="choose between Mixup and CutMix once for each batch (the paper) or for each image (the released"
        " code)",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="labels lie in [label_smoothing, 1 - label_smoothing]; 0 for none"
    )


class OptimConfig(_Section):
    """Optimiser and schedule."""

    name: Literal["adamw", "adamp"] = Field("adamw", description="the optimiser")
    lr: PositiveFloat = Field(5e-4, description="base learning rate")
    weight_decay: NonNegativeFloat = Field(
        1e-4, description="weight decay of matrices; biases, norms and logits have none"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay rates of Adam's two moments")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    logits_lr_multiplier: NonNegativeFloat = Field(
        1.0, description="multiplier of the learning rate of the match logits' scale and bias"
    )
    image_lr_multiplier: NonNegativeFloat = Field(
        1.0, description="multiplier of the learning rate of the image encoder below its head"
    )
    text_lr_multiplier: NonNegativeFloat = Field(
        1.0, description="multiplier of the learning rate of the text encoder below its head"
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="clip: learning rate of a block relative to the block above it; 1 for equal rates"
    )
    freeze_image_epochs: int = Field(
        0,
        ge=0,
        description="number of first epochs with the pre-trained layers of the image encoder frozen; its variance"
        " blocks and the head learn. 0 for none",
    )
    first_stage_epochs: int = Field(
        0,
        ge=0,
        description="number of first epochs with the pre-trained layers of both encoders frozen (of a gru, word"
        " vectors from a file). All layers learn in the remaining epochs, the second stage. 0 for a single stage",
    )
    second_stage_factor: PositiveFloat = Field(0.1, description="multiplier of all learning rates in the second stage")
    schedule: Literal["constant", "cosine", "step"] = Field(
        "cosine", description="how the learning rate falls; with two stages, once in each stage"
    )
    warmup_epochs: NonNegativeFloat = Field(
        1.0, description="length of the linear warm-up in epochs, after optim.freeze_image_epochs; 0 for none"
    )
    step_at: float = Field(
        0.6, gt=0, le=1, description="schedule step: fraction of the run after which lr is multiplied by step_factor"
    )
    step_factor: PositiveFloat = Field(0.1, description="schedule step: multiplier of the learning rate")
    clip_norm: NonNegativeFloat = Field(2.0, description="largest norm of the gradient; 0 for no limit")

    @model_validator(mode="after")
    def _one_way_to_freeze(self) -> "OptimConfig":
        if self.first_stage_epochs and self.freeze_image_epochs:
            raise ValueError(
                "optim.first_stage_epochs freezes the image encoder already; leave out optim.freeze_image_epochs"
            )
        return self


class TrainConfig(_Section):
    """The training loop."""

    epochs: PositiveInt = Field(30, description="number of epochs")
    batch_size: int = Field(128, ge=2, description="number of pairs in a batch, over all processes")
    seed: int = Field(0, ge=0, description="seed of weights, batches and augmentation")
    threads: int = Field(
        0,
        ge=0,
        description=(
            "number of CPU threads; 0 leaves the choice to torch. A repeated run is bit-equal only with the same"
            " number of threads"
        ),
    )
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    evaluate_every: PositiveInt = Field(
        1, description="number of epochs between validations; the last epoch is always validated"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of the encoders below the heads; heads and distances have float32"
    )
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="validate and keep an exponential moving average of the weights; 0 for none"
    )
    swa_epochs: int = Field(
        0, ge=0, description="validate and keep the mean of the weights after each of the last swa_epochs; 0 for none"
    )
    micro_batch: int = Field(
        0,
        ge=0,
        description=(
            "number of pairs that are encoded at a time; a small number needs less memory, but a second pass. 0:"
            " the batch"
        ),
    )
    compile: bool = Field(False, description="compile the encoders with torch.compile")
    timeout_minutes: PositiveFloat = Field(
        10.0, description="several processes: longest time in minutes that one waits for the others"
    )
    select: Literal["auto", "rsum", "map@r", "last"] = Field(
        "auto",
        description="which epoch's weights to keep: the best by rsum or by map@r, or the last. auto: map@r if an item"
        " has several matches, else rsum",
    )


class VarianceStageConfig(_Section):
    """A second stage that trains only log variances, on the dispersion of each item's listed matches."""

    epochs: int = Field(0, ge=0, description="number of passes over the items; 0 for no second stage")
    sides: Literal["both", "images", "texts"] = Field("both", description="the sides whose variances learn")
    whiten: bool = Field(
        True, description="measure angles between the whitened means of the matches, instead of the means themselves"
    )
    floor: PositiveFloat = Field(0.02, description="total variance of an item with a single match")
    lr: PositiveFloat = Field(1e-2, description="learning rate")
    batch_size: PositiveInt = Field(256, description="number of items in a batch")
