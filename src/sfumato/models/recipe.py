"""Recipes: all settings of a run in one TOML file, checked before the run starts.

A recipe is complete and strict: an unknown key is an error that names the nearest one. Overrides have the form
``section.key=value`` and pass the same checks; the resolved recipe is saved beside every checkpoint.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from sfumato.data.feature_tables import resolved_table
from sfumato.data.sources import DataConfig, get_source
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.encoder_registry import ENCODERS, encoder_entry, encoder_section, tag_of
from sfumato.encoders.package_weights import TrainingPrecision
from sfumato.encoders.scratch import SmallImageConfig, SmallTextConfig
from sfumato.errors import UserError
from sfumato.files import recipe_folder, write_atomically
from sfumato.ids import Side
from sfumato.imports import HOW, import_own, load_plugins
from sfumato.losses import LOSSES, LossOptions

RECIPE, MODEL, LAST, IMPORTS = "recipe.toml", "model.safetensors", "last.safetensors", "imports"
"""Names in the folder of a run; the last is a folder: copies of the files that its recipe imports, never executed."""

_ImageSection = Annotated[SerializeAsAny[ImageEncoderConfig], BeforeValidator(partial(encoder_section, "image"))]

_TextSection = Annotated[SerializeAsAny[TextEncoderConfig], BeforeValidator(partial(encoder_section, "text"))]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Encoders and Gaussian heads."""

    dim: PositiveInt = Field(256, description="number of dimensions of the embeddings")
    image: _ImageSection = Field(SmallImageConfig(), description="image encoder; kind decides which keys it has")
    text: _TextSection = Field(SmallTextConfig(), description="text encoder; kind decides which keys it has")
    pooling: Literal["gpo", "average", "max", "first", "last", "token"] = "gpo"
    """how token features become one vector; token: the class token of images, the last token of texts"""
    identity: bool = False
    """the mean is the average of an item's features, unchanged but for model.normalize, and nothing of it is learnt:
    for embeddings of another model; model.dim is their number of channels"""
    mlp: bool = Field(False, description="add a two-layer network to the linear map of the mean")
    mlp_width: int = Field(0, ge=0)
    """hidden width of the two-layer networks; 0: dim. VSE-infinity has half of dim"""
    hidden: int = Field(0, ge=0)
    """width of a network of an item's average token, which is added to the mean: linear, layer norm, GELU, dropout,
    linear; 0 for none"""
    hidden_dropout: float = Field(0.5, ge=0, lt=1)
    """fraction of the hidden values of model.hidden that are dropped in training"""
    normalize: bool = Field(True, description="scale means to unit length")
    variance: bool = Field(True, description="embeddings have variances; false: points, the deterministic baselines")
    variance_norm: bool = Field(False, description="a layer norm on the log variance")
    variance_mlp: bool = Field(False, description="add a two-layer network to the linear map of the log variance")
    variance_hidden: int = Field(0, ge=0)
    """width of a network like model.hidden that is added to the log variance; 0 for none"""
    item_offset: bool = False
    """add a learnt number of each item to all its squared distances, in two more dimensions of the mean: what the total
    variance is under csd, so that a variance stage can teach it something else"""
    init_total_variance: PositiveFloat = Field(0.1, description="sum of an embedding's variances at the start")
    covariance: Literal["ellipsoidal", "spherical-average", "spherical-one"] = "ellipsoidal"
    """ellipsoidal: a variance for each dimension; spherical-average: their average for all dimensions; spherical-one: a
    single output for all dimensions"""
    variance_bounds: tuple[PositiveFloat, PositiveFloat] | None = None
    """lowest and highest variance of a dimension; no bounds if left out"""
    embeddings: PositiveInt = 1
    """number of embeddings of an item, made by local attention, each with dim dimensions; only for points"""
    local_attention: bool = False
    """use PCME's heads: they add attended tokens (of a gru: words) to the pooled mean and log variance"""
    local_attention_of: Literal["both", "mean", "variance"] = "both"
    """which of mean and log variance have local attention, with local_attention"""
    variance_sigmoid: bool = False
    """a sigmoid on what local attention adds to the log variance; PCME has none"""
    feature_dropout: float = Field(0.0, ge=0, lt=1)
    """fraction of the features of frozen backbones and of regions that is dropped in training; 0 for none"""

    def check_head(self) -> None:
        """Refuse settings of the heads that contradict each other or have no effect."""
        if self.embeddings > 1 and self.variance:
            raise ValueError("model.embeddings above 1 is for points; set model.variance=false")
        if self.embeddings > 1 and self.local_attention:
            raise ValueError("model.embeddings above 1 come from local attention; leave out model.local_attention")
        attends = self.local_attention and self.local_attention_of != "variance"
        if self.identity and (self.mlp or self.hidden or self.embeddings > 1 or attends):
            raise ValueError(
                "model.identity leaves the means as they are; leave out model.mlp, model.hidden, model.embeddings and"
                " model.local_attention"
            )
        if self.embeddings > 1 and self.item_offset:
            raise ValueError("model.item_offset is for one embedding of an item; leave out model.embeddings")
        if self.variance_hidden and not self.variance:
            raise ValueError("model.variance_hidden is for variances, but model.variance=false")
        if self.mlp_width and not (self.mlp or self.variance_mlp):
            raise ValueError("model.mlp_width needs model.mlp or model.variance_mlp; leave it out")
        if self.local_attention_of != "both" and not (self.local_attention and self.variance):
            raise ValueError(
                f"model.local_attention_of={self.local_attention_of!r} needs model.local_attention=true and variances;"
                " leave it out"
            )
        attends = self.local_attention and self.variance and self.local_attention_of != "mean"
        if self.variance_sigmoid and not attends:
            raise ValueError("model.variance_sigmoid needs local attention of the log variance; leave it out")
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


class AugmentConfig(_Section):
    """Random changes of the training data, beside model.image.augment."""

    image_tokens: float = Field(0.0, ge=0, lt=1)
    """SizeAugment: largest fraction of an image's tokens that are dropped (at 0.2 on average 9.6 %); with regions, the
    probability that each region is dropped. 0: none"""
    text_tokens: float = Field(0.0, ge=0, lt=1)
    """SizeAugment: fraction of a text's tokens that are masked, replaced or deleted; 0 for none"""
    drop_words: float = Field(0.0, ge=0, lt=1)
    """fraction of a text's tokens that are left out; 0 for none, 0.1 as published for PCME"""
    erase: float = Field(0.0, ge=0, le=1)
    """fraction of the images with a random rectangle erased; 0 for none, 0.2 as published for PCME"""
    mixed_share: float = Field(0.0, ge=0, le=1)
    """fraction of the images that are mixed with another one of the batch; 0 for none"""
    mixup_alpha: NonNegativeFloat = 2.0
    """alpha of the Beta distribution of Mixup's mixing ratio; 0: CutMix only"""
    cutmix_alpha: NonNegativeFloat = 2.0
    """alpha of the Beta distribution of CutMix's mixing ratio; 0: Mixup only"""
    mix_choice: Literal["batch", "element"] = "batch"
    """choose between Mixup and CutMix once for each batch (the paper) or for each image (the released code)"""
    mix_whole: bool = False
    """mix a whole batch, all images with one ratio, or nothing; mixed_share is its probability"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """labels lie in [label_smoothing, 1 - label_smoothing]; 0 for none"""


class OptimConfig(_Section):
    """Optimiser and schedule."""

    name: Literal["adamw", "adamp"] = Field("adamw", description="the optimiser")
    lr: PositiveFloat = Field(5e-4, description="base learning rate")
    weight_decay: NonNegativeFloat = 1e-4
    """weight decay of matrices; biases, norms and logits have none"""
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay rates of Adam's two moments")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    logits_lr_multiplier: NonNegativeFloat = 1.0
    """multiplier of the learning rate of the match logits' scale and bias"""
    image_lr_multiplier: NonNegativeFloat = 1.0
    """multiplier of the learning rate of the image encoder below its head"""
    text_lr_multiplier: NonNegativeFloat = 1.0
    """multiplier of the learning rate of the text encoder below its head"""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """clip: learning rate of a block relative to the block above it; 1 for equal rates"""
    freeze_image_epochs: int = Field(0, ge=0)
    """number of first epochs with the pre-trained layers of the image encoder frozen; its variance blocks and the head
    learn. 0 for none"""
    first_stage_epochs: int = Field(0, ge=0)
    """number of first epochs with the pre-trained layers of both encoders frozen (of a gru, word vectors from a file).
    All layers learn in the remaining epochs, the second stage. 0 for a single stage"""
    first_stage_schedule_epochs: int = Field(0, ge=0)
    """length in epochs of the schedule of which the first stage runs only optim.first_stage_epochs; 0: the schedule
    ends with the stage"""
    second_stage_factor: PositiveFloat = Field(0.1, description="multiplier of all learning rates in the second stage")
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """how the learning rate falls; with two stages, once in each stage"""
    warmup_epochs: NonNegativeFloat = 1.0
    """length of the linear warm-up in epochs, after optim.freeze_image_epochs; 0 for none"""
    step_at: float = Field(0.6, gt=0, le=1)
    """schedule step: fraction of the run after which lr is multiplied by step_factor"""
    step_factor: PositiveFloat = Field(0.1, description="schedule step: multiplier of the learning rate")
    clip_norm: NonNegativeFloat = Field(2.0, description="largest norm of the gradient; 0 for no limit")

    @model_validator(mode="after")
    def _stages_fit(self) -> "OptimConfig":
        if self.first_stage_epochs and self.freeze_image_epochs:
            raise ValueError(
                "optim.first_stage_epochs freezes the image encoder already; leave out optim.freeze_image_epochs"
            )
        if self.first_stage_schedule_epochs and not 0 < self.first_stage_epochs <= self.first_stage_schedule_epochs:
            raise ValueError(
                f"optim.first_stage_schedule_epochs={self.first_stage_schedule_epochs} must be at least"
                f" optim.first_stage_epochs, and needs a first stage; got {self.first_stage_epochs}"
            )
        return self


class TrainConfig(_Section):
    """The training loop."""

    epochs: PositiveInt = Field(30, description="number of epochs")
    batch_size: int = Field(128, ge=2, description="number of pairs in a batch, over all processes")
    seed: int = Field(0, ge=0, description="seed of weights, batches and augmentation")
    threads: int = Field(0, ge=0)
    """number of CPU threads; 0 leaves the choice to torch. A repeated run is bit-equal only with the same number of
    threads"""
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    evaluate_every: PositiveInt = 1
    """number of epochs between validations; the last epoch is always validated"""
    precision: TrainingPrecision = "float32"
    """number format of encoders and heads while they train: float32, bfloat16, float16 with a scaled loss (for GPUs
    without bfloat16), or auto: bfloat16 where the processor is fast with it. Weights, embeddings, distances and every
    use of the model have float32"""
    start: str = ""
    """model whose weights the training starts from: small, of the package, a run or an exported model with the same
    model section; new weights if empty"""
    anchor: float = Field(0.0, ge=0, lt=1)
    """fraction of the start in the weights that are kept: anchor * start + (1 - anchor) * average. 0: the average"""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """validate and keep an exponential moving average of the weights; 0 for none"""
    swa_epochs: int = Field(0, ge=0)
    """validate and keep the mean of the weights after each of the last swa_epochs; 0 for none"""
    micro_batch: int = Field(0, ge=0)
    """number of pairs that are encoded at a time; a small number needs less memory, but a second pass. 0: the batch"""
    compile: bool = Field(False, description="compile the encoders with torch.compile")
    save_minutes: NonNegativeFloat = 10.0
    """longest time in minutes between two saves within an epoch; 0: no saves by time"""
    save_steps: int = Field(0, ge=0)
    """number of steps between two saves within an epoch, from its start; 0: no saves by steps"""
    tracker: Literal["", "tensorboard", "wandb", "mlflow"] = ""
    """where the figures of each epoch go besides log.jsonl: tensorboard (into the run folder), wandb or mlflow, whose
    packages are configured by their own environment variables; nowhere if empty"""
    timeout_minutes: PositiveFloat = 10.0
    """several processes: longest time in minutes that one waits for the others"""
    select: Literal["auto", "rsum", "map@r", "last"] = "auto"
    """which epoch's weights to keep: the best by rsum or by map@r, or the last. auto: map@r if an item has several
    matches, else rsum"""

    def validates(self, epoch: int) -> bool:
        """Whether an epoch ends with a validation."""
        return epoch + 1 == self.epochs or (epoch + 1) % self.evaluate_every == 0


class VarianceStageConfig(_Section):
    """A second stage that trains only log variances: the total variance of an item learns what a teacher says of it."""

    epochs: int = Field(0, ge=0, description="number of passes over the items; 0 for no second stage")
    teacher: str = "dispersion"
    """what total variance learns. dispersion: that of an item's listed matches; listed_matches: their number; or an
    estimator of `sfumato trust` that looks at a gallery, such as expected_matches or match_entropy, computed over
    the training items of the other side, without labels"""
    sides: Literal["both", "images", "texts"] = Field("both", description="the sides whose variances learn")
    whiten: bool = True
    """dispersion: measure angles between the whitened means of the matches, instead of the means themselves"""
    without_own: bool = False
    """an estimator as teacher: leave an item's own listed matches out of the gallery"""
    n_gallery: int = Field(5000, ge=50)
    """an estimator as teacher: largest number of items in the gallery, drawn at random"""
    floor: PositiveFloat = Field(0.02, description="smallest total variance: that of an item with a single match")
    lr: PositiveFloat = Field(1e-2, description="learning rate")
    weight_decay: NonNegativeFloat = Field(0.0, description="weight decay")
    batch_size: PositiveInt = Field(256, description="number of items in a batch")


class LossConfig(_Section):
    """The section of a loss: its name, and the options of the loss as keys."""

    name: str
    distance: str

    def options(self) -> LossOptions:
        """The options of the loss."""
        return LOSSES[self.name].Options(**self.model_dump(exclude={"name"}))


class UnknownLossConfig(LossConfig):
    """The section of a loss whose code has not been imported."""

    model_config = ConfigDict(extra="allow", frozen=True)
    distance: str = "csd"


_loss_configs: dict[tuple[str, type[LossOptions]], type[LossConfig]] = {}


def loss_config(name: str, options: type[LossOptions]) -> type[LossConfig]:
    """The section of a loss, made from its options: the same keys, defaults, descriptions and bounds."""
    if found := _loss_configs.get((name, options)):
        return found
    kinds = get_type_hints(options)
    keys: dict[str, Any] = {o.name: (kinds[o.name], Field(o.default, **o.metadata)) for o in fields(options)}
    keys["name"] = (Literal[name], name)
    summary = (options.__doc__ or name).partition("\n")[0]
    title = options.__name__.replace("Options", "Config")
    made = create_model(title, __base__=LossConfig, __doc__=summary, **keys)
    return _loss_configs.setdefault((name, options), made)


def _loss_section(value: Any) -> LossConfig:
    """Check a section ``loss`` with the options of its loss."""
    if isinstance(value, LossConfig):
        return value
    name = tag_of(value, "name", LOSSES)
    return loss_config(name, LOSSES[name].Options).model_validate(value)


_LossSection = Annotated[SerializeAsAny[LossConfig], BeforeValidator(_loss_section)]


class Recipe(_Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    prefer: str = ""
    """recipe of the package that `sfumato train` takes instead where its pre-trained weights are cached or can be
    downloaded; none if empty"""
    imports: tuple[str, ...] = ()
    """files (.py, relative to the recipe) or modules that register losses, distances and others of your own; `sfumato
    train` imports them, and keeps copies in the run"""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: _LossSection = loss_config("pcmepp", LOSSES["pcmepp"].Options).model_validate({})
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    variance_stage: VarianceStageConfig = VarianceStageConfig()

    @model_validator(mode="before")
    @classmethod
    def _unknown_loss(cls, values: Any, info: ValidationInfo) -> Any:
        """The recipe of a run is read without the code of its loss."""
        allowed = isinstance(values, dict) and (values.get("imports") or (info.context or {}).get("of_run"))
        loss = values.get("loss") if allowed else None
        if isinstance(loss, dict) and isinstance(loss.get("name"), str) and loss["name"] not in LOSSES:
            return values | {"loss": UnknownLossConfig.model_validate(loss)}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        self._check_loss()
        self._check_variance_stage()
        self._check_inputs()
        self._check_augmentation()
        self._check_training()
        return self

    def _check_loss(self) -> None:
        """Refuse a loss that does not fit the model or the data."""
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
            raise ValueError("loss.inclusion_weight must be 0 when model.variance=false: points have no inclusion")
        if self.loss.name == "daa" and not self.data.graded:
            raise ValueError("loss.name='daa' learns from graded labels; set data.graded=true")
        if getattr(self.loss, "soft_margin", False) and not self.data.graded:
            raise ValueError("loss.soft_margin=true is for graded labels; set data.graded=true")
        self.model.check_head()
        if self.model.embeddings != distance.embeddings:
            raise ValueError(
                f"model.embeddings={self.model.embeddings} does not fit loss.distance={distance.name!r}; with"
                " model.embeddings=2 use nearest_of_2, and with 1 any other"
            )

    def _check_variance_stage(self) -> None:
        """Refuse a second stage that cannot learn variances."""
        if not self.variance_stage.epochs:
            return
        if not self.model.variance:
            raise ValueError(
                "variance_stage.epochs must be 0 when model.variance=false: points have no variance to fit"
            )
        if get_source(self.data.source).streamed:
            raise ValueError(
                "variance_stage.epochs needs all pairs in memory, but shards are read as a stream; set it to 0"
            )
        if self.loss.distance != "squared_l2":
            raise ValueError(
                f"variance_stage.epochs changes variances after training, and loss.distance={self.loss.distance!r}"
                " ranks by them; use squared_l2, with model.item_offset=true for what variances did"
            )

    def _check_augmentation(self) -> None:
        """Refuse random changes that have nothing to change."""
        for key in ("mixed_share", "erase"):
            if dict(self.augment)[key] and not self.model.image.from_pixels:
                raise ValueError(
                    f"augment.{key} changes pixels, but model.image.kind={self.model.image.kind!r} reads features;"
                    " set it to 0"
                )
        if self.augment.drop_words and encoder_entry("text", self.model.text.kind).tokenizer is None:
            raise ValueError(
                "augment.drop_words changes the texts in each epoch, but frozen features are computed only once; set"
                " it to 0"
            )
        if self.augment.mixed_share and not (self.augment.mixup_alpha or self.augment.cutmix_alpha):
            raise ValueError("augment.mixed_share needs augment.mixup_alpha or augment.cutmix_alpha above 0")
        if self.augment.mix_whole and (not self.augment.mixed_share or self.augment.mix_choice != "batch"):
            raise ValueError(
                "augment.mix_whole mixes all images of a batch alike; it needs augment.mixed_share above 0 and"
                " augment.mix_choice='batch'"
            )
        one_token = self.model.pooling in ("token", "first", "last")
        if self.augment.image_tokens and one_token and not self.model.image.drops_tokens:
            raise ValueError(
                f"augment.image_tokens drops tokens that model.pooling={self.model.pooling!r} does not use; set it to 0"
            )

    def _check_inputs(self) -> None:
        """Refuse encoders that cannot read the data, or whose sections contradict themselves."""
        self.model.image.check("model.image")
        self.model.text.check("model.text")
        regions = self.model.image.reads_regions
        inputs = get_source(self.data.source).inputs
        for side, section in (("image", self.model.image), ("text", self.model.text)):
            if (inputs == "embeddings") != section.reads_embeddings:
                raise ValueError(
                    f"model.{side}.kind={section.kind!r} does not fit data.source={self.data.source!r}: embeddings in"
                    " files need data.source=embeddings and the kind embeddings on both sides"
                )
        if regions and inputs == "images":
            raise ValueError(
                f"model.image.kind={self.model.image.kind!r} reads features, and data.source={self.data.source!r} has"
                " images; write their features with `sfumato regions` for data.source=scan, or set"
                " model.image.kind=frozen"
            )
        if inputs == "regions" and not regions:
            raise ValueError(
                f"data.source={self.data.source!r} has region features, which"
                f" model.image.kind={self.model.image.kind!r} does not read; set it to regions"
            )

    def _check_training(self) -> None:
        """Refuse settings of optimiser and schedule that have no effect or contradict each other."""
        if self.optim.layer_decay != 1 and not (self.model.image.has_blocks or self.model.text.has_blocks):
            raise ValueError(
                "optim.layer_decay needs the blocks of a clip encoder, but this model has none; leave it out"
            )
        if self.optim.freeze_image_epochs and not self.model.image.starts_pretrained:
            raise ValueError(
                f"optim.freeze_image_epochs={self.optim.freeze_image_epochs} freezes a pre-trained image encoder, and"
                f" the section model.image with kind={self.model.image.kind!r} starts from random weights; set it to 0"
            )
        if self.optim.first_stage_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.first_stage_epochs={self.optim.first_stage_epochs} leaves no epoch of"
                f" train.epochs={self.train.epochs} for the second stage; give fewer"
            )
        if self.train.anchor and not (self.train.start and (self.train.ema_decay or self.train.swa_epochs)):
            raise ValueError(
                f"train.anchor={self.train.anchor:g} mixes averaged weights with those of train.start; give train.start"
                " and train.ema_decay, or leave it out"
            )
        if self.train.swa_epochs and self.train.ema_decay:
            raise ValueError("give either train.swa_epochs or train.ema_decay, not both")
        if self.train.swa_epochs > self.train.epochs:
            raise ValueError(f"train.swa_epochs={self.train.swa_epochs} is more than train.epochs={self.train.epochs}")


def frozen_sections(channels: int, side: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a model whose means are the features of its encoders; both sides have the same section."""
    means = {"dim": channels, "pooling": "average", "identity": True, "variance": False}
    return {"model": means | {"image": side, "text": side}, "loss": {"name": "infonce"}}


_SIDES: dict[Any, Side] = {ImageEncoderConfig: "image", TextEncoderConfig: "text"}

_TAG_KEYS = ("loss.name", "model.image.kind", "model.text.kind")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, own: bool = False) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: a TOML file.
        overrides: each "section.key=value". Values are TOML (``loss.alpha=0.01``), bare words are strings. Another
            loss.name or model.image.kind resets that section to its defaults.
        own: import the files and modules that its key ``imports`` names. Their code is executed, but never that of a
            run's own recipe, because a run may come from elsewhere.

    Returns:
        The recipe.

    Raises:
        UserError: the file is missing or not TOML, or a key or value is wrong; the message names the nearest right key.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no recipe at {path}; `sfumato recipes` lists those that come with the package")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # A number of 5,000 digits is a ValueError of Python itself.
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    # Overrides that reset a section are applied first, regardless of their position.
    for override in sorted(overrides, key=lambda o: o.partition("=")[0].strip() not in _TAG_KEYS):
        _apply(values, override)
    load_plugins()
    names, of_run = values.get("imports", []), is_of_run(path)
    if own and not of_run and isinstance(names, list) and all(isinstance(name, str) for name in names):
        import_own(names, path.parent)
        values["imports"] = [str((path.parent / n).resolve()) if n.endswith(".py") else n for n in names]
    return check_recipe(values, f"{path} with its overrides" if overrides else str(path), of_run=of_run)


def is_of_run(path: Path) -> bool:
    """Whether a recipe is that of a run, in its folder."""
    return path.name == RECIPE and any((path.parent / name).exists() for name in (MODEL, LAST, IMPORTS))


def check_recipe(values: dict[str, Any], where: str, *, of_run: bool = False) -> Recipe:
    """Check the values of a recipe."""
    try:
        return Recipe.model_validate(values, context={"of_run": of_run})
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise UserError(f"{where}: " + "\n  ".join(lines)) from error


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a resolved recipe as TOML, with all defaults."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    write_atomically(path, tomli_w.dumps({key: value for key, value in values.items() if value or key != "imports"}))


def absolute_data(config: DataConfig) -> DataConfig:
    """The same data with absolute paths, so that they are found from any folder."""
    table = resolved_table if config.source == "embeddings" else _absolute
    return config.model_copy(
        update={name: _absolute(getattr(config, name)) for name in ("path", "val_path", "noise_file")}
        | {name: table(getattr(config, name)) for name in ("images", "texts") if getattr(config, name)}
    )


def absolute_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with absolute paths, as it is saved in a run folder."""
    sides: dict[str, Any] = {}
    for side, section in (("image", recipe.model.image), ("text", recipe.model.text)):
        paths = {key: _absolute(getattr(section, key)) for key in section.path_fields if getattr(section, key)}
        sides[side] = section.model_copy(update=paths)
    start = recipe.train.start
    train = recipe.train if start == "small" else recipe.train.model_copy(update={"start": _absolute(start)})
    return recipe.model_copy(
        update={"data": absolute_data(recipe.data), "model": recipe.model.model_copy(update=sides), "train": train}
    )


def _absolute(path: str) -> str:
    """An absolute path to what exists; patterns such as a-{0..9}.tar where their folder does."""
    known = os.path.exists(path) or (any(c in path for c in "*?[{") and os.path.isdir(os.path.dirname(path) or "."))
    return os.path.abspath(path) if path and known else path


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The value of each key, e.g. of loss.alpha."""
    return dict(leaves(recipe.model_dump(mode="json")))


BOOKKEEPING = ("train.timeout_minutes", "train.tracker", "train.save_minutes", "train.save_steps")
"""Keys that change nothing of what is trained."""


def differing_keys(saved: Recipe, given: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ."""
    first, second = recipe_values(saved), recipe_values(given)
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections with their keys, such as train.epochs."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r}: expected section.key=value, e.g. train.epochs=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except (ValueError, RecursionError) as error:
        raise UserError(f"override {override!r}: the value cannot be read: {error}") from error
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {part!r} is a value, not a section")
        values = inner
    if key in _TAG_KEYS and values.get(parts[-1]) != value:
        values.clear()  # The options of the old loss or encoder do not apply to another one.
    values[parts[-1]] = value


def _explain(item: Any) -> str:
    # The location has the name of a loss ("pcmepp"), which is a tag of a union and no key of the file.
    path = [str(part) for part in item["loc"]]
    shown = ".".join(part for i, part in enumerate(path) if not (part in LOSSES and i > 0))
    if item["type"] == "extra_forbidden":
        known = _keys()
        near = difflib.get_close_matches(shown, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            path[-1], [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.5
        )
        return f"unknown key {shown!r}" + (
            f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
        )
    if item["type"] == "union_tag_invalid":
        known_tags = sorted(re.findall(r"'([^']+)'", item["ctx"]["expected_tags"]))
        key, tag = f"{shown}.{item['ctx']['discriminator'].strip(chr(39))}", item["ctx"]["tag"]
        near = difflib.get_close_matches(tag, known_tags, n=1)
        own = f"; {HOW}" if path[-1] == "loss" else ""
        return f"{key}: unknown {tag!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known_tags)}{own}"
        )
    if item["type"] == "union_tag_not_found":
        return f"{shown}: needs its {item['ctx']['discriminator']}, which determines the other keys"
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
        if field.annotation in _SIDES:
            yield name, [entry.config for entry in ENCODERS[_SIDES[field.annotation]].values()]
            continue
        if field.annotation is LossConfig:
            yield name, [loss_config(key, loss.Options) for key, loss in LOSSES.items()]
            continue
        options = [field.annotation, *get_args(field.annotation)]
        yield name, [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


def recipe_files() -> dict[str, Traversable]:
    """The recipes of the package, or in a checkout of its folder ``recipes``."""
    return {
        f.name.removesuffix(".toml"): f
        for f in sorted(recipe_folder().iterdir(), key=lambda f: f.name)
        if f.name.endswith(".toml")
    }


def find_recipe(name: str) -> Path:
    """The path of a recipe.

    Args:
        name: a path, or the name of a recipe that comes with the package.

    Returns:
        The path.

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
    """The short description of a recipe."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()
