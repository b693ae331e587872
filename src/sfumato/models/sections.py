"""The sections of a recipe, each with the checks of its keys against the other sections."""

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import pydantic
from pydantic import BaseModel, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, SerializeAsAny

from sfumato.data.sources import DataConfig, get_source
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.package_weights import TrainingPrecision
from sfumato.encoders.registry import encoder_entry, encoder_section, tag_of

if TYPE_CHECKING:
    from sfumato.losses.base import LossOptions, MatchLoss

_ImageSection = Annotated[SerializeAsAny[ImageEncoderConfig], BeforeValidator(partial(encoder_section, "image"))]


_TextSection = Annotated[SerializeAsAny[TextEncoderConfig], BeforeValidator(partial(encoder_section, "text"))]


class Section(BaseModel):
    """A section of a recipe, which refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_SMALL = {"kind": "small"}


class ModelConfig(Section):
    """Encoders and Gaussian heads."""

    dim: PositiveInt = Field(256, description="number of dimensions of the embeddings")
    image: _ImageSection = Field(_SMALL, validate_default=True)
    """image encoder; kind decides which keys it has"""
    text: _TextSection = Field(_SMALL, validate_default=True)
    """text encoder; kind decides which keys it has"""
    pooling: Literal["gpo", "average", "max", "first", "last", "token"] = "gpo"
    """how token features become one vector; token: the class token of images, the last token of texts"""
    identity: bool = False
    """the mean is the average of an item's features, at unit length, and nothing of it is learnt: for embeddings
    of another model; model.dim is their number of channels"""
    mlp: bool = Field(False, description="add a two-layer network to the linear map of the mean")
    mlp_width: int = Field(0, ge=0)
    """hidden width of the two-layer networks; 0: dim. VSE-infinity has half of dim"""
    hidden: int = Field(0, ge=0)
    """width of a network of an item's average token, which is added to the mean: linear, layer norm, GELU, dropout,
    linear; 0 for none"""
    hidden_dropout: float = Field(0.5, ge=0, lt=1)
    """fraction of the hidden values of model.hidden that are dropped in training"""
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
            useless = "model.mlp, model.hidden, model.embeddings and model.local_attention"
            raise ValueError(f"model.identity leaves the means as they are; leave out {useless}")
        if self.embeddings > 1 and self.item_offset:
            raise ValueError("model.item_offset is for one embedding of an item; leave out model.embeddings")
        if self.variance_hidden and not self.variance:
            raise ValueError("model.variance_hidden is for variances, but model.variance=false")
        if self.mlp_width and not (self.mlp or self.variance_mlp):
            raise ValueError("model.mlp_width needs model.mlp or model.variance_mlp; leave it out")
        if self.local_attention_of != "both" and not (self.local_attention and self.variance):
            needed = "model.local_attention=true and variances"
            raise ValueError(f"model.local_attention_of={self.local_attention_of!r} needs {needed}; leave it out")
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
                given = f"model.init_total_variance={self.init_total_variance:g} over model.dim={self.dim} dimensions"
                bounds = f"model.variance_bounds, {lowest:g} and {highest:g} each"
                usual = self.dim * (lowest * highest) ** 0.5
                raise ValueError(f"{given} must lie between {bounds}; e.g. {usual:g}")

    def check_inputs(self, data: DataConfig) -> None:
        """Refuse encoders that cannot read the data, or whose sections contradict themselves."""
        self.image.check("model.image")
        self.text.check("model.text")
        regions = self.image.reads_regions
        inputs = get_source(data.source).inputs
        for side, section in (("image", self.image), ("text", self.text)):
            if (inputs == "embeddings") != section.reads_embeddings:
                found = f"model.{side}.kind={section.kind!r} does not fit data.source={data.source!r}"
                need = "data.source=embeddings and the kind embeddings on both sides"
                raise ValueError(f"{found}: embeddings in files need {need}")
        if regions and inputs == "images":
            found = f"model.image.kind={self.image.kind!r} reads features, and data.source={data.source!r} has images"
            way = "write their features with `python -m papers regions` for data.source=scan"
            raise ValueError(f"{found}; {way}, or set model.image.kind=frozen")
        if inputs == "regions" and not regions:
            found = f"data.source={data.source!r} has region features"
            raise ValueError(f"{found}, which model.image.kind={self.image.kind!r} does not read; set it to regions")


class AugmentConfig(Section):
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
    mix_choice: Literal["batch", "element", "whole"] = "batch"
    """choose between Mixup and CutMix once for each batch (the paper) or for each image (the released code); whole: mix
    all images of a batch with one ratio, or none, where mixed_share is the probability"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """labels lie in [label_smoothing, 1 - label_smoothing]; 0 for none"""

    def check(self, model: ModelConfig) -> None:
        """Refuse random changes that have nothing to change."""
        for key in ("mixed_share", "erase"):
            if dict(self)[key] and not model.image.from_pixels:
                kind = f"model.image.kind={model.image.kind!r}"
                raise ValueError(f"augment.{key} changes pixels, but {kind} reads features; set it to 0")
        if self.drop_words and encoder_entry("text", model.text.kind).tokenizer is None:
            why = "changes the texts in each epoch, but frozen features are computed only once"
            raise ValueError(f"augment.drop_words {why}; set it to 0")
        if self.mixed_share and not (self.mixup_alpha or self.cutmix_alpha):
            raise ValueError("augment.mixed_share needs augment.mixup_alpha or augment.cutmix_alpha above 0")
        if self.image_tokens and model.pooling in ("token", "first", "last") and not model.image.drops_tokens:
            raise ValueError(f"augment.image_tokens drops what model.pooling={model.pooling!r} ignores; set it to 0")


class OptimConfig(Section):
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
    All layers learn in the remaining epochs, the second stage. A first stage that is shorter runs the beginning of the
    second one's schedule. 0 for a single stage"""
    second_stage_factor: PositiveFloat = Field(0.1, description="multiplier of all learning rates in the second stage")
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """how the learning rate falls; with two stages, once in each stage"""
    warmup_epochs: NonNegativeFloat = 1.0
    """length of the linear warm-up in epochs, after optim.freeze_image_epochs; 0 for none"""
    step_at: float = Field(0.6, gt=0, le=1)
    """schedule step: fraction of the run after which the learning rate is a tenth"""
    clip_norm: NonNegativeFloat = Field(2.0, description="largest norm of the gradient; 0 for no limit")

    @pydantic.model_validator(mode="after")
    def _stages_fit(self) -> "OptimConfig":
        if self.first_stage_epochs and self.freeze_image_epochs:
            raise ValueError("optim.first_stage_epochs freezes both encoders; leave out optim.freeze_image_epochs")
        return self

    def check(self, model: ModelConfig, epochs: int) -> None:
        """Refuse settings of optimiser and schedule that have no effect or contradict each other."""
        if self.layer_decay != 1 and not (model.image.has_blocks or model.text.has_blocks):
            raise ValueError("optim.layer_decay needs the blocks of a clip encoder, but there are none; leave it out")
        if self.freeze_image_epochs and not model.image.starts_pretrained:
            given = f"optim.freeze_image_epochs={self.freeze_image_epochs} freezes a pre-trained image encoder"
            random = f"the section model.image with kind={model.image.kind!r} starts from random weights"
            raise ValueError(f"{given}, and {random}; set it to 0")
        if self.first_stage_epochs >= epochs:
            left = f"leaves no epoch of train.epochs={epochs} for the second stage"
            raise ValueError(f"optim.first_stage_epochs={self.first_stage_epochs} {left}; give fewer")


class TrainConfig(Section):
    """The training loop."""

    epochs: PositiveInt = Field(30, description="number of epochs")
    batch_size: int = Field(128, ge=2, description="largest number of pairs in a batch, over all processes")
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
    """longest time in minutes between two saves within an epoch; 0: no saves within epochs"""
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

    def check(self) -> None:
        """Refuse averages of weights that contradict each other."""
        if self.anchor and not (self.start and (self.ema_decay or self.swa_epochs)):
            found = f"train.anchor={self.anchor:g} mixes averaged weights with those of train.start"
            raise ValueError(f"{found}; give train.start and train.ema_decay, or leave it out")
        if self.swa_epochs and self.ema_decay:
            raise ValueError("give either train.swa_epochs or train.ema_decay, not both")
        if self.swa_epochs > self.epochs:
            raise ValueError(f"train.swa_epochs={self.swa_epochs} is more than train.epochs={self.epochs}")


def losses() -> "dict[str, type[MatchLoss]]":
    """Every loss by its name; they need torch."""
    from sfumato.losses import LOSSES

    return LOSSES


class LossConfig(Section):
    """The section of a loss: its name, and the options of the loss as keys."""

    name: str
    distance: str

    def options(self) -> "LossOptions":
        """The options of the loss."""
        return losses()[self.name].Options(**self.model_dump(exclude={"name"}))

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Refuse a loss that does not fit the model or the data."""
        distance = get_distance(self.distance)
        if not model.variance and distance.needs_variance:
            raise ValueError(f"loss.distance={distance.name!r} needs model.variance=true; use csd or squared_l2")
        if not model.variance and getattr(self, "beta", False):
            raise ValueError("loss.beta must be 0 when model.variance=false: the bottleneck of a point is infinite")
        if not model.variance and getattr(self, "inclusion_weight", False):
            raise ValueError("loss.inclusion_weight must be 0 when model.variance=false: points have no inclusion")
        if self.name == "daa" and not data.graded:
            raise ValueError("loss.name='daa' learns from graded labels; set data.graded=true")
        model.check_head()
        if model.embeddings != distance.embeddings:
            found = f"model.embeddings={model.embeddings} does not fit loss.distance={distance.name!r}"
            raise ValueError(f"{found}; with model.embeddings=2 use nearest_of_2, and with 1 any other")


class UnknownLossConfig(LossConfig):
    """The section of a loss whose code is not imported: it is unknown, or nothing of the run is learnt."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    distance: str = "csd"


class VarianceStageConfig(Section):
    """A second stage that trains only log variances: the total variance of an item learns what a teacher says of it."""

    epochs: int = Field(0, ge=0, description="number of passes over the items; 0 for no second stage")
    teacher: str = "dispersion"
    """what total variance learns. dispersion: that of an item's listed matches; listed_matches: their number; or an
    estimator of `sfumato trust` that looks at a gallery, such as expected_matches or match_entropy, computed over
    the training items of the other side, without labels"""
    floor: PositiveFloat = Field(0.02, description="smallest total variance: that of an item with a single match")
    lr: PositiveFloat = Field(1e-2, description="learning rate")
    weight_decay: NonNegativeFloat = Field(0.0, description="weight decay")
    batch_size: PositiveInt = Field(256, description="number of items in a batch")

    def check(self, model: ModelConfig, data: DataConfig, loss: LossConfig) -> None:
        """Refuse a second stage that cannot learn variances."""
        if not self.epochs:
            return
        if not model.variance:
            raise ValueError("variance_stage.epochs needs model.variance=true: points have no variance to fit")
        if get_source(data.source).streamed:
            raise ValueError("variance_stage.epochs needs all pairs in memory, but shards are a stream; set it to 0")
        if loss.distance != "squared_l2":
            found = f"changes variances after training, and loss.distance={loss.distance!r} ranks by them"
            way = "use squared_l2, with model.item_offset=true for what variances did"
            raise ValueError(f"variance_stage.epochs {found}; {way}")


_loss_configs: "dict[tuple[str, type[LossOptions]], type[LossConfig]]" = {}


def loss_config(name: str, options: "type[LossOptions]") -> type[LossConfig]:
    """The section of a loss, made from its options: the same keys, defaults, descriptions and bounds."""
    if found := _loss_configs.get((name, options)):
        return found
    kinds = get_type_hints(options)
    keys: dict[str, Any] = {o.name: (kinds[o.name], Field(o.default, **o.metadata)) for o in fields(options)}
    keys["name"] = (Literal[name], name)
    summary = (options.__doc__ or name).partition("\n")[0]
    title = options.__name__.replace("Options", "Config")
    made = pydantic.create_model(title, __base__=LossConfig, __doc__=summary, **keys)
    return _loss_configs.setdefault((name, options), made)


def _loss_section(value: Any) -> LossConfig:
    """Check a section ``loss`` with the options of its loss."""
    if isinstance(value, LossConfig):
        return value
    name = tag_of(value, "name", losses())
    return loss_config(name, losses()[name].Options).model_validate(value)


LossSection = Annotated[SerializeAsAny[LossConfig], BeforeValidator(_loss_section)]
