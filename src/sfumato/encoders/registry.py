"""The registry of the kinds of encoders: their sections of the recipe are checked without the modules of the others."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from pydantic_core import PydanticKnownError
from tokenizers import Tokenizer

from sfumato.encoders import encoder_protocol as protocol
from sfumato.ids import Side


class PackageEntry:
    """A kind of the package, as an :class:`EncoderEntry` whose module is imported when it is used: most need torch."""

    def __init__(self, *places: str) -> None:
        self._places = dict(zip(("config", "build", "tokenizer"), (*places, ""), strict=False))

    def __getattr__(self, name: str) -> Any:
        if name not in ("config", "build", "tokenizer"):
            raise AttributeError(name)
        module, _, found = self._places[name].partition(":")
        return getattr(import_module(f"sfumato.encoders.{module}"), found) if module else None


ENCODERS: dict[Side, dict[str, protocol.EncoderEntry | PackageEntry]] = {
    "image": {
        "small": PackageEntry("scratch:SmallImageConfig", "scratch:build_small_image"),
        "frozen": PackageEntry("frozen:FrozenImageConfig", "feature_rows:build_frozen"),
        "efficientnet": PackageEntry("convolutional:EfficientNetImageConfig", "convolutional:build_efficientnet"),
        "resnet": PackageEntry("convolutional:ResNetImageConfig", "convolutional:build_resnet"),
        "clip": PackageEntry("clip:ClipImageConfig", "clip:build_clip_image"),
        "regions": PackageEntry("feature_rows:RegionImageConfig", "feature_rows:build_regions"),
        "embeddings": PackageEntry("frozen:EmbeddingImageConfig", "feature_rows:build_embeddings"),
    },
    "text": {
        "small": PackageEntry("scratch:SmallTextConfig", "scratch:build_small_text", "scratch:small_tokenizer"),
        "gru": PackageEntry("scratch:WordTextConfig", "scratch:build_word_text", "scratch:words_of_texts"),
        "frozen": PackageEntry("frozen:FrozenTextConfig", "feature_rows:build_frozen"),
        "clip": PackageEntry("clip:ClipTextConfig", "clip:build_clip_text", "clip:clip_tokenizer"),
        "embeddings": PackageEntry("frozen:EmbeddingTextConfig", "feature_rows:build_embeddings"),
    },
}
"""Every kind of encoder by its side and by the name that ``model.image.kind`` and ``model.text.kind`` give it."""


def register_encoder(
    side: Side,
    kind: str,
    config: type[protocol.EncoderConfig],
    build: Callable[[Any, protocol.BuildContext], tuple[protocol.Processor, Any]],
    *,
    tokenizer: Callable[[Any, Iterable[str]], Tokenizer] | None = None,
) -> None:
    """Add a kind of encoder for recipes; loading a model of this kind also needs the registration.

    Args:
        side: "image" or "text".
        kind: value of ``model.image.kind`` or ``model.text.kind`` in recipes; not yet taken.
        config: class of its section in the recipe, with ``kind`` as the default of its field ``kind``.
        build: the section and a :class:`~sfumato.encoders.encoder_protocol.BuildContext` -> (processor, encoder).
        tokenizer: for texts: the section and the training texts -> the tokenizer of a new model, which ``build`` then
            finds in ``context.tokenizer``. None for encoders without a tokenizer.

    Raises:
        ValueError: the side is unknown, the kind is taken, or the section does not fit the side or the kind.

    Example:
        >>> from sfumato.encoders.scratch import SmallImageConfig, build_small_image
        >>> register_encoder("image", "small", SmallImageConfig, build_small_image)
        Traceback (most recent call last):
            ...
        ValueError: register_encoder: the image side has an encoder of kind 'small' already; choose another name
    """
    if side not in ENCODERS:
        raise ValueError(f"register_encoder: unknown side {side!r}; expected 'image' or 'text'")
    if kind in ENCODERS[side]:
        taken = f"the {side} side has an encoder of kind {kind!r} already"
        raise ValueError(f"register_encoder: {taken}; choose another name")
    base: type[protocol.EncoderConfig] = protocol.ImageEncoderConfig if side == "image" else protocol.TextEncoderConfig
    if not issubclass(config, base):
        raise ValueError(f"register_encoder: {config.__name__} must be a subclass of {base.__name__}")
    if (default := config.model_fields["kind"].default) != kind:
        field = f"the field kind of {config.__name__}"
        raise ValueError(f"register_encoder: {field} has the default {default!r}, expected {kind!r}")
    ENCODERS[side][kind] = protocol.EncoderEntry(config, build, tokenizer)


def encoder_entry(side: Side, kind: str) -> protocol.EncoderEntry | PackageEntry:
    """The registered entry of a kind."""
    if kind not in ENCODERS[side]:
        raise ValueError(f"unknown kind of {side} encoder {kind!r}; known: {', '.join(sorted(ENCODERS[side]))}")
    return ENCODERS[side][kind]


def encoder_section(side: Side, value: Any) -> protocol.EncoderConfig:
    """Check a section ``model.image`` or ``model.text`` with the class that is registered for its ``kind``.

    Recipes use it as a pydantic validator, so its errors are those of a union that is discriminated by ``kind``.
    """
    if isinstance(value, protocol.EncoderConfig):
        if not isinstance(value, encoder_entry(side, value.kind).config):
            expected = f"the config class of the {side} side of {value.kind!r}"
            raise ValueError(f"model.{side}: got a {type(value).__name__}, which is not {expected}")
        return value
    return ENCODERS[side][tag_of(value, "kind", ENCODERS[side])].config.model_validate(value)


def tag_of(value: Any, key: str, known: Iterable[str]) -> str:
    """The value of the key that decides which other keys a section has; errors are those of a discriminated union."""
    if not isinstance(value, Mapping):
        raise PydanticKnownError("dict_type")
    about = {"discriminator": repr(key)}
    if key not in value:
        raise PydanticKnownError("union_tag_not_found", about)
    tag = value[key]
    if not isinstance(tag, str) or tag not in known:
        expected = ", ".join(map(repr, known))
        raise PydanticKnownError("union_tag_invalid", about | {"tag": str(tag), "expected_tags": expected})
    return tag
