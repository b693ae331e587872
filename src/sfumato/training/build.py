"""From a recipe to its data, its model and its loss: the only place that reads configuration into objects."""

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sfumato.data.emoji import load_emoji
from sfumato.data.manifest import read_image_folder, read_manifest
from sfumato.data.pairs import PairData
from sfumato.data.problems import Problems
from sfumato.data.sources import read_karpathy
from sfumato.encoders.backbones import image_backbone, text_backbone
from sfumato.encoders.dual import DualEncoder, FeatureInput, FrozenReader, PixelReader, TokenReader, Tower
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.small import SmallImageEncoder, SmallTextEncoder
from sfumato.errors import UserError
from sfumato.losses import LOSSES, MatchLoss
from sfumato.training.config import DataConfig, ModelConfig, Recipe, SmallImageConfig, SmallTextConfig


def cache_folder() -> Path:
    """Where token features are kept: $SFUMATO_CACHE, else $XDG_CACHE_HOME/sfumato, else ~/.cache/sfumato."""
    own, shared = os.environ.get("SFUMATO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "sfumato"


def load_splits(config: DataConfig, problems: Problems) -> dict[str, PairData]:
    """The data of a recipe by split ("train", "val", "test" and whatever else the source has).

    Args:
        config: section ``data`` of the recipe.
        problems: receives every unusable item.

    Raises:
        UserError: the path does not exist.
    """
    if config.source == "emoji":
        return load_emoji(held_out_style=config.held_out_style)
    path = Path(config.path)
    if not path.exists():
        raise UserError(
            f"data.path: there is no {path}; paths in a recipe are relative to the current folder ({Path.cwd()})"
        )
    images = Path(config.images) if config.images else None
    if config.source == "karpathy":
        return read_karpathy(path, images or path.parent, problems)
    shares = {"val_share": config.val_share, "test_share": config.test_share}
    if config.source == "folder":
        return read_image_folder(path, problems, **shares)
    return read_manifest(path, problems, image_root=images, **shares)


def build_model(config: ModelConfig, tokenizer: Tokenizer | None) -> DualEncoder:
    """A model with fresh weights.

    Args:
        config: section ``model`` of the recipe.
        tokenizer: of the small text encoder; None with a frozen text backbone.
    """
    cache = cache_folder()
    if isinstance(config.image, SmallImageConfig):
        image_reader: PixelReader | FrozenReader = PixelReader(config.image.size)
        image_encoder: SmallImageEncoder | FeatureInput = SmallImageEncoder(config.image.width)
    else:
        backbone = image_backbone(config.image.backbone, size=config.image.size, grid=config.image.grid)
        image_reader = FrozenReader(backbone, cache)
        image_encoder = FeatureInput(backbone.channels, config.feature_dropout)
    if isinstance(config.text, SmallTextConfig):
        if tokenizer is None:
            raise ValueError("build_model: the small text encoder needs its tokenizer")
        text_reader: TokenReader | FrozenReader = TokenReader(tokenizer, config.text.max_tokens)
        text_encoder: SmallTextEncoder | FeatureInput = SmallTextEncoder(
            tokenizer.get_vocab_size(), config.text.width, config.text.dropout
        )
    else:
        backbone = text_backbone(config.text.backbone, max_tokens=config.text.max_tokens)
        text_reader = FrozenReader(backbone, cache)
        text_encoder = FeatureInput(backbone.channels, config.feature_dropout)

    def head(channels: int) -> GaussianHead:
        return GaussianHead(
            channels,
            config.dim,
            pooling=config.pooling,
            mlp=config.mlp,
            normalize=config.normalize,
            variance=config.variance,
            init_total_variance=config.init_total_variance,
        )

    return DualEncoder(
        Tower(image_reader, image_encoder, head(image_encoder.channels)),
        Tower(text_reader, text_encoder, head(text_encoder.channels)),
    )


def build_loss(recipe: Recipe) -> MatchLoss:
    """The loss of a recipe, with fresh logits."""
    options = recipe.loss.model_dump()
    return LOSSES[options.pop("name")](**options)


def choose_device(name: str) -> torch.device:
    """ "auto" is cuda or mps where there is one, else the CPU.

    Raises:
        UserError: the device does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"train.device={name!r} is not available here ({str(error).splitlines()[0]}); use train.device=cpu"
        ) from error
