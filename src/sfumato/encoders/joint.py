"""The joint embeddings of CLIP and SigLIP models as they are, after their projections: from transformers or open_clip.

A model of open_clip (extra ``open-clip``) is a folder of the hub's layout: ``open_clip_config.json`` beside
``open_clip_model.safetensors``. Weights that come only as a pickle are refused.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sfumato.data.transforms import encode_png
from sfumato.encoders.backbones import Backbone, count_pieces, pillow_images, white_image
from sfumato.encoders.encoder_protocol import FrozenBackbone
from sfumato.encoders.package_weights import (
    Precision,
    from_pretrained,
    hub_reachable,
    import_transformers,
    model_hash,
    number_format,
    pretrained_tokenizer,
)
from sfumato.errors import UserError, need
from sfumato.files import write_atomically, write_json
from sfumato.ids import Side

PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""


OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def joint_backbone(name: str, side: Side, *, precision: Precision = "float32") -> FrozenBackbone:
    """One side of a CLIP or SigLIP model of transformers or of open_clip, as it is: one token an item."""
    return (_joint_open_clip if is_open_clip(name) else _joint_transformers)(name, side, precision)


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def _joint(
    library: str,
    name: str,
    side: Side,
    model: Any,
    precision: Precision,
    prepare: Callable[[Sequence[Any]], Mapping[str, Any]],
    embed: Callable[..., Any],
    *,
    processor: str = "",
    pieces: Callable[[Sequence[str]], list[int]] | None = None,
) -> Backbone:
    """One side of a dual encoder: ``prepare`` takes images of Pillow or texts."""

    def tokens(**inputs: Tensor) -> Tensor:
        found = embed(**inputs)
        # Newer versions of transformers return an output with the embedding as its pooled part.
        values: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return values.float().unsqueeze(1)

    known = f"{library} joint {side} {model_hash(model, name)}"
    known += ("" if precision == "float32" else f" {number_format(precision)}") + processor
    of_files = (lambda items: prepare(pillow_images(items))) if side == "image" else prepare
    probe = white_image() if side == "image" else "a"
    return Backbone(model, precision, known, of_files, tokens, probe=probe, feature_dtype="float32", pieces=pieces)


def _joint_transformers(name: str, side: Side, precision: Precision) -> Backbone:
    source, transformers = joint_name(name), import_transformers()
    model = from_pretrained(transformers.AutoModel, source)
    embed = getattr(model, f"get_{side}_features", None)
    if embed is None:
        raise UserError(
            f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts; give a CLIP"
            " or SigLIP model, or train heads on its features: sfumato train own-pictures"
        )
    made = partial(_joint, "transformers", source, side, model, precision)
    if side == "image":
        processor = from_pretrained(transformers.AutoImageProcessor, source)

        def pixels(images: Sequence[Any]) -> Mapping[str, Tensor]:
            return {"pixel_values": processor(images=list(images), return_tensors="pt")["pixel_values"]}

        return made(pixels, embed, processor=f" processor={processor.to_json_string()}")
    tokenizer, length = pretrained_tokenizer(source), int(model.config.text_config.max_position_embeddings)
    # SigLIP was trained on texts that are padded to its whole context.
    padding = "max_length" if str(model.config.model_type).startswith("siglip") else True

    def ids(texts: Sequence[Any]) -> Mapping[str, Tensor]:
        tokens = tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        return {k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")}

    return made(ids, embed, pieces=partial(count_pieces, tokenizer))


def _joint_open_clip(name: str, side: Side, precision: Precision) -> Backbone:
    package = import_open_clip()
    source = f"local-dir:{_open_clip_folder(name, package)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = package.create_model(source, require_pretrained=True)
        except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"cannot load {name!r} with open_clip {package.__version__}: {reason}") from error
    made = partial(_joint, "open_clip", name, side, model, precision)
    if side == "image":
        settings = model.visual.preprocess_cfg
        prepare = package.transform.image_transform_v2(package.transform.PreprocessCfg(**settings), is_train=False)
        return made(
            lambda images: {"image": torch.stack([prepare(image) for image in images])},
            model.encode_image,
            processor=f" processor={json.dumps(settings, sort_keys=True)}",
        )
    try:
        tokenizer = package.get_tokenizer(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error

    def pieces(words: Sequence[str]) -> list[int]:
        if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return count_pieces(inner, words)
        return [len(tokenizer.encode(word)) for word in words]

    return made(lambda texts: {"text": tokenizer(list(texts))}, model.encode_text, pieces=pieces)


def is_open_clip(name: str) -> bool:
    """Whether a name is that of a model of open_clip."""
    return name.startswith(PREFIXES) or (
        (Path(name) / OPEN_CLIP_CONFIG).is_file() and not (Path(name) / "config.json").exists()
    )


def is_joint(name: str) -> bool:
    """Whether a name or folder is that of a CLIP or SigLIP model; of a hub's model its small config.json is read."""
    if is_open_clip(name):
        return True
    file = Path(joint_name(name)) / "config.json"
    if not Path(name).exists():
        with contextlib.suppress(ImportError, OSError, ValueError):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(name, "config.json", local_files_only=not hub_reachable()))
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(file.read_bytes()).get("model_type") in ("clip", "siglip", "siglip2")
    return False


def import_open_clip() -> Any:
    """Import the package open_clip."""
    try:
        with need("open-clip", "models of open_clip need its package"):
            import open_clip
    except RuntimeError as error:
        raise UserError(
            f"open_clip cannot be imported: {str(error).splitlines()[0]}. It needs a torchvision that was built for the"
            f" installed torch {torch.__version__}; install both from the same index"
        ) from error
    return open_clip


def _open_clip_folder(name: str, package: Any) -> Path:
    """The local folder of a model; one of the hub is downloaded into the hub's cache."""
    folder = Path(name)
    if not name.startswith(PREFIXES):
        if not (folder / OPEN_CLIP_WEIGHTS).is_file():
            raise UserError(
                f"{folder} has no {OPEN_CLIP_WEIGHTS}; other weights are pickles, which sfumato does not load"
            )
        return folder.resolve()
    repository = name.split(":", 1)[1]
    architecture, _, tag = repository.partition("/")
    if published := package.get_pretrained_cfg(architecture, tag):
        repository = str(published["hf_hub"]).rstrip("/")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reachable = hub_reachable()
    try:
        files = [OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, "*token*", "vocab*", "merges.txt", "*.model"]
        found = Path(snapshot_download(repository, allow_patterns=files, local_files_only=not reachable))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot load {name!r}: there is no connection to the hub, and no copy in its cache. Give a local folder"
            f" with {OPEN_CLIP_CONFIG} and {OPEN_CLIP_WEIGHTS}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"cannot load {name!r}: the hub has no {repository!r} that you may read. A name is"
            " open_clip:ARCHITECTURE/TAG, as open_clip.list_pretrained() has them, or hf-hub:OWNER/NAME"
        ) from error
    if missing := [file for file in (OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS) if not (found / file).is_file()]:
        raise UserError(f"{repository!r} has no {missing[0]} on the hub or in its cache; it cannot be loaded safely")
    return found


_TEXT = "a red circle on a white ground, seen from above"


def save_model_object(model: Any, folder: Path) -> None:
    """Write a model of another library into a new folder, and check that it embeds there as it does in memory."""
    architecture, network = model if isinstance(model, tuple) and len(model) == 2 else ("", model)
    is_module = isinstance(network, torch.nn.Module)
    if architecture and is_module:
        embed = _save_open_clip(architecture, network, folder)
    elif is_module and hasattr(model, "encode") and hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))
        embed = dict.fromkeys(get_args(Side), lambda item: np.asarray(model.encode([item])))
    else:
        raise TypeError(
            f"model: got a {type(model).__name__}; expected its name or folder, a SentenceTransformer of images and"
            " texts, or the architecture and the model of open_clip: ('ViT-B-32', model)"
        )
    tolerance = 1e-3 if next(network.parameters()).dtype == torch.float32 else 3e-2
    pixels = np.random.default_rng(0).integers(0, 256, (3, 50, 70), np.uint8)
    sides: tuple[tuple[Side, Any, Any], ...] = (
        ("text", _TEXT, _TEXT),
        ("image", encode_png(pixels), Image.fromarray(pixels.transpose(1, 2, 0))),
    )
    was_training = network.training
    network.eval()
    for side, stored, held in sides:
        with torch.inference_mode():
            expected = np.ravel(embed[side](held))
        loaded = np.ravel(joint_backbone(str(folder), side)([stored])[0])
        error = np.abs(loaded - expected).max() / np.abs(expected).max() if loaded.shape == expected.shape else np.inf
        if not error < tolerance:
            raise UserError(
                f"model: the {side} side of this model embeds otherwise when it is loaded again (difference"
                f" {error:.1g} of the largest number): it has settings that {architecture or 'its folder'} does not"
                " say. Embed with it, and give the arrays to sfumato.adopt"
            )
    network.train(was_training)


def _save_open_clip(architecture: str, model: Any, folder: Path) -> dict[Side, Callable[[Any], np.ndarray]]:
    package = import_open_clip()
    config = package.get_model_config(architecture)
    if config is None or not hasattr(getattr(model, "visual", None), "preprocess_cfg"):
        what = f"the architecture {architecture!r}" if config is None else f"a {type(model).__name__}"
        raise UserError(
            f"model: open_clip does not make {what}; give the name and the model of"
            " open_clip.create_model_and_transforms"
        )
    folder.mkdir()
    preprocess = model.visual.preprocess_cfg
    write_json(folder / OPEN_CLIP_CONFIG, {"model_cfg": config, "preprocess_cfg": preprocess})
    weights = {key: value.detach().cpu().clone().contiguous() for key, value in model.state_dict().items()}
    write_atomically(folder / OPEN_CLIP_WEIGHTS, safetensors_bytes(weights))
    tokenizer = package.get_tokenizer(architecture)
    if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers; the other one is in the package.
        inner.save_pretrained(str(folder))
    prepare = package.transform.image_transform_v2(package.transform.PreprocessCfg(**preprocess), is_train=False)
    device = next(model.parameters()).device

    def text(item: str) -> np.ndarray:
        return _array(model.encode_text(tokenizer([item]).to(device)))

    def image(item: Image.Image) -> np.ndarray:
        return _array(model.encode_image(prepare(item)[None].to(device)))

    return {"text": text, "image": image}


def _array(values: torch.Tensor) -> np.ndarray:
    return np.asarray(values.float().cpu())
