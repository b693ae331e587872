"""Frozen pre-trained backbones: bytes of image files or texts -> token features; and towers of ONNX graphs.

EfficientNet-Lite0 and MiniLM, which come with the package and need no torch; EfficientNet-Lite2 (extra ``offline``);
any model of transformers.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sfumato.arrays import n_threads
from sfumato.data.image_decoding import Fit, decode_image
from sfumato.encoders import package_weights as weights
from sfumato.encoders import processors
from sfumato.encoders.encoder_protocol import BaseTower, FrozenBackbone, Inputs, PixelStore, Processor, TwoTowers
from sfumato.errors import UserError, first_line, need
from sfumato.files import WEIGHTS, read_json, relative_name
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

IMAGE_BACKBONES = {"efficientnet-lite0": "", "efficientnet-lite2": "offline"}
"""Image backbones without transformers, with the extra that they need; the others are hub names or local folders."""

TEXT_BACKBONES = {"minilm-l6-v2": ""}
"""The same of texts."""


def image_backbone(
    name: str,
    *,
    size: int | None = None,
    grid: int | None = None,
    precision: weights.Precision = "float32",
    device: str = "cpu",
) -> FrozenBackbone:
    """The frozen image backbone of a name; ``device`` is that of graphs."""
    if "+" in name and not Path(name).exists():
        return SideBySide([image_backbone(n, size=size, grid=grid, precision=precision) for n in name.split("+")])
    if name in IMAGE_BACKBONES:
        return _efficientnet(name, size, grid, precision, device)
    from sfumato.encoders.joint import transformers_image

    return transformers_image(name, size, grid, precision)


class SideBySide:
    """The channels of several backbones side by side, token by token."""

    def __init__(self, backbones: Sequence[FrozenBackbone]) -> None:
        self._backbones = backbones
        self.channels = sum(backbone.channels for backbone in backbones)
        self.fingerprint = " + ".join(backbone.fingerprint for backbone in backbones)

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (t, c) float16 features of each."""
        found = [backbone(items) for backbone in self._backbones]
        counts = [len(of_item) for of_item in next(iter(zip(*found, strict=True)), ())]
        if len(set(counts)) > 1:
            unequal = f"the backbones have {' and '.join(map(str, counts))} tokens an image"
            raise UserError(f"{unequal}; side by side they need equal numbers: set model.image.grid, e.g. to 1")
        return [np.concatenate(of_item, axis=1) for of_item in zip(*found, strict=True)]


def _efficientnet(
    name: str, size: int | None, grid: int | None, precision: weights.Precision, device: str
) -> weights.Backbone:
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels."""
    side, packaged = size or weights.SIZES[name], not IMAGE_BACKBONES[name]
    if side < 32:
        raise UserError(f"the size of images for {name} must be at least 32 pixels, got {side}")
    weights.check_grid(grid, math.ceil(side / 32))

    def compute(items: Sequence[np.ndarray]) -> np.ndarray:
        pixels = (np.stack(items).astype(np.float32) - 127) / 128
        if packaged:
            return weights.map_tokens(weights.packaged_network(name, 1, device).run(None, {"pixels": pixels})[0], grid)
        from sfumato.encoders.convolutional import efficientnet_maps

        return weights.map_tokens(efficientnet_maps(name, precision, pixels), grid)

    number = weights.named_format("float32" if packaged else precision)
    known = f"{name} {weights.WEIGHTS[name]} size={side} squash (x-127)/128 tokens={grid or 'last-map'}{number}"
    decode = partial(decode_image, size=side, reduced=True)
    return weights.Backbone(known, compute, channels=weights.CHANNELS, decode=decode, one_thread=packaged)


def text_backbone(
    name: str,
    *,
    max_tokens: int = 64,
    pooled: bool = False,
    layers: Sequence[int] = (),
    precision: weights.Precision = "float32",
    device: str = "cpu",
) -> FrozenBackbone:
    """The frozen text backbone of a name: any text model of transformers, such as BERT or CLIP's text side, or MiniLM.

    The features of a text may differ between batches in the last digit of float16; the cache keeps the first ones.
    """
    network: Any
    if name in TEXT_BACKBONES:
        network, precision = weights.shared_minilm(device), "float32"
    else:
        from sfumato.encoders.joint import TransformersNetwork

        network = TransformersNetwork(name, precision)
    if layers and max(layers) > network.depth:
        raise UserError(f"model.text.layers: {name!r} has the layers 0 to {network.depth}, got {max(layers)}")
    chosen = tuple(layers) or (network.depth,)

    def compute(texts: Sequence[str]) -> list[np.ndarray] | np.ndarray:
        tokens: Mapping[str, np.ndarray] = network.prepare(list(texts), max_tokens)
        mask, hidden = tokens["attention_mask"].astype(bool), np.concatenate(network.states(tokens, chosen), axis=-1)
        if pooled:
            return weights.means_of_tokens(hidden, mask)[:, None]
        return [of_text[present] for of_text, present in zip(hidden, mask, strict=True)]

    options = (" pooled" if pooled else "") + (f" layers={','.join(map(str, layers))}" if layers else "")
    known = f"transformers text {network.known} max_tokens={max_tokens}{options}{weights.named_format(precision)}"
    return weights.Backbone(known, compute, channels=getattr(network, "width", 0) * len(chosen), pieces=network.pieces)


class OnnxTower(BaseTower):
    """A tower whose network is an ONNX graph: one input of values, perhaps a mask, and the output mean or an embedding.

    With an output log_var the embeddings are Gaussians; without it they are points, which are made of unit length
    unless the graph is of a model of ours, whose ``dim`` is given. ``pixels`` are the mean and deviation with which a
    graph of images expects its input, in [0, 1]. The graph is read when it is needed.
    """

    normalize = True

    def __init__(
        self,
        processor: Processor,
        graph: Path,
        *,
        pixels: tuple[Any, Any] | None = None,
        threads: int = 0,
        device: str = "cpu",
        dim: int = 0,
        has_offset: bool = False,
    ) -> None:
        self.processor, self._graph, self._threads, self._known_dim = processor, graph, threads, dim
        self.has_offset, self._device = has_offset, device
        self._pixels = pixels and [np.asarray(values, np.float32).reshape(3, 1, 1) for values in pixels]

    @cached_property
    def _session(self) -> Any:
        try:
            return weights.onnx_session(self._graph, self._threads or n_threads(), self._device)
        except Exception as error:  # The library has no common class of its errors.
            raise UserError(f"{self._graph}: not a graph that onnxruntime reads ({first_line(error)})") from error

    @cached_property
    def _outputs(self) -> list[str]:
        names = [one.name for one in self._session.get_outputs()]
        return [next((name for name in _EMBEDDINGS if name in names), names[0]), *["log_var"] * ("log_var" in names)]

    @property
    def variances(self) -> bool:  # type: ignore[override]
        """Whether the embeddings are not points."""
        return len(self._outputs) > 1

    @cached_property
    def dim(self) -> int:  # type: ignore[override]
        """d of the embeddings; a graph that does not say it embeds something."""
        if self._known_dim:
            return self._known_dim
        (shape,) = (one.shape for one in self._session.get_outputs() if one.name == self._outputs[0])
        probe = weights.white_image() if isinstance(self.processor, processors.PixelProcessor) else "a"
        known = shape and isinstance(shape[-1], int)
        return shape[-1] if known else self.embed(self.processor.stack([self.processor.prepare(probe)])).d

    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        given: dict[str, np.ndarray] = {}
        for one in self._session.get_inputs():
            values = inputs.values
            if "mask" in one.name:
                values = np.ones(values.shape[:2], bool) if inputs.mask is None else inputs.mask
            elif self._pixels and one.type == "tensor(uint8)":  # A graph that has the mean and deviation.
                values = values.transpose(0, 2, 3, 1)
            elif self._pixels:
                values = (values / np.float32(255) - self._pixels[0]) / self._pixels[1]
            given[one.name] = values.astype(_NUMBERS.get(one.type, np.float32), copy=False)
        # Some graphs take one item at a time.
        n, at_once = len(inputs), isinstance(self._session.get_inputs()[0].shape[0], str)
        parts = [slice(0, n)] if at_once else [slice(i, i + 1) for i in range(n)]
        found = [self._session.run(self._outputs, {name: v[part] for name, v in given.items()}) for part in parts]
        mean, *log_var = (np.concatenate(own).astype(np.float32, copy=False) for own in zip(*found, strict=True))
        if log_var:
            return GaussianEmbedding(mean, log_var[0])
        return GaussianEmbedding.point(mean if self._known_dim else mean / np.linalg.norm(mean, axis=1, keepdims=True))


_EMBEDDINGS = ("mean", "image_embeds", "text_embeds", "embedding", "pooler_output")
"""Names of the output with the embeddings, the first that a graph has; else its first output."""

_NUMBERS = {f"tensor({name})": np.dtype(name) for name in ("bool", "float16", "int32", "int64", "uint8")}
"""The types of a graph's inputs that are not float32."""


class EncodedTexts(processors.TextProcessor):
    """Texts as ids of a tokenizer that cuts and pads them itself."""

    def __init__(self, tokenizer: Tokenizer, clean: Callable[[str], str] = str) -> None:
        self.tokenizer, self.clean = tokenizer, clean

    def stack(self, values: Sequence[str]) -> PixelStore:
        found = self.tokenizer.encode_batch([self.clean(text) for text in values])
        ids, mask = ([getattr(one, name) for one in found] for name in ("ids", "attention_mask"))
        return PixelStore(np.array(ids, np.int64), np.array(mask, bool))

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        return [sum(one.attention_mask) for one in self.tokenizer.encode_batch(list(words), add_special_tokens=False)]


_NAMES = ("PixelProcessor", "ImageFileProcessor", "EmbeddingProcessor", "TokenProcessor")
_DESCRIBED: dict[str, Any] = {name: getattr(processors, name) for name in _NAMES} | {"EncodedTexts": EncodedTexts}
_OPTIONS = ("size", "fit", "channels", "max_tokens")
"""Processors that a description makes again without torch, and their options."""


def describe_processor(processor: Processor, where: str) -> dict[str, Any]:
    """JSON values from which :func:`described_processor` makes a processor again."""
    if (kind := type(processor).__name__) not in _DESCRIBED:
        raise UserError(f"{where}, reads {processor.reads or 'its items'} with torch ({kind}), and cannot do without")
    return {"processor": kind, **{key: value for key, value in vars(processor).items() if key in _OPTIONS}}


def described_processor(given: dict[str, Any], tokenizer: Callable[[], Tokenizer]) -> Processor:
    """The processor of a description."""
    kind, options = _DESCRIBED[given["processor"]], {key: given[key] for key in _OPTIONS if key in given}
    return kind(tokenizer(), **options) if issubclass(kind, processors.TextProcessor) else kind(**options)


GRAPHS: dict[Side, str] = {"image": "image.onnx", "text": "text.onnx"}
"""Graphs of a model of ours that needs no torch, from what its processors give to mean and log variance."""

_LAYOUTS = (
    ("visual/model.onnx", "textual/model.onnx", "visual/preprocess_cfg.json", "textual/"),
    ("onnx/vision_model.onnx", "onnx/text_model.onnx", "preprocessor_config.json", ""),
)
"""Where immich and transformers.js have the graphs of images and texts, the settings of images, and the tokenizer."""

HALVES = ("model.onnx", "model_optimized.onnx")
"""The graph of a model of fastembed, which is either of images or of texts."""


def has_graphs(files: Collection[str]) -> bool:
    """Whether a folder with these files has ONNX graphs in one of the layouts."""
    graphs = ({*GRAPHS.values()}, *({*layout[:2]} for layout in _LAYOUTS), *({half} for half in HALVES))
    return any(both.issubset(files) for both in graphs)


HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


REFERENCE = "calibration.safetensors"
"""Reference queries of the calibration, beside it."""

GRAPH_FILES = (
    *("image.onnx", "text.onnx", *(f"{half}*" for half in HALVES), "onnx/vision_model.onnx*", "onnx/text_model.onnx*"),
    *("visual/model.onnx*", "visual/preprocess_cfg.json", "textual/model.onnx*"),
)
"""Patterns of the graphs of a model, whose large numbers may stand in files beside them, with immich's settings."""


def graph_folders(source: str) -> list[Path]:
    """The folders of a model of ONNX graphs, those of a hub downloaded; none for other models."""
    if (folder := Path(source)).exists():
        ours = all((folder / name).is_file() for name in GRAPHS.values())
        return [folder] * (folder.is_dir() and (ours or not (folder / WEIGHTS).is_file()))
    found = [_with_graphs(part) for part in source.split("+")]
    return [] if None in found else [one for one in found if one]


def _with_graphs(name: str) -> Path | None:
    """A folder, or the local copy of a model of the hub that has ONNX graphs instead of weights; None for others."""
    if Path(name).exists() or (given := HUB_NAME.fullmatch(name)) is None:
        return Path(name) if Path(name).is_dir() else None

    def usable(files: set[str]) -> bool:
        return WEIGHTS not in files and has_graphs(files)

    try:
        folder = snapshot(given, (*GRAPH_FILES, "*.json", REFERENCE), usable)
    except UserError:
        if weights.hub_reachable():
            raise
        return None
    return folder if usable({file.relative_to(folder).as_posix() for file in folder.rglob("*")}) else None


def snapshot(given: re.Match[str], patterns: Sequence[str], usable: Callable[[set[str]], bool] | None = None) -> Path:
    """The local copy of some files of a model; where they are not usable, a folder that is not there."""

    def get(hub: Any, local: bool) -> str:
        if usable is not None and not local:
            files = {file.rfilename for file in hub.HfApi().model_info(given[1], revision=given[2]).siblings}
            if not usable(files):
                return given[0]
        return hub.snapshot_download(given[1], revision=given[2], allow_patterns=list(patterns), local_files_only=local)

    return from_hub(
        get,
        f"there is no folder {given[0]!r}, and it cannot be downloaded from the Hugging Face hub",
        "Give a local folder, a network, or for a private model a token (`hf auth login`, HF_TOKEN)",
    )


def from_hub(get: Callable[[Any, bool], str], failed: str, way_out: str) -> Path:
    """What ``get(huggingface_hub, whether only its cache can be had)`` finds."""
    with need("backbones", "the Hugging Face hub needs huggingface_hub"):
        import huggingface_hub.errors
    hub: Any = huggingface_hub
    unreachable = not weights.hub_reachable()
    try:
        return Path(get(hub, unreachable))
    except (OSError, ValueError, RuntimeError, hub.errors.HTTPError) as error:
        reason = "no connection to the hub, and no copy in its cache" if unreachable else weights.hub_problem(error)
        raise UserError(f"{failed}: {reason}. {way_out}") from error


def foreign_towers(folders: Sequence[Path], device: str = "cpu") -> TwoTowers | None:
    """The towers of ONNX graphs: of a folder of immich or transformers.js, or of fastembed's two; None for others."""
    image, text = folders[0], folders[-1]
    found = [layout for layout in _LAYOUTS if all((image / graph).is_file() for graph in layout[:2])]
    if len(folders) == 2:
        halves = [next((half for half in HALVES if (folder / half).is_file()), HALVES[0]) for folder in folders]
        found = [(halves[0], halves[1], "preprocessor_config.json", "")]
    if not found:
        return None
    *names, settings, place = found[0]
    graphs = [image / names[0], text / names[1]]
    tokens = (text / f"{place}{name}" for name in ("tokenizer.json", "tokenizer_config.json"))
    files, device = [image / settings, text / "config.json", *tokens], weights.onnx_device(device)
    try:
        if missing := [graph for graph in graphs if not graph.is_file()]:
            raise UserError(f"no {missing[0]}")
        size, fit, pixels = prepared_images(read_json(files[0]))
        tokenizer, clean = _tokenizer(Tokenizer.from_file(str(files[2])), read_json(files[1]), read_json(files[3]))
        of_images = OnnxTower(processors.ImageFileProcessor(size, fit=fit), graphs[0], pixels=pixels, device=device)
    except Exception as error:  # The tokenizer's library raises no narrower class.
        held = "holds ONNX graphs, but not the settings of images and texts as immich, transformers.js or fastembed"
        reason = f"{type(error).__name__}: {first_line(error)}"
        common = next((one for one in (image, *image.parents) if text.is_relative_to(one)), image)
        expected = ", ".join(relative_name(file, common) for file in [*graphs, *files])
        where = "+".join(map(str, folders))
        raise UserError(f"{where}: {held} write them, or others ({reason}); expected {expected}") from error
    own = [file for graph in graphs for file in sorted(graph.parent.glob(f"{graph.name}*"))]
    of_texts = OnnxTower(EncodedTexts(tokenizer, clean), graphs[1], device=device)
    return TwoTowers(of_images, of_texts, _digest([*own, *files]))


def graph_backbone(name: str, side: Side, device: str = "cpu") -> FrozenBackbone | None:
    """One side of a model of ONNX graphs as it is, one token an item; None for other models."""
    if not (folders := graph_folders(name)) or (towers := foreign_towers(folders, device)) is None:
        return None
    tower: BaseTower = getattr(towers, side)
    processor, of_images = tower.processor, side == "image"
    return weights.Backbone(
        f"onnx joint {side} {towers.digest}", lambda items: tower.embed(processor.stack(items)).mean[:, None],
        probe=weights.white_image() if of_images else "a", feature_dtype="float32",
        decode=processor.prepare if of_images else None, pieces=getattr(processor, "pieces", None),
    )  # fmt: skip


def prepared_images(given: dict[str, Any]) -> tuple[int, Fit, tuple[Any, Any]]:
    """How images become pixels: (side, fit, (mean, deviation))."""
    size, resampling = given["size"], given.get("interpolation", given.get("resample", 3))
    if resampling not in ("bicubic", 3):
        raise ValueError(f"images are resized by {resampling!r}, not bicubic")
    shorter = size[0] if isinstance(size, list) else size
    if isinstance(size, dict):
        shorter = size.get("shortest_edge") or size["height"]
    if "mean" in given:  # As open_clip writes them.
        fits: dict[str, Fit] = {"shortest": "crop-nearest", "squash": "squash"}
        return shorter, fits[given.get("resize_mode", "shortest")], (given["mean"], given["std"])
    standard = (given["image_mean"], given["image_std"]) if given.get("do_normalize", True) else ([0] * 3, [1] * 3)
    if not given.get("do_center_crop", "crop_size" in given):
        return shorter, "squash", standard
    side = given["crop_size"] if isinstance(given["crop_size"], int) else given["crop_size"]["height"]
    crops: dict[int, Fit] = {side * 8 // 7: "crop-margin", side: "crop"}
    return side, crops[shorter], standard


def _tokenizer(
    tokenizer: Tokenizer, config: dict[str, Any], settings: dict[str, Any]
) -> tuple[Tokenizer, Callable[[str], str]]:
    """A tokenizer that cuts and pads as the model's configurations say, and how texts are cleaned before."""
    pad = settings["pad_token"]["content"] if isinstance(settings["pad_token"], dict) else settings["pad_token"]
    if "text_cfg" in config:
        length = padded = config["text_cfg"].get("context_length", 77)
        clean = processors.CLEANINGS[(config["text_cfg"].get("tokenizer_kwargs") or {}).get("clean", "whitespace")]
    else:
        clip = config["model_type"].startswith("clip")  # What follows the end of a text changes nothing there.
        length = config.get("text_config", config).get("max_position_embeddings", 77 if clip else 64)
        padded, clean = None if clip else length, str.lower if config["model_type"].startswith("siglip") else str
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(pad_id=tokenizer.get_vocab()[pad], pad_token=pad, length=padded)
    return tokenizer, clean


def _digest(files: Sequence[Path]) -> str:
    """The SHA-256 of the sizes of files and of at most 256 parts of each, evenly spread."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PART, size // 256)):
                file.seek(start)
                digest.update(file.read(_PART))
    return digest.hexdigest()


_PART = 1 << 14
"""Bytes."""
