"""The two towers of a model of torch; a model and its loss from a recipe, and their state in safetensors files."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from tokenizers import Tokenizer
from torch import Tensor, nn

from sfumato.data.transforms import drop_tokens
from sfumato.encoders.encoder_protocol import BaseTower, BuildContext, Inputs, Processor, TwoTowers
from sfumato.encoders.frozen import FrozenImageConfig, FrozenTextConfig
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.registry import encoder_entry
from sfumato.encoders.scratch import Encoder
from sfumato.errors import UserError, first_line
from sfumato.files import cache_folder, write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side
from sfumato.imports import HOW
from sfumato.losses import LOSSES
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock
from sfumato.losses.pcme import SIGMOIDS, PCMELoss
from sfumato.losses.tiles import MatchingLogits
from sfumato.matching import SampledLogits
from sfumato.models.recipe import Recipe
from sfumato.models.sections import AugmentConfig, ModelConfig


class Tower(nn.Module, BaseTower):
    """One side of a model of torch: a processor of raw items, an encoder and a Gaussian head."""

    def __init__(self, processor: Processor, encoder: Encoder, head: GaussianHead, token_dropout: float = 0.0) -> None:
        super().__init__()
        self.processor, self.encoder, self.head = processor, encoder, head
        self.token_dropout, self.dim = token_dropout, head.dim
        self.variances, self.has_offset = head.log_var is not None, head.offset is not None

    @property
    def normalize(self) -> bool:  # type: ignore[override]
        """Whether means have unit length."""
        return self.head.normalize

    @property
    def device(self) -> torch.device:
        """The device of its weights; the CPU if it has none."""
        return self.new_zeros(0).device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros on the device of the weights, in their dtype; without weights in float32 on the CPU."""
        return next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).new_zeros(shape)

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch. Returns (n, d)."""
        tokens = self.encoder(inputs)
        if self.training and self.token_dropout:
            if (present := tokens.mask) is None:
                present = torch.ones(tokens.mean.shape[:2], dtype=torch.bool, device=tokens.mean.device)
            tokens = replace(tokens, mask=drop_tokens(present, rate=self.token_dropout))
        return self.head(tokens.float())

    @torch.no_grad()
    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch in evaluation mode, on the CPU; the previous mode is restored afterwards."""
        training = self.training
        self.eval()
        found: GaussianEmbedding = self(inputs.to(self.device)).to("cpu")
        self.train(training)
        return found


class DualEncoder(nn.Module, TwoTowers):
    """The two towers of a model of torch."""

    image: Tower
    text: Tower
    digest = ""

    def __init__(self, image: Tower, text: Tower) -> None:
        super().__init__()
        self.image, self.text = image, text

    def forward(self, images: Inputs, texts: Inputs) -> tuple[GaussianEmbedding, GaussianEmbedding]:
        """Embed both sides of a batch.

        Args:
            images: n images.
            texts: m texts.

        Returns:
            (n, d) embeddings of the images and (m, d) embeddings of the texts.
        """
        return self.image(images), self.text(texts)


@dataclass(frozen=True)
class Assets:
    """The assets that a model needs beside its recipe and weights, to be rebuilt without a network."""

    tokenizer: Tokenizer | None = None  # of a text encoder that reads words or subword tokens
    encoders: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False  # whether trained weights will be loaded; then pre-trained weights are not needed


def fresh_tokenizer(config: ModelConfig, texts: Iterable[str]) -> Tokenizer | None:
    """The tokenizer of a new model."""
    tokenizer = encoder_entry("text", config.text.kind).tokenizer
    return None if tokenizer is None else tokenizer(config.text, texts)


def build_model(config: ModelConfig, assets: Assets, augment: AugmentConfig | None = None) -> DualEncoder:
    """Build a model with new weights, or with the weights of its pre-trained encoders."""
    augment = augment or AugmentConfig()
    try:
        # Texts with token ids are augmented before the encoder reads them; only features are dropped here.
        text_tokens = 0.0 if encoder_entry("text", config.text.kind).tokenizer else augment.text_tokens
        image = _tower("image", config, assets, augment.image_tokens, config.image.drops_tokens)
        return DualEncoder(image, _tower("text", config, assets, text_tokens, False))
    except (RuntimeError, TypeError, MemoryError) as error:  # How torch refuses a size, each with its own class.
        if not re.search("allocat|Overflow|dimension", str(error)):
            raise
        sizes = "choose smaller sizes: model.dim, and the widths of its encoders"
        raise UserError(f"the model of this recipe does not fit into memory; {sizes}") from error


def _tower(side: Side, config: ModelConfig, assets: Assets, token_dropout: float, encoder_drops: bool) -> Tower:
    """One side of a model."""
    section = config.image if side == "image" else config.text
    context = BuildContext(
        dim=config.dim, variance=config.variance, feature_dropout=config.feature_dropout,
        token_dropout=token_dropout if encoder_drops else 0.0, cache=cache_folder(), tokenizer=assets.tokenizer,
        description=assets.encoders.get(side), trained=assets.trained,
    )  # fmt: skip
    processor, encoder = encoder_entry(side, section.kind).build(section, context)
    pooling = ("first" if side == "image" else "last") if config.pooling == "token" else config.pooling
    given = {f.name: dict(config)[f.name] for f in fields(HeadOptions) if f.name in ModelConfig.model_fields}
    options = HeadOptions(**given | {"pooling": pooling})
    head = GaussianHead(encoder.channels, config.dim, options, side=side, local_channels=encoder.local_channels)
    return Tower(processor, encoder, head, token_dropout=0.0 if encoder_drops else token_dropout)


def unknown_loss(recipe: Recipe) -> UserError:
    """The error of a loss whose code has not been imported."""
    named = f"; the recipe imports {', '.join(recipe.imports)}" if recipe.imports else ""
    return UserError(f"unknown loss {recipe.loss.name!r}; known: {', '.join(LOSSES)}; {HOW}{named}")


def build_loss(recipe: Recipe, trained: Path | None = None) -> MatchLoss:
    """Build the loss of a recipe, with initial logits; of a trained model its code may be missing."""
    if recipe.loss.name not in LOSSES:
        if trained is None:
            raise unknown_loss(recipe)
        return UnknownLoss(recipe, trained)
    return LOSSES[recipe.loss.name](recipe.loss.options())


class UnknownLoss(MatchLoss):
    """What a run knows of a loss whose code is not there: its distance, and the logits that it has learnt."""

    Options = LossOptions

    def __init__(self, recipe: Recipe, path: Path) -> None:
        super().__init__(LossOptions(distance=recipe.loss.distance))
        self._recipe = recipe
        with safe_open(path, framework="pt") as file:
            prefix = "loss/logits."
            held = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
        if held:
            self.logits = MatchingLogits(free="free_logit_scale" in held)
            load_tensors(self.logits, held, f"{path}: does not hold logits")

    def counts(self, block: PairBlock) -> Tensor:
        raise unknown_loss(self._recipe)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        raise unknown_loss(self._recipe)


def sampled_logits(loss: MatchLoss) -> SampledLogits | None:
    """The logits of PCME's match probability."""
    if not isinstance(loss, PCMELoss):
        return None
    factor = SIGMOIDS[loss.options.sigmoid]
    scale, bias = factor * loss.logits.logit_scale.item(), factor * loss.logits.logit_bias.item()
    return SampledLogits(scale, bias, loss.options.n_samples)


def load_towers(path: Path, recipe: Recipe, assets: Assets, device: torch.device) -> tuple[DualEncoder, MatchLoss]:
    """The model and the loss of a run in evaluation mode, with their weights in a file."""
    what = f"{path}: does not fit the model of this recipe"
    check_weights(path, recipe.model, assets, what, USE_ITS_OWN, "model/")
    model, loss = build_model(recipe.model, assets), build_loss(recipe, path)
    load_state(path, {"model": model} | ({} if isinstance(loss, UnknownLoss) else {"loss": loss}))
    return model.to(device).eval(), loss.to(device).eval()


def check_weights(path: Path, config: ModelConfig, assets: Assets, what: str, way: str = "", prefix: str = "") -> None:
    """Compare the header of a file of weights with a model, before the model takes memory and time."""
    wrong = set[str]()
    sides: tuple[Side, ...] = ("image", "text")
    with contextlib.suppress(Exception), safe_open(path, framework="pt") as file, torch.device("meta"):
        # Libraries of encoders raise what they like. What is wrong shows when the model is built and its weights read.
        for side in sides:
            if isinstance(getattr(config, side), FrozenImageConfig | FrozenTextConfig):
                continue
            expected = _tower(side, config, assets, 0.0, False).state_dict(prefix=f"{side}.")
            own = [key for key in file.keys() if key.startswith(f"{prefix}{side}.")]  # noqa: SIM118 (not a mapping)
            came = {(key.removeprefix(prefix), tuple(file.get_slice(key).get_shape())) for key in own}
            wrong |= {key for key, _ in came ^ {(key, tuple(value.shape)) for key, value in expected.items()}}
    if wrong:
        raise misfit(what, sorted(wrong), way)


def save_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None, about: dict[str, Any]
) -> None:
    """Write modules, optimiser and a JSON-able note into one safetensors file, atomically."""
    tensors = {f"{name}/{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    numbers: dict[str, float] = {}
    if optimiser is not None:
        for i, state in optimiser.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser/{i}/{key}"] = value
                else:
                    numbers[f"{i}/{key}"] = value
    detached = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    # A single entry, because the order of several differs between processes, so files of equal runs would differ.
    write_atomically(path, safetensors_bytes(detached, {"state": json.dumps({"about": about, "optimiser": numbers})}))


def load_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read a file of :func:`save_state` back into the same modules and optimiser."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; expected the folder of a finished or running `sfumato train`")
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        about: dict[str, Any] = dict(note["about"])
        numbers: dict[str, float] = dict(note["optimiser"])
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"{path}: damaged, or not a checkpoint of sfumato ({first_line(error)})"
        raise UserError(f"{reason}; copy the folder again, or train into a new one") from error
    for name, module in modules.items():
        own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        load_tensors(module, own, f"{path}: does not fit the {name} of this recipe", USE_ITS_OWN)
    if optimiser is not None:
        try:
            state: dict[int, dict[str, Any]] = {}
            for key, value in (tensors | numbers).items():
                if key.startswith("optimiser/") or key in numbers:
                    i, what = key.removeprefix("optimiser/").split("/")
                    # The optimiser keeps it; a tensor of a mapped file would keep Windows from replacing the file.
                    state.setdefault(int(i), {})[what] = value.clone() if isinstance(value, Tensor) else value
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"the state of the optimiser is damaged, or belongs to another one ({first_line(error)})"
            raise UserError(f"{path}: {reason}; copy the folder again, or train into a new one") from error
    return about


USE_ITS_OWN = "; use the recipe that is saved beside it"


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], what: str, way_out: str = "") -> None:
    """Load tensors into a module; unless their names and shapes are its own, an error begins with ``what``."""
    came, expected = ({(key, value.shape) for key, value in some.items()} for some in (tensors, module.state_dict()))
    if wrong := sorted({key for key, _ in came ^ expected}):
        raise misfit(what, wrong, way_out)
    module.load_state_dict(tensors)


def misfit(what: str, wrong: Sequence[str], way_out: str = "") -> UserError:
    """The error of tensors whose names or shapes differ; ``wrong`` are their names."""
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return UserError(f"{what}: tensor {wrong[0]!r} differs{more}{way_out}")
