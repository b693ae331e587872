"""A run folder: everything that evaluation, indexing and search need, and nothing else.

recipe.toml       the resolved recipe                    model.safetensors  the best weights, with the loss's logits
tokenizer.json    its words or subword tokens            last.safetensors   the state to resume from
encoders.json     descriptions of its encoders           noise.npy          which image each noisy training pair got
log.jsonl         one line per epoch                     calibration.json   what was fitted on the validation pairs
problems.jsonl    items left out, with their errors      evaluation-*.json  written by `sfumato evaluate`
trained.txt       digests of the training images         encoder/           its frozen model, where no name finds it
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args

from tokenizers import Tokenizer

from sfumato import __version__, files
from sfumato.calibration.calibrator import Calibration
from sfumato.data.images import ImageSource
from sfumato.distances import get_distance
from sfumato.encoders.backbones import GRAPHS, OnnxTower, described_processor, foreign_towers, graph_folders
from sfumato.encoders.encoder_protocol import TwoTowers, piece_counter
from sfumato.encoders.frozen import FrozenImageConfig, FrozenTextConfig, PointTower, frozen_processor
from sfumato.encoders.package_weights import is_joint, onnx_device, where_weights_are
from sfumato.encoders.processors import EmbeddingProcessor
from sfumato.errors import UserError, as_typed, first_line, need
from sfumato.files import CALIBRATION, CONFIG, ENCODER, MODEL, RECIPE, TOKENIZER, WEIGHTS
from sfumato.ids import Side
from sfumato.matching import SampledLogits
from sfumato.models.model import Model, UnfamiliarTexts, download, model_digest
from sfumato.search.gallery import Gallery

if TYPE_CHECKING:
    import torch

    from sfumato.models.build import Assets, DualEncoder
    from sfumato.models.recipe import Recipe
    from sfumato.models.sections import ModelConfig

Device = Union[str, "torch.device"]
"""A device of torch or its name; see :func:`choose_device`."""


def with_own_encoder(config: "ModelConfig", folder: Path) -> "ModelConfig":
    """The section whose sides are the frozen model in a folder, if it has one."""
    own = (folder / ENCODER).resolve()
    sides = {side: getattr(config, side) for side in get_args(Side)}
    own_sides = {side: section for side, section in sides.items() if section.frozen_backbone == ENCODER}
    changed = {side: section.model_copy(update={section.base_field: str(own)}) for side, section in own_sides.items()}
    if changed and not own.is_dir():
        raise UserError(f"{folder / ENCODER}, the frozen model, is missing; the folder is incomplete, copy it whole")
    return config.model_copy(update=changed)


LOG = "log.jsonl"

PROBLEMS = "problems.jsonl"

TRAINING_CALIBRATION = "calibration-training.json"

ENCODERS, NOISE, WORDS, TRAINED = "encoders.json", "noise.npy", "words.json", "trained.txt"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Run(Model):
    """A trained or adopted model with its run folder; :func:`load_run` makes one."""

    model: Any  # a DualEncoder of torch; other towers where the means are the embeddings of the data as they are
    folder: Path
    recipe: "Recipe"  # resolved
    loss: Any = None  # a MatchLoss with its learnt logits; None where nothing is learnt
    training_calibration: Calibration | None = None  # of texts that training left out, in a gallery with its images


def load_run(folder: str | Path, *, device: Device = "cpu", trainable: bool = False) -> Run:
    """The best weights of a run, in evaluation mode. Without weights it needs no torch, unless ``trainable``."""
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        command = as_typed("sfumato", "train", "RECIPE", "--out", folder)
        raise UserError(f"{folder} is not a run folder (no {RECIPE} in it); make one with `{command}`")
    from sfumato.models.recipe import load_recipe

    with need("train", needs := f"{folder}: the models of trained runs need torch"):
        recipe = load_recipe(folder / RECIPE)
    if not (folder / MODEL).is_file():
        found = "Its training has not finished an epoch, or the folder was copied incompletely"
        raise UserError(f"{folder} has no weights. {found}; run the same `sfumato train` again, or copy it again")
    recipe = recipe.model_copy(update={"model": with_own_encoder(recipe.model, folder)})
    described = partial(_read_json, folder / ENCODERS)
    if (model := None if trainable else _points(recipe.model, described, device)) is not None:
        logits, learnt = (5.0, 0.0), dict[str, Any](distance=recipe.loss.distance)
    else:
        with need("train", needs):
            from sfumato.models import build
        model, loss = build.load_towers(folder / MODEL, recipe, load_assets(folder, recipe), _device(device))
        logits = loss.match_logits() or (1.0, 0.0)
        learnt = {"distance": loss.distance.name, "loss": loss, "sampled_logits": build.sampled_logits(loss)}
    calibration, words = load_calibration(folder), folder / WORDS
    scale, bias = logits if calibration is None else (calibration.logit_scale, calibration.logit_bias)
    return Run(
        model=model, logit_scale=scale, logit_bias=bias, source=str(folder), kind=recipe.name,
        calibrated=calibration is not None, calibration=calibration, folder=folder, recipe=recipe,
        unfamiliar=UnfamiliarTexts.load(words) if words.is_file() and piece_counter(model) else None,
        training_calibration=load_calibration(folder, TRAINING_CALIBRATION), **learnt,
    )  # fmt: skip


def _points(model: "ModelConfig", described: Callable[[], Mapping[str, Any]], device: Device) -> TwoTowers | None:
    """The towers of a model whose means are embeddings of another one as they are; None for other models."""
    sections: tuple[Any, ...] = (model.image, model.text)
    if not model.identity or model.variance or model.item_offset or any(one.whiten is not None for one in sections):
        return None
    if {one.kind for one in sections} == {"embeddings"}:
        known = described()
        processors: Any = [EmbeddingProcessor(known[side]["channels"]) for side in get_args(Side)]
    elif all(one.kind == "frozen" and one.projected for one in sections):
        processors = [frozen_processor(one, files.cache_folder(), str(device)) for one in sections]
    else:
        return None
    image, text = (PointTower(processor, model.dim) for processor in processors)
    return TwoTowers(image, text)


def load_calibration(folder: Path, name: str = CALIBRATION) -> Calibration | None:
    """The calibration of a run or an exported model."""
    path = folder / name
    try:
        return Calibration.load(path) if path.is_file() else None
    except ValueError as error:
        ways = f"delete {path}, then run `{as_typed('sfumato', 'calibrate', folder)}`, or export the run again"
        raise UserError(f"{error}. The file can be replaced: {ways}") from error


def image_digest(image: ImageSource) -> str:
    """The digest of an image's bytes, by which it is known wherever its file is; "" if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return hashlib.blake2b(image.read_bytes(), digest_size=16).hexdigest()
    return ""


def trained_digests(folder: Path) -> frozenset[str]:
    """The digests of the images that trained a run."""
    path = folder / TRAINED
    return frozenset(path.read_text(encoding="utf-8").split()) if path.is_file() else frozenset()


def save_assets(folder: Path, tokenizer: Tokenizer | None, model: "DualEncoder") -> None:
    """Write the assets that :func:`load_assets` reads."""
    if tokenizer is not None:
        files.write_atomically(folder / TOKENIZER, tokenizer.to_str(pretty=False))
    described = {"image": model.image.encoder.description, "text": model.text.encoder.description}
    if known := {side: found for side, found in described.items() if found is not None}:
        files.write_json(folder / ENCODERS, known)


def load_assets(folder: Path, recipe: "Recipe") -> "Assets":
    """The tokenizer of a run and the descriptions of its encoders, if it has them."""
    from sfumato.encoders.registry import encoder_entry
    from sfumato.models.build import Assets

    image, text = recipe.model.image, recipe.model.text
    of_tokens = encoder_entry("text", text.kind).tokenizer is not None
    needed = {TOKENIZER: of_tokens, ENCODERS: image.needs_description or text.needs_description}
    for name, wanted in needed.items():
        if wanted and not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; the run folder is incomplete, copy it whole")
    tokenizer = read_tokenizer(folder / TOKENIZER) if needed[TOKENIZER] else None
    return Assets(tokenizer, _read_json(folder / ENCODERS) if needed[ENCODERS] else {}, trained=True)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # The library raises no narrower class.
        raise _damaged(path, error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return found


def read_log(path: Path) -> list[dict[str, Any]]:
    """The finite values of each complete line of a training log; an empty list if there is no such file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append({k: v for k, v in value.items() if not isinstance(v, float) or math.isfinite(v)})
    return lines


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({first_line(error)}); copy the folder again, or make it again")


PACKAGED, SMALL = Path(__file__).parent / "packaged", "small"
"""Folder of models that come with the package, and the name of one."""

CLIP = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
"""The model of the hub for photographs."""


def default_model() -> tuple[str, str]:
    """The model for a person's photographs, and why: a CLIP where one is cached or can be downloaded, else `small`."""
    place = where_weights_are(CLIP) if importlib.util.find_spec("transformers") else ""
    if not place:
        return SMALL, ""
    how = "in the hub's cache" if place == "cache" else "downloaded once (0.6 GB)"
    finds = "It finds more than small, the model of the package, but shows no probabilities until it is adopted"
    ways = f"with captions of yours (sfumato adopt {CLIP} --data FOLDER). For small: sfumato index small ..."
    return CLIP, f"using {CLIP}, {how}. {finds} {ways}"


def load_model(
    source: str | Path, *, tokenizer: Tokenizer | None = None, device: Device = "cpu", trainable: bool = False
) -> Model:
    """Load any model: a run, an exported one, one published by PCME++, ProLIP or PCME, or a CLIP or SigLIP as it is.

    `small` and other graphs are computed without torch, on a device of onnxruntime; ``trainable`` loads the weights of
    `small` into torch.
    """
    folder = PACKAGED / SMALL if str(source) == SMALL else Path(source)
    if (folder / RECIPE).is_file():
        return load_run(folder, device=device)
    if not trainable and (graphs := graph_folders(str(folder))):
        if all((graphs[0] / name).is_file() for name in (CONFIG, *GRAPHS.values())):
            return _of_graphs(graphs[0], str(source), onnx_device(str(device)))
        if (towers := foreign_towers(graphs, str(device))) is not None:
            return _as_it_is(towers, with_whole_paths(str(source)), ", by ONNX graphs")
    with need("train", f"{source}: models other than {SMALL} and ONNX graphs need torch"):
        from sfumato.models import pretrained
    if is_joint(str(source)):
        return _as_it_is(frozen_towers(str(source)), str(source))
    device = _device(device)
    if not folder.exists():
        folder = download(str(source))
    if folder.is_dir() and "sfumato" in (config := pretrained.read_config(folder, str(source))):
        return _exported(folder, config, str(source), device)
    return pretrained.load_pretrained(source, tokenizer=tokenizer, device=device)


def _of_graphs(folder: Path, source: str, device: str) -> Model:
    """A model of ONNX graphs, of all layers or of those above frozen encoders of the package."""
    config, towers = _read_json(folder / CONFIG), dict[str, OnnxTower]()
    kinds = {"image": FrozenImageConfig, "text": FrozenTextConfig}
    for side, graph in GRAPHS.items():
        if described := config.get("processors", {}).get(side):
            processor: Any = described_processor(described, partial(read_tokenizer, folder / TOKENIZER))
        else:
            processor = frozen_processor(kinds[side](**config["model"][side]), files.cache_folder(), device)
        dim, offset = config["model"]["dim"], config["model"]["item_offset"]
        options = {"dim": dim + 2 * offset, "has_offset": offset, "threads": 0 if described else 1, "device": device}
        towers[side] = OnnxTower(processor, folder / graph, **options)
    return _of_config(TwoTowers(**towers, digest=config["digest"]), config, folder, source)


def with_whole_paths(name: str) -> str:
    """The name of a model, its local folders by their absolute paths."""
    parts = [name] if Path(name).exists() else name.split("+")
    return "+".join(os.path.abspath(part) if Path(part).exists() else part for part in parts)


def frozen_towers(name: str) -> TwoTowers:
    """A CLIP, SigLIP or model of ONNX graphs as it is; its features are cached."""
    kinds, known = (FrozenImageConfig, FrozenTextConfig), with_whole_paths(name)
    made = [frozen_processor(kind(backbone=known, projected=True), files.cache_folder()) for kind in kinds]
    image, text = (PointTower(processor, processor.backbone.channels) for processor in made)
    return TwoTowers(image, text)


def _as_it_is(towers: TwoTowers, source: str, how: str = "") -> Model:
    """A model of points, of which nothing is calibrated."""
    kind = f"CLIP or SigLIP as it is{how}"
    return Model(model=towers, distance="squared_l2", logit_scale=5.0, logit_bias=0.0, source=source, kind=kind)


def _exported(folder: Path, config: dict[str, Any], source: str, device: Device) -> Model:
    """The model in a folder that :func:`sfumato.workflows.export.export_run` wrote."""
    from pydantic import ValidationError

    from sfumato.encoders.registry import encoder_entry
    from sfumato.models import build
    from sfumato.models.pretrained_tensors import read_checkpoint
    from sfumato.models.recipe import without_gone
    from sfumato.models.sections import ModelConfig

    try:
        model_config = with_own_encoder(ModelConfig.model_validate(without_gone(config)["model"]), folder)
        known = {key: config[key] for key in ("encoders", "distance", "logit_scale", "logit_bias", "calibrated")}
        numbers = (known["logit_scale"], known["logit_bias"])
        logits = config.get("sampled_logits", [])
        numbers += tuple(logits) if isinstance(logits, list) and len(logits) in (0, 3) else ("",)
        if not isinstance(known["encoders"], dict) or not all(isinstance(one, int | float) for one in numbers):
            raise UserError(f"{folder}: {CONFIG} is damaged: encoders must be an object, and the logits numbers")
        get_distance(str(known["distance"]))
    except (ValidationError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": error.args, "msg": "missing"}
        found = f"{CONFIG} of sfumato {config['sfumato']} does not fit this version, {__version__}"
        raise UserError(f"{folder}: {found}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if (points := _points(model_config, lambda: known["encoders"], device)) is not None:
        return _of_config(points, config, folder, source)
    tokenizer = folder / TOKENIZER
    if encoder_entry("text", model_config.text.kind).tokenizer and not tokenizer.is_file():
        raise UserError(f"{tokenizer} is missing; the folder is incomplete, copy it whole")
    assets = build.Assets(read_tokenizer(tokenizer) if tokenizer.is_file() else None, known["encoders"], trained=True)
    what = f"{folder / WEIGHTS}: does not fit its {CONFIG}"
    build.check_weights(folder / WEIGHTS, model_config, assets, what)
    model = build.build_model(model_config, assets)
    build.load_tensors(model, read_checkpoint(folder / WEIGHTS), what)
    return _of_config(model.to(device).eval(), config, folder, source)


def _of_config(model: TwoTowers, config: dict[str, Any], folder: Path, source: str) -> Model:
    """A model with what its config.json says."""
    calibration = load_calibration(folder)
    if config["calibrated"] and calibration is None:
        raise UserError(f"{folder / CALIBRATION} is missing; the folder is incomplete, copy it whole")
    logits = config.get("sampled_logits", [])
    kind = f"exported by sfumato {config['sfumato']}, {config.get('name', 'without a name')}"
    sampled = SampledLogits(*logits) if logits else None
    same = {name: config[name] for name in ("distance", "logit_scale", "logit_bias", "calibrated")}
    return Model(model=model, source=source, kind=kind, calibration=calibration, sampled_logits=sampled, **same)


def _device(device: Device) -> "torch.device":
    return choose_device(device) if isinstance(device, str) else device


def choose_device(name: str = "auto", local_rank: int = 0) -> "torch.device":
    """The device with a given name; "auto" is that of SFUMATO_DEVICE, else cuda if there is a GPU, else the CPU.

    It is never mps by itself, which lacks float64 for sums.
    """
    import torch

    way = "train.device=cpu"
    if name == "auto":
        name, way = os.environ.get("SFUMATO_DEVICE", "auto"), "SFUMATO_DEVICE=cpu"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} is not available here ({first_line(error)}); take the CPU: {way}") from error


def load_retrieval_model(gallery: Gallery, folder: str | Path, run: str | Path | None, device: Device = "cpu") -> Model:
    """The model that a gallery was made with."""
    model_source = str(run or gallery.metadata.get("run", ""))
    if not model_source or files.is_gone(model_source):
        raise UserError(f"the model of {folder} is not at {model_source}; give its folder or name (--run or run=)")
    loaded = load_model(model_source, device=device)
    if gallery.metadata.get("model") != model_digest(loaded.model):
        found = f"{folder} was built with another model than {model_source} is now: their distances cannot be compared"
        raise UserError(f"{found}; give the right model (--run, in Python run=), or build the index again")
    return loaded
