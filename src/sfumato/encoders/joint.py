"""Frozen networks of torch: token features by any model of transformers, and the joint embeddings of CLIP and SigLIP.

Joint embeddings are those after the projections, by models of transformers or open_clip. A model of open_clip (extra
``open-clip``) is a folder of the hub's layout: ``open_clip_config.json`` beside ``open_clip_model.safetensors``.
Weights that come only as a pickle are refused.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sfumato.arrays import as_numpy, n_threads
from sfumato.data.image_decoding import decode_image, encode_png
from sfumato.encoders import package_weights as weights
from sfumato.encoders.encoder_protocol import FrozenBackbone
from sfumato.errors import UserError, need
from sfumato.files import write_atomically, write_json
from sfumato.ids import Side


def of_module(
    network: torch.nn.Module,
    precision: weights.Precision,
    prepare: Callable[[Sequence[Any]], Mapping[str, Tensor]],
    embed: Callable[..., np.ndarray],
) -> Callable[[Sequence[Any]], np.ndarray]:
    """Features by a network of torch in a number format: ``embed`` of what ``prepare`` makes of items."""
    dtype = weights.number_format(precision)
    network.eval().to(dtype)

    @torch.inference_mode()
    def compute(items: Sequence[Any]) -> np.ndarray:
        return embed(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in prepare(items).items()})

    return compute


def joint_backbone(name: str, side: Side, *, precision: weights.Precision = "float32") -> FrozenBackbone:
    """One side of a CLIP or SigLIP model of transformers or of open_clip, as it is: one token an item."""
    return (_joint_open_clip if weights.is_open_clip(name) else _joint_transformers)(name, side, precision)


def _joint(
    library: str,
    name: str,
    side: Side,
    model: Any,
    precision: weights.Precision,
    prepare: Callable[[Sequence[Any]], Mapping[str, Any]],
    embed: Callable[..., Any],
    *,
    processor: str = "",
    pieces: Callable[[Sequence[str]], list[int]] | None = None,
) -> weights.Backbone:
    """One side of a dual encoder: ``prepare`` takes images of Pillow or texts."""

    def tokens(**inputs: Tensor) -> np.ndarray:
        found = embed(**inputs)
        # Newer versions of transformers return an output with the embedding as its pooled part.
        return as_numpy((found if isinstance(found, Tensor) else found.pooler_output).float())[:, None]

    known = f"{library} joint {side} {weights.model_hash(model, name)}"
    known += ("" if precision == "float32" else f" {weights.number_format(precision)}") + processor
    of_files = (lambda items: prepare(pillow_images(items))) if side == "image" else prepare
    probe = weights.white_image() if side == "image" else "a"
    compute = of_module(model, precision, of_files, tokens)
    return weights.Backbone(known, compute, probe=probe, feature_dtype="float32", pieces=pieces)


def _joint_transformers(name: str, side: Side, precision: weights.Precision) -> weights.Backbone:
    source, transformers = weights.joint_name(name), weights.import_transformers()
    model = weights.from_pretrained(transformers.AutoModel, source)
    if (embed := getattr(model, f"get_{side}_features", None)) is None:
        found = f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts"
        ways = "give a CLIP or SigLIP model, or train heads on its features: sfumato train own-pictures"
        raise UserError(f"{found}; {ways}")
    made = partial(_joint, "transformers", source, side, model, precision)
    if side == "image":
        processor = weights.from_pretrained(transformers.AutoImageProcessor, source)

        def pixels(images: Sequence[Any]) -> Mapping[str, Tensor]:
            return {"pixel_values": processor(images=list(images), return_tensors="pt")["pixel_values"]}

        return made(pixels, embed, processor=f" processor={processor.to_json_string()}")
    kind, length = str(model.config.model_type), int(model.config.text_config.max_position_embeddings)
    tokenizer, siglip = weights.pretrained_tokenizer(source, kind), kind.startswith("siglip")
    # SigLIP was trained on texts that are padded to its whole context, without a mask.
    padding, names = ("max_length", ["input_ids"]) if siglip else (True, ["input_ids", "attention_mask"])

    def ids(texts: Sequence[Any]) -> Mapping[str, Tensor]:
        tokens = tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        return {k: v for k, v in tokens.items() if k in names}

    return made(ids, embed, processor=" lower" if siglip else "", pieces=partial(count_pieces, tokenizer))


def _joint_open_clip(name: str, side: Side, precision: weights.Precision) -> weights.Backbone:
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
        known = f" processor={json.dumps(settings, sort_keys=True)}"
        return made(lambda images: {"image": torch.stack([*map(prepare, images)])}, model.encode_image, processor=known)
    try:
        tokenizer = package.get_tokenizer(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error

    def pieces(words: Sequence[str]) -> list[int]:
        if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return count_pieces(inner, words)
        return [len(tokenizer.encode(word)) for word in words]

    return made(lambda texts: {"text": tokenizer(list(texts))}, model.encode_text, pieces=pieces)


def import_open_clip() -> Any:
    """Import the package open_clip."""
    try:
        with need("open-clip", "models of open_clip need its package"):
            import open_clip
    except RuntimeError as error:
        needs = f"It needs a torchvision that was built for the installed torch {torch.__version__}"
        reason = f"open_clip cannot be imported: {str(error).splitlines()[0]}. {needs}"
        raise UserError(f"{reason}; install both from the same index") from error
    return open_clip


def _open_clip_folder(name: str, package: Any) -> Path:
    """The local folder of a model; one of the hub is downloaded into the hub's cache."""
    folder = Path(name)
    if not name.startswith(weights.PREFIXES):
        if not (folder / weights.OPEN_CLIP_WEIGHTS).is_file():
            why = "other weights are pickles, which sfumato does not load"
            raise UserError(f"{folder} has no {weights.OPEN_CLIP_WEIGHTS}; {why}")
        return folder.resolve()
    repository = name.split(":", 1)[1]
    architecture, _, tag = repository.partition("/")
    if published := package.get_pretrained_cfg(architecture, tag):
        repository = str(published["hf_hub"]).rstrip("/")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    both = weights.OPEN_CLIP_CONFIG, weights.OPEN_CLIP_WEIGHTS
    try:
        files = [*both, "*token*", "vocab*", "merges.txt", "*.model"]
        found = Path(snapshot_download(repository, allow_patterns=files, local_files_only=not weights.hub_reachable()))
    except LocalEntryNotFoundError as error:
        reason = f"cannot load {name!r}: there is no connection to the hub, and no copy in its cache"
        raise UserError(f"{reason}. Give a local folder with {' and '.join(both)}") from error
    except (HfHubHTTPError, HFValidationError) as error:
        form = "open_clip:ARCHITECTURE/TAG, as open_clip.list_pretrained() has them, or hf-hub:OWNER/NAME"
        reason = f"cannot load {name!r}: the hub has no {repository!r} that you may read"
        raise UserError(f"{reason}. A name is {form}") from error
    if missing := [file for file in both if not (found / file).is_file()]:
        raise UserError(f"{repository!r} has no {missing[0]} on the hub or in its cache; it cannot be loaded safely")
    return found


def transformers_image(name: str, size: int | None, grid: int | None, precision: weights.Precision) -> FrozenBackbone:
    """Any image model of transformers, such as the vision side of CLIP and SigLIP, DINO, ViT or ResNet."""
    transformers = weights.import_transformers()
    processor = weights.from_pretrained(transformers.AutoImageProcessor, name)
    model = weights.from_pretrained(transformers.AutoModel, name)
    sizes = {} if size is None else _processor_sizes(processor, size)
    network = getattr(model, "vision_model", model)
    codes = size is not None and "interpolate_pos_encoding" in signature(network.forward).parameters
    options = {"interpolate_pos_encoding": True} if codes else {}

    def prepare(items: Sequence[bytes]) -> Mapping[str, Tensor]:
        inputs: Mapping[str, Tensor] = processor(images=pillow_images(items), return_tensors="pt", **sizes)
        height, width = inputs["pixel_values"].shape[-2:]
        if size is not None and (height, width) != (size, size):
            made = f"the preprocessing of {name!r} makes images of {width} x {height} pixels of it"
            raise UserError(f"model.image.size={size}: {made}; leave model.image.size out to use its own size")
        return inputs

    def embed(**inputs: Tensor) -> np.ndarray:
        hidden = as_numpy(network(**inputs, **options).last_hidden_state.float())
        if hidden.ndim == 4:  # a convolutional map (n, c, h, w)
            return weights.map_tokens(hidden, grid)
        if grid is not None:
            raise UserError("model.image.grid is for convolutional maps; this model has tokens; leave it out")
        return hidden

    known = (
        f"transformers image {weights.model_hash(model, name)} size={size} grid={grid}"
        f" processor={processor.to_json_string()}{f' {sizes}' if 'crop_size' in sizes else ''}"
        f"{weights.named_format(precision)}"
    )
    return weights.Backbone(known, of_module(network, precision, prepare, embed), probe=weights.white_image())


class TransformersNetwork:
    """Any text model of transformers, such as BERT or the text side of CLIP, with its tokenizer."""

    def __init__(self, name: str, precision: weights.Precision = "float32") -> None:
        model = weights.from_pretrained(weights.import_transformers().AutoModel, name)
        self._tokenizer = weights.pretrained_tokenizer(name, str(model.config.model_type))
        self.known, self.model = weights.model_hash(model, name), getattr(model, "text_model", model)
        self.depth = int(self.model.config.num_hidden_layers)
        self.model.eval().to(weights.number_format(precision))

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, np.ndarray]:
        """The (n, t) input_ids and attention_mask of texts; longer ones are cut."""
        return self._tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="np")

    @torch.inference_mode()
    def states(self, tokens: Mapping[str, np.ndarray], layers: Sequence[int]) -> list[np.ndarray]:
        """The (n, t, c) outputs of layers; layer 0 is the embeddings."""
        given = {name: torch.from_numpy(values) for name, values in tokens.items()}
        found = self.model(**given, output_hidden_states=list(layers) != [self.depth])
        # The last layer is followed by a norm in some models, which hidden_states lacks.
        chosen = (found.last_hidden_state if k == self.depth else found.hidden_states[k] for k in layers)
        return [as_numpy(of_layer.float()) for of_layer in chosen]

    def pieces(self, words: Sequence[str]) -> list[int]:
        return count_pieces(self._tokenizer, words)


def _processor_sizes(processor: Any, size: int) -> dict[str, dict[str, int]]:
    """The sizes with which an image processor of transformers makes squares of size x size pixels."""
    shortest = processor.size.get("shortest_edge")

    def resized(side: int) -> dict[str, int]:
        return {"shortest_edge": side} if shortest else {"height": side, "width": side}

    if not getattr(processor, "do_center_crop", False):
        return {"size": resized(size)}
    # The margin around the cut-out centre keeps its fraction of the image: 256 to 224 pixels, for example.
    ratio = (shortest or processor.size.get("height")) / processor.crop_size.get("height")
    return {"size": resized(round(size * ratio)), "crop_size": {"height": size, "width": size}}


def pillow_images(items: Sequence[bytes]) -> list[Image.Image]:
    """Decode image files in parallel."""
    with ThreadPoolExecutor(n_threads()) as pool:
        pixels = list(pool.map(lambda item: decode_image(item, None, reduced=True), items))
    return [Image.fromarray(of_image.transpose(1, 2, 0)) for of_image in pixels]


def count_pieces(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """The number of subword tokens of each word."""
    return [len(ids) for ids in tokenizer(list(words), add_special_tokens=False)["input_ids"]] if words else []


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
        known = "its name or folder, a SentenceTransformer of images and texts"
        more = "or the architecture and the model of open_clip: ('ViT-B-32', model)"
        raise TypeError(f"model: got a {type(model).__name__}; expected {known}, {more}")
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
            other = f"embeds otherwise when it is loaded again (difference {error:.1g} of the largest number)"
            why = f"it has settings that {architecture or 'its folder'} does not say"
            way = "Embed with it, and give the arrays to sfumato.adopt"
            raise UserError(f"model: the {side} side of this model {other}: {why}. {way}")
    network.train(was_training)


def _save_open_clip(architecture: str, model: Any, folder: Path) -> dict[Side, Callable[[Any], np.ndarray]]:
    package = import_open_clip()
    config = package.get_model_config(architecture)
    if config is None or not hasattr(getattr(model, "visual", None), "preprocess_cfg"):
        what = f"the architecture {architecture!r}" if config is None else f"a {type(model).__name__}"
        way = "give the name and the model of open_clip.create_model_and_transforms"
        raise UserError(f"model: open_clip does not make {what}; {way}")
    folder.mkdir()
    preprocess = model.visual.preprocess_cfg
    write_json(folder / weights.OPEN_CLIP_CONFIG, {"model_cfg": config, "preprocess_cfg": preprocess})
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in model.state_dict().items()}
    write_atomically(folder / weights.OPEN_CLIP_WEIGHTS, safetensors_bytes(tensors))
    tokenizer = package.get_tokenizer(architecture)
    if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers; the other one is in the package.
        inner.save_pretrained(str(folder))
    prepare = package.transform.image_transform_v2(package.transform.PreprocessCfg(**preprocess), is_train=False)
    device = next(model.parameters()).device

    return {
        "text": lambda item: as_numpy(model.encode_text(tokenizer([item]).to(device)).float()),
        "image": lambda item: as_numpy(model.encode_image(prepare(item)[None].to(device)).float()),
    }
