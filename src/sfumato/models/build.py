"""Building of a recipe's model and loss from its sections, with the registries."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.encoder_protocol import BuildContext, Side
from sfumato.encoders.encoder_registry import encoder_entry
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.errors import UserError, first_line
from sfumato.losses import LOSSES, MatchLoss
from sfumato.models.recipe import Recipe
from sfumato.models.recipe_sections import AugmentConfig, ModelConfig


def cache_folder() -> Path:
    """The folder for token features of frozen backbones.

    Returns:
        $SFUMATO_CACHE, else $XDG_CACHE_HOME/sfumato, else ~/.cache/sfumato.
    """
    own, shared = os.environ.get("SFUMATO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "sfumato"


@dataclass(frozen=True)
class Assets:
    """The assets that a model needs beside its recipe and weights, to be rebuilt without a network.

    Attributes:
        tokenizer: of a text encoder that reads words or subword tokens.
        encoders: by side, "image" and "text", the descriptions of encoders
            (:attr:`~sfumato.encoders.encoder_protocol.Encoder.description`).
        trained: whether trained weights will be loaded; then pre-trained weights are not needed.
    """

    tokenizer: Tokenizer | None = None
    encoders: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False


def fresh_tokenizer(config: ModelConfig, texts: Iterable[str]) -> Tokenizer | None:
    """The tokenizer of a new model.

    Args:
        config: section ``model`` of the recipe.
        texts: the training texts, which train a tokenizer unless the text encoder has a pre-trained one.

    Returns:
        The tokenizer; None if the text encoder has none, as with frozen features.

    Raises:
        UserError: a pre-trained tokenizer cannot be loaded, or does not fit.
    """
    tokenizer = encoder_entry("text", config.text.kind).tokenizer
    return None if tokenizer is None else tokenizer(config.text, texts)


def build_model(config: ModelConfig, assets: Assets, augment: AugmentConfig | None = None) -> DualEncoder:
    """Build a model with new weights, or with the weights of its pre-trained encoders.

    Args:
        config: section ``model`` of the recipe.
        assets: the tokenizer; with the descriptions of a run's encoders nothing pre-trained is loaded.
        augment: section ``augment`` of the recipe, for the augmentation between encoders and heads in training.

    Returns:
        The model, on the CPU.

    Raises:
        UserError: pre-trained weights, or the package that reads them, are missing.
        ValueError: the kind of an encoder is not registered, or an asset is missing.
    """
    augment = augment or AugmentConfig()
    # Texts with token ids are augmented before the encoder reads them; only features are dropped here.
    text_tokens = 0.0 if encoder_entry("text", config.text.kind).tokenizer else augment.text_tokens
    return DualEncoder(
        _tower("image", config, assets, augment.image_tokens, config.image.drops_tokens),
        _tower("text", config, assets, text_tokens, False),
    )


def _tower(side: Side, config: ModelConfig, assets: Assets, token_dropout: float, encoder_drops: bool) -> Tower:
    """One side of a model."""
    section = config.image if side == "image" else config.text
    context = BuildContext(
        dim=config.dim,
        variance=config.variance,
        feature_dropout=config.feature_dropout,
        token_dropout=token_dropout if encoder_drops else 0.0,
        cache=cache_folder(),
        tokenizer=assets.tokenizer,
        description=assets.encoders.get(side),
        trained=assets.trained,
    )
    processor, encoder = encoder_entry(side, section.kind).build(section, context)
    pooling = ("first" if side == "image" else "last") if config.pooling == "token" else config.pooling
    options = HeadOptions(**{f.name: dict(config)[f.name] for f in fields(HeadOptions)} | {"pooling": pooling})
    head = GaussianHead(encoder.channels, config.dim, options, local_channels=encoder.local_channels)
    return Tower(processor, encoder, head, token_dropout=0.0 if encoder_drops else token_dropout)


def build_loss(recipe: Recipe) -> MatchLoss:
    """Build the loss of a recipe, with initial logits.

    Args:
        recipe: its section ``loss`` names the loss and holds its options.

    Returns:
        The module.
    """
    return LOSSES[recipe.loss.name].build(recipe.loss.options())


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device with a given name; "auto" is cuda if there is a GPU, else the CPU, as mps lacks float64 for sums.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1" ...
        local_rank: number of the process on its machine; each process has a GPU of its own.

    Returns:
        The device.

    Raises:
        UserError: the device does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"train.device={name!r} is not available here ({first_line(error)}); use train.device=cpu"
        ) from error
