"""From a recipe to its data, its model and its loss: the only place that reads configuration into objects."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from sfumato.encoders.clip import clip_image_encoder, clip_text_encoder, text_positions
from sfumato.encoders.dual import DualEncoder, FeatureInput, Tower
from sfumato.encoders.efficientnet import EfficientNetEncoder
from sfumato.encoders.frozen import image_backbone, text_backbone
from sfumato.encoders.gru import WordEncoder, read_word_vectors, word_tokenizer
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.package_weights import pretrained_tokenizer
from sfumato.encoders.processors import FrozenProcessor, ImageFileProcessor, PixelProcessor, Processor, TokenProcessor
from sfumato.encoders.regions import RegionEncoder, RegionProcessor
from sfumato.encoders.resnet import resnet_encoder
from sfumato.encoders.small import SmallImageEncoder, SmallTextEncoder, add_begin_and_end, train_tokenizer
from sfumato.encoders.unc_token import UncTokenImageEncoder, UncTokenTextEncoder
from sfumato.errors import UserError, first_line
from sfumato.losses import LOSSES, MatchLoss
from sfumato.models.recipe import (
    AugmentConfig,
    ClipTextConfig,
    EfficientNetImageConfig,
    FrozenImageConfig,
    FrozenTextConfig,
    ModelConfig,
    Recipe,
    RegionImageConfig,
    ResNetImageConfig,
    SmallImageConfig,
    SmallTextConfig,
    WordTextConfig,
)
from sfumato.progress import say

_CLIP_TOKENS = 77


def cache_folder() -> Path:
    """Where token features are kept: $SFUMATO_CACHE, else $XDG_CACHE_HOME/sfumato, else ~/.cache/sfumato."""
    own, shared = os.environ.get("SFUMATO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "sfumato"


@dataclass(frozen=True)
class Assets:
    """What a model needs beside its recipe and its weights, so that a run folder asks nothing of a network again.

    Attributes:
        tokenizer: of a text encoder that reads words or word pieces.
        encoders: "image" and "text", descriptions of transformers.
        trained: weights will be loaded into the model: it need not start from pre-trained ones.
    """

    tokenizer: Tokenizer | None = None
    encoders: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False


def fresh_tokenizer(config: ModelConfig, texts: Iterable[str]) -> Tokenizer | None:
    """The tokenizer of a new model, learnt from the training texts where it has no pre-trained one; None with frozen features."""
    text = config.text
    if isinstance(text, SmallTextConfig):
        return train_tokenizer(texts, text.vocabulary)
    if isinstance(text, WordTextConfig):
        return word_tokenizer(texts, min_count=text.min_count)
    if not isinstance(text, ClipTextConfig):
        return None
    positions = text_positions(text.weights) if text.weights else text.max_tokens or _CLIP_TOKENS
    max_tokens = text.max_tokens or positions
    if max_tokens > positions:
        raise UserError(
            f"model.text.max_tokens={max_tokens} is more than the {positions} positions of {text.weights!r}; leave it out"
        )
    if not text.weights and not text.tokenizer:
        return add_begin_and_end(train_tokenizer(texts, text.vocabulary), max_tokens)
    pretrained = pretrained_tokenizer(text.weights or text.tokenizer)
    tokenizer: Tokenizer = pretrained.backend_tokenizer
    tokenizer.enable_truncation(max_tokens)
    if len(tokenizer.encode("").ids) < 2:  # SigLIP: every text has the full length, and all of it is looked at.
        tokenizer.enable_padding(length=max_tokens, pad_id=pretrained.pad_token_id, pad_token=pretrained.pad_token)
    else:
        tokenizer.no_padding()
    return tokenizer


def build_model(config: ModelConfig, assets: Assets, augment: AugmentConfig | None = None) -> DualEncoder:
    """A model with fresh weights, or those of the pre-trained transformers that it starts from.

    Args:
        config: section ``model`` of the recipe.
        assets: the tokenizer; with the descriptions of a run's encoders nothing pre-trained is loaded.
        augment: section ``augment`` of the recipe, for what happens between encoders and heads while training.

    Raises:
        UserError: pre-trained weights, or the package that reads them, are missing.
    """
    augment = augment or AugmentConfig()
    features = 0.0 if config.text.kind != "frozen" else augment.text_tokens
    # Regions are dropped before anything reasons about them, so that it happens with a GRU too.
    tokens = 0.0 if config.image.kind == "regions" else augment.image_tokens
    return DualEncoder(
        _tower(config, *_image_side(config, assets, augment), "first", tokens),
        _tower(config, *_text_side(config, assets), "last", features),
    )


def _tower(config: ModelConfig, processor: Processor, encoder: Any, token: str, token_dropout: float) -> Tower:
    head = GaussianHead(
        encoder.channels,
        config.dim,
        pooling=token if config.pooling == "token" else config.pooling,
        mlp=config.mlp,
        normalize=config.normalize,
        variance=config.variance,
        variance_norm=config.variance_norm,
        variance_mlp=config.variance_mlp,
        init_total_variance=config.init_total_variance,
        covariance=config.covariance,
        variance_bounds=config.variance_bounds,
        embeddings=config.embeddings,
        local_attention=config.local_attention,
        local_channels=getattr(encoder, "local_channels", None),
    )
    return Tower(processor, encoder, head, token_dropout=token_dropout)


def _image_side(config: ModelConfig, assets: Assets, augment: AugmentConfig) -> tuple[Processor, nn.Module]:
    image = config.image
    if isinstance(image, SmallImageConfig):
        return PixelProcessor(image.size), SmallImageEncoder(image.width)
    if isinstance(image, FrozenImageConfig):
        backbone = image_backbone(image.backbone, size=image.size, grid=image.grid)
        return FrozenProcessor(backbone, cache_folder()), FeatureInput(backbone.channels, config.feature_dropout)
    if isinstance(image, EfficientNetImageConfig):
        processor = PixelProcessor(image.size) if image.in_memory else ImageFileProcessor(image.size)
        # The weights of a run replace those of ImageNet anyway.
        efficient = EfficientNetEncoder(pretrained=image.pretrained and not assets.trained)
        efficient.resting = None if image.starts_pretrained else ()
        return processor, efficient
    if isinstance(image, RegionImageConfig):
        return RegionProcessor(image.channels), RegionEncoder(
            image.channels,
            image.width or config.dim,
            layers=image.graph_layers,
            recurrent=image.recurrent,
            variance=config.variance and image.variance_layers,
            dropout=config.feature_dropout,
            region_dropout=augment.image_tokens,
        )
    if isinstance(image, ResNetImageConfig):
        residual = resnet_encoder(
            image.weights,
            architecture=image.architecture,
            depths=image.depths,
            width=image.width,
            description=assets.encoders.get("image"),
        )
        residual.resting = None if image.starts_pretrained else ()
        return (PixelProcessor if image.in_memory else ImageFileProcessor)(image.size, fit=image.fit), residual
    own_blocks = config.variance and not image.variance_token
    encoder = clip_image_encoder(
        image.weights,
        architecture=image.architecture,
        size=image.size,
        blocks=image.blocks,
        activation=image.activation,
        description=assets.encoders.get("image"),
        final_norm=image.final_norm,
        variance_blocks=image.variance_blocks if own_blocks else 0,
        variance_start=image.variance_start,
        checkpointing=image.checkpointing,
    )
    processor = (PixelProcessor if image.in_memory else ImageFileProcessor)(encoder.size, fit=image.fit)
    return processor, UncTokenImageEncoder(encoder) if image.variance_token and config.variance else encoder


def _text_side(config: ModelConfig, assets: Assets) -> tuple[Processor, nn.Module]:
    text = config.text
    if isinstance(text, FrozenTextConfig):
        backbone = text_backbone(text.backbone, max_tokens=text.max_tokens)
        return FrozenProcessor(backbone, cache_folder()), FeatureInput(backbone.channels, config.feature_dropout)
    if assets.tokenizer is None:
        raise ValueError(f"build_model: the text encoder of kind {text.kind!r} needs its tokenizer")
    vocabulary = assets.tokenizer.get_vocab_size()
    if isinstance(text, SmallTextConfig):
        return TokenProcessor(assets.tokenizer, text.max_tokens), SmallTextEncoder(vocabulary, text.width, text.dropout)
    if isinstance(text, WordTextConfig):
        return TokenProcessor(assets.tokenizer, text.max_tokens), _word_encoder(config, text, assets.tokenizer, assets)
    own_blocks = config.variance and not text.variance_token
    encoder = clip_text_encoder(
        text.weights,
        architecture=text.architecture,
        vocabulary=vocabulary,
        max_tokens=text.max_tokens or _CLIP_TOKENS,
        blocks=text.blocks,
        activation=text.activation,
        description=assets.encoders.get("text"),
        variance_blocks=text.variance_blocks if own_blocks else 0,
        variance_start=text.variance_start,
        checkpointing=text.checkpointing,
    )
    processor = TokenProcessor(assets.tokenizer, min(text.max_tokens or encoder.max_tokens, encoder.max_tokens))
    return processor, UncTokenTextEncoder(encoder) if text.variance_token and config.variance else encoder


def _word_encoder(config: ModelConfig, text: WordTextConfig, tokenizer: Tokenizer, assets: Assets) -> WordEncoder:
    encoder = WordEncoder(
        tokenizer.get_vocab_size(),
        text.width,
        text.hidden,
        bidirectional=text.bidirectional,
        states=text.states,
        variance_gru=text.variance_gru and config.variance,
        freeze=text.freeze,
        pretrained=bool(text.vectors),
    )
    if text.vectors and not assets.trained:
        vectors = read_word_vectors(text.vectors, tokenizer, text.width)
        encoder.set_vectors(vectors)
        say(f"{len(vectors)} of {tokenizer.get_vocab_size() - 1} words of the training texts start from {text.vectors}")
    return encoder


def build_loss(recipe: Recipe) -> MatchLoss:
    """The loss of a recipe, with fresh logits.

    Args:
        recipe: its section ``loss`` names the loss and holds its options.

    Returns:
        The module.
    """
    return LOSSES[recipe.loss.name].build(recipe.loss.options())


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """ "auto" is cuda where there is a GPU, else the CPU. Apple's mps has no float64, in which sums are kept here.

    Args:
        name: as in the recipe.
        local_rank: number of the process on its machine; each has a GPU of its own.

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
