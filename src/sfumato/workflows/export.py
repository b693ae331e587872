"""Export of trained models to a folder in the layout of the Hugging Face hub, with a model card.

model.safetensors   the weights that embedding needs     config.json   section model of the recipe, distance and logits
tokenizer.json      its words or subword tokens          README.md     a model card
calibration.json    what was fitted on held-out pairs    encoder/      its frozen model, where no name finds it

`hf upload OWNER/NAME FOLDER` puts it on the hub. Everything in the model card comes from the run folder; what is not
known there, such as a licence, is said to be unknown. Its words stand in model_card.md.j2.

A run as ONNX graphs needs no torch: one a side, from what its processor gives to mean and log variance. Frozen encoders
of the package are not in them, since every installation has these. A CLIP or SigLIP of transformers whose joint
embeddings a run takes is in them.
"""

import contextlib
import copy
import fnmatch
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from sfumato import __version__, files
from sfumato.arrays import as_numpy
from sfumato.charts import render_page
from sfumato.data.image_decoding import encode_png
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.encoders import package_weights as weights
from sfumato.encoders.backbones import GRAPH_FILES, GRAPHS, EncodedTexts, describe_processor, prepared_images
from sfumato.encoders.encoder_protocol import Inputs, Processor, TwoTowers
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.heads import GPO, Pooling
from sfumato.encoders.processors import ImageFileProcessor
from sfumato.encoders.scratch import StandardisedPixels
from sfumato.errors import UserError, first_line, need
from sfumato.files import CALIBRATION, CONFIG, ENCODER, TOKENIZER, WEIGHTS
from sfumato.ids import Side
from sfumato.models.build import Tower
from sfumato.models.calibrate import describe_calibration
from sfumato.models.model import ENCODER_FILES, model_digest
from sfumato.models.run import Run, load_assets, load_model, load_run
from sfumato.models.sections import ModelConfig
from sfumato.workflows.adopt import ADOPTED

CARD = "README.md"


def export_run(run_folder: str | Path, out_folder: str | Path, *, license: str = "", graphs: bool = False) -> Path:
    """Write a run's model as a folder that can be published or uploaded to a hub.

    A frozen backbone is in it if it comes from a folder; others are loaded by their name. With ``graphs`` its weights
    are ONNX graphs, which need no torch; config.json has their largest difference from torch. It is written completely
    or not at all.
    """
    out = Path(out_folder)
    if not files.is_unused(out):
        raise UserError(f"{out} exists already; give a new or empty folder, or remove it")
    run = load_run(run_folder, trainable=True)
    with files.new_folder(out) as temporary:
        _write(run, temporary, license=license, graphs=graphs)
    return out


def _write(run: Run, folder: Path, *, license: str, graphs: bool) -> None:
    """Write the files of a run's model into an empty folder."""
    assets, own = load_assets(run.folder, run.recipe), None if graphs else _local_encoder(run.recipe.model)
    config = {
        "sfumato": __version__,
        "name": run.recipe.name,
        "model": _without_local_paths(run.recipe.model, own),
        "encoders": dict(assets.encoders),
        **{name: getattr(run, name) for name in ("distance", "logit_scale", "logit_bias", "calibrated")},
        **({} if run.sampled_logits is None else {"sampled_logits": list(run.sampled_logits)}),
    }
    if graphs:
        config |= {"digest": model_digest(run.model), "processors": write_graphs(run, folder)}
    else:
        weights = {key: value.detach().cpu().contiguous() for key, value in run.model.state_dict().items()}
        files.write_atomically(folder / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
    if assets.tokenizer is not None:
        files.write_atomically(folder / TOKENIZER, (run.folder / TOKENIZER).read_bytes())
    if run.calibration is not None:
        run.calibration.save(folder / CALIBRATION)
    if own is not None:
        _copy_encoder(own, folder / ENCODER)
    files.write_atomically(folder / CARD, model_card(run, license=license, own_encoder=own is not None, graphs=graphs))
    files.write_json(folder / CONFIG, config)
    if graphs:
        files.write_json(folder / CONFIG, config | {"largest_difference": check_graphs(run.model, folder)})
    folder.chmod(run.folder.stat().st_mode & 0o777)


def _copy_encoder(source: Path, target: Path) -> None:
    """Copy what the frozen model is loaded from, and nothing else that lies in its folder."""
    for path in sorted(source.rglob("*")):
        place = path.relative_to(source)
        needed = [fnmatch.fnmatch(path.name, pattern) for pattern in ENCODER_FILES]
        if path.is_file() and any([*needed, *(fnmatch.fnmatch(place.as_posix(), pattern) for pattern in GRAPH_FILES)]):
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / place)


def _local_encoder(config: ModelConfig) -> Path | None:
    """The folder of the frozen model of both sides, if it comes from one."""
    names = {config.image.frozen_backbone, config.text.frozen_backbone}
    if len(names) > 1 and (local := [name for name in names if Path(name).is_absolute()]):
        raise UserError(f"export: the towers come from two folders, one of them {local[0]}; put both into one")
    folder = Path(names.pop())
    return folder if not names and folder.is_absolute() and folder.is_dir() else None


def _without_local_paths(config: ModelConfig, own: Path | None) -> dict[str, Any]:
    """Section ``model`` as JSON, without local folders of pre-trained weights: the weights are in the model."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for side, section in (("image", config.image), ("text", config.text)):
        for key in section.path_fields:
            if found := values[side].get(key):
                values[side][key] = ENCODER if own and Path(found) == own else without_folders(found)
    return values


_NAME = r"[\w.-]+(?:/[\w.-]+)?"
_HUB_NAME = re.compile(rf"(?:open_clip:|hf-hub:)?{_NAME}(?:\+{_NAME})*")
_BASE_MODEL = re.compile(r"(?:hf-hub:)?([\w.-]+/[\w.-]+)")

_WAYS = {"i2t": "image to text", "t2i": "text to image"}


def model_card(run: Run, *, license: str = "", own_encoder: bool = False, graphs: bool = False) -> str:
    """The model card of a run; own_encoder: its frozen model is beside it; graphs: it needs no torch."""
    model, evaluations, bases = run.recipe.model, _evaluations(run.folder), _base_models(run.recipe.model)
    sides = (model.image, model.text)
    pictures = not (model.image.reads_embeddings or model.text.reads_embeddings or model.image.reads_regions)
    text, image = _example(model)
    about = {} if run.calibration is None else run.calibration.metadata
    pairs = f"{about['pairs']:,} pairs" if "pairs" in about else "pairs"
    values = {
        "metadata": _metadata(run, evaluations, license, pictures),
        "recipe": run.recipe,
        "model": model,
        "encoders": [f"{one.kind} ({without_folders(one.origin)})" if one.origin else one.kind for one in sides],
        "frozen": _shown_once(side.frozen_backbone for side in sides if not (graphs and side.extras)),
        "own_encoder": own_encoder,
        "adopted": (run.folder / ADOPTED).is_file(),
        "data": _data(run),
        "distance": run.distance,
        "license": license,
        "below": f"; the base model{'s have their' if len(bases) > 1 else ' has its'} own" if bases else "",
        "package": "sfumato" if graphs else _package(model),
        "text": text,
        "image": image,
        "pictures": pictures,
        "formula": f"sigmoid({run.logit_bias:.4g} - {run.logit_scale:.4g} * distance)",
        "calibration": run.calibration,
        "pairs": pairs + (f" of the split {about['split']}" if "split" in about else ""),
        "first_hits": _first_hits(run),
        "scores": [_score(split, found) for split, found in evaluations],
        "version": __version__,
    }
    return render_page("model_card.md.j2", values)


def _metadata(run: Run, evaluations: list[tuple[str, dict[str, Any]]], license: str, pictures: bool) -> dict[str, str]:
    """What the hub reads; every value is written as JSON, which YAML contains."""
    results = [_result(run, split, found) for split, found in evaluations]
    values = {
        "library_name": "sfumato",
        "license": license,
        "pipeline_tag": "zero-shot-image-classification" if pictures else "",
        "tags": ["image-text-retrieval", "image-text-matching", "probabilistic-embeddings"],
        "base_model": _base_models(run.recipe.model),
        "model-index": [{"name": run.recipe.name, "results": results}] if results else [],
    }
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items() if value}


def _result(run: Run, split: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """One evaluation in the form of the hub's model-index; recalls are fractions."""
    return {
        "task": {"type": "image-text-retrieval", "name": "Image-text retrieval"},
        "dataset": {"type": run.recipe.data.source, "name": _data(run), "split": split},
        "metrics": [
            {
                "type": f"{way}_recall@{k}",
                "name": f"{_WAYS[way]} recall@{k} by {evaluation['distance']}",
                "value": round(evaluation[way][f"recall@{k}"], 4),
            }
            for way in _WAYS
            for k in (1, 5, 10)
        ],
    }


def _first_hits(run: Run) -> list[str]:
    """The probability of first hits against the fraction that match: of the adoption, else of the calibration."""
    lines, path = [], run.folder / ADOPTED
    adopted = files.read_json(path)["hits"].get("served", []) if path.is_file() else []
    found = {one["direction"]: one for one in adopted if one["hits"] == 1}
    where = "images that measure alone"
    if not found and run.calibration is not None:
        where = "halves of the queries that fitted the other half"
        for way, known in describe_calibration(run.calibration).items():
            if way in _WAYS and "first_hit" in known:
                found[way] = {**known["first_hit"], "n": known["n_queries"]}
    for way in _WAYS:
        if way in found:
            one = found[way]
            lines.append(
                f"First hits of {one['n']:,} held-out queries, {_WAYS[way]}: mean probability"
                f" {one['mean_probability']:.1%}, {one['rate']:.1%} match, expected calibration error"
                f" {one['ece']:.1%} ({one['ece_by_chance']:.1%} by chance); on {where}."
            )
    return lines


def _data(run: Run) -> str:
    """The source of the data and the name of its file, without the folders of this machine."""
    data = run.recipe.data
    return data.source + (f" ({Path(data.path).name})" if data.path else "")


def _base_models(model: ModelConfig) -> list[str]:
    """The pre-trained models that are named as on the hub."""
    found = (_BASE_MODEL.fullmatch(name) for name in _shown_once(side.base_model for side in (model.image, model.text)))
    return [one[1] for one in found if one]


def _example(model: ModelConfig) -> tuple[str, str]:
    """A text and an image for the example of a model card."""
    if model.text.reads_embeddings:
        return 'open("embedding-of-a-text.npy", "rb").read()', 'open("embedding-of-a-photo.npy", "rb").read()'
    photo = "regions-of-a-photo.npy" if model.image.reads_regions else "photo.jpg"
    return '"a giraffe", "two people on a bench"', f'open("{photo}", "rb").read()'


def _evaluations(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(split, evaluation) of `sfumato evaluate`, and what an adoption measured."""
    found = [(path, files.read_json(path)) for path in sorted(folder.glob("evaluation-*.json"))]
    named = [(path.stem.removeprefix("evaluation-").removesuffix(f"-{one['distance']}"), one) for path, one in found]
    adopted = files.read_json(folder / ADOPTED)["retrieval"] if (folder / ADOPTED).is_file() else None
    return named + ([("test", adopted)] if adopted and not any(split == "test" for split, _ in named) else [])


def _score(split: str, result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    recalls = [result[way][f"recall@{k}"] for way in _WAYS for k in (1, 5, 10)]
    shown = [f"{100 * value:.1f}" for value in (*recalls, result["rsum"])]
    return [split, result["distance"], str(result["n_images"]), str(result["n_texts"]), *shown]


def _shown_once(names: Iterable[str]) -> list[str]:
    """The distinct non-empty names, without local folders."""
    return list(dict.fromkeys(without_folders(name) for name in names if name))


def _package(config: ModelConfig) -> str:
    """The package to install for a model."""
    extras = sorted(config.image.extras | config.text.extras, reverse=True)
    return f"'sfumato[{','.join(extras)}]'" if extras else "sfumato"


def without_folders(name: str) -> str:
    """A hub name unchanged; for a local folder only its last component, because its path is private."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else Path(name).name


TOLERANCE = 1e-4
"""Largest difference between a graph and torch, in units of the largest number of the embeddings."""


def write_graphs(run: Run, folder: Path) -> dict[str, Any]:
    """Write the graphs of both sides. Returns what config.json says of processors that are not of frozen encoders."""
    with need("onnx", "graphs are written by the package onnx"):
        import onnx  # noqa: F401
    processors = dict[str, Any]()
    for side, name in GRAPHS.items():
        tower, section = getattr(run.model, side), getattr(run.recipe.model, side)
        where = f"{run.folder}: the {side} side, of kind {section.kind!r}"
        processor, network = tower.processor, None
        if section.frozen_backbone and section.extras:
            processor, network = _joint(section.frozen_backbone, side, where, projected=section.projected)
        if not isinstance(processor, FrozenProcessor):
            processors[side] = describe_processor(processor, where)
        if isinstance(processor, EncodedTexts):
            processor.tokenizer.save(str(folder / TOKENIZER))
        store = processor.stack([processor.prepare(item) for item in _probes(processor, side)])
        _write_graph(tower, network, store.batch(np.arange(3)).to(), folder / name, where)
    return processors


def check_graphs(model: TwoTowers, folder: Path) -> float:
    """The largest difference between the embeddings of a folder of graphs and those of torch; an error if it is large.

    It is in units of the largest number of the embeddings.
    """
    graphs, found = load_model(folder).model, 0.0
    for side in GRAPHS:
        items = _probes(getattr(model, side).processor, side)
        for some in ([items[0]], items[1:], items * 2):  # Batches of other sizes and lengths than the traced one.
            ours, theirs = (getattr(one, f"embed_{side}s")(some) for one in (graphs, model))
            for name in ("mean", "log_var"):
                a, b = (as_numpy(getattr(one, name)) for one in (ours, theirs))
                if not np.array_equal(a, b):  # Log variances of points are infinite.
                    found = max(found, float(np.abs(a - b).max() / np.abs(b).max()))
    if not found <= TOLERANCE:
        reason = f"by {found:.1g} of the largest number ({TOLERANCE:g} is allowed); nothing was written"
        raise UserError(f"the graphs embed otherwise than torch, {reason}. Export the run without --onnx")
    return found


def _probes(processor: Processor, side: Side) -> list[Any]:
    """Three items of different sizes; one of the texts is longer than any model reads."""
    random = np.random.default_rng(0)
    if blank := processor.blank():
        shape = regions_from_bytes(blank).shape
        return [regions_to_bytes(random.normal(0, 1, shape).astype(np.float32)) for _ in range(3)]
    if side == "text":
        return ["a", "two dogs run after a red ball on the beach, and a child watches them. " * 99, "a giraffe"]
    return [encode_png(random.integers(0, 256, (3, *size), np.uint8)) for size in ((90, 130), (300, 200), (64, 64))]


class _Traced(nn.Module):
    """A tower as a function of tensors: mean, and log variance unless it makes points."""

    def __init__(self, tower: Tower, network: Callable[..., Tensor] | None, most: int) -> None:
        super().__init__()
        self.network, self.variances = network, tower.variances
        self.encoder, self.head = copy.deepcopy(tower.encoder), copy.deepcopy(tower.head)
        for module in [*self.head.modules()]:
            if isinstance(pool := getattr(module, "pool", None), GPO):
                module.pool = _TabledGPO(pool, most)

    def forward(self, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.network is not None:
            values, mask = self.network(values, mask)[:, None].float(), None
        found = self.head(self.encoder(Inputs(values, mask)).float())
        return (found.mean, found.log_var) if self.variances else (found.mean,)


class _TabledGPO(Pooling):
    """GPO whose weights for each number of tokens, up to the most that an item has, are a table."""

    table: Tensor

    def __init__(self, pool: GPO, most: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.register_buffer("table", pool.weights(torch.arange(1, most + 1)))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(features[..., 0], dtype=torch.bool) if mask is None else mask
        weights = self.table[mask.sum(1) - 1, : features.shape[1]]
        present = features.masked_fill(~mask.unsqueeze(-1), -torch.inf).transpose(1, 2)
        largest = present.sort(dim=-1, descending=True).values
        beyond = torch.arange(features.shape[1]) >= mask.sum(1, keepdim=True)
        return (largest.masked_fill(beyond.unsqueeze(1), 0) @ weights.unsqueeze(-1)).squeeze(-1)


def _write_graph(tower: Tower, network: Callable[..., Tensor] | None, example: Inputs, path: Path, where: str) -> None:
    """Trace a tower; a UserError if torch has no ONNX for one of its operations."""
    with torch.no_grad():
        most = 1 if network else tower.encoder(example).mean.shape[1]
    module = _Traced(tower, network, most).eval()
    given = {"values": example.values} | ({} if example.mask is None else {"mask": example.mask})
    outputs = ["mean", "log_var"][: 1 + module.variances]
    axes = {name: {0: "n"} if value.ndim == 4 else {0: "n", 1: "t"} for name, value in given.items()}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # It prints graphs that fail.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module, tuple(given.values()), str(path), input_names=[*given], output_names=outputs,
                dynamic_axes=axes | {name: {0: "n"} for name in outputs}, opset_version=20, dynamo=False,
            )  # fmt: skip
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"{where}, cannot be written as an ONNX graph by torch.onnx: {first_line(error)}") from error


def _joint(name: str, side: Side, where: str, *, projected: bool) -> tuple[Processor, Callable[..., Tensor]]:
    """One side of a CLIP or SigLIP of transformers: its processor without torch, and its network of what that gives."""
    if not projected or weights.is_open_clip(name):
        can = "Of frozen models only EfficientNet-Lite0, MiniLM and a CLIP or SigLIP of transformers can be exported so"
        raise UserError(f"{where}, is computed by {name}, which cannot be written as an ONNX graph. {can}")
    source, transformers = weights.joint_name(name), weights.import_transformers()
    model = weights.from_pretrained(transformers.AutoModel, source).eval().requires_grad_(False)

    def pooled(found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else found.pooler_output

    if side == "image":
        settings = json.loads(weights.from_pretrained(transformers.AutoImageProcessor, source).to_json_string())
        try:
            size, fit, standard = prepared_images(settings)
        except (KeyError, ValueError) as error:
            raise UserError(f"{where}, prepares images in a way that is known with torch alone: {error}") from error
        pixels = StandardisedPixels(*standard)
        return ImageFileProcessor(size, fit=fit), lambda values, _: pooled(model.get_image_features(pixels(values)))
    kind, length = str(model.config.model_type), int(model.config.text_config.max_position_embeddings)
    pretrained, siglip = weights.pretrained_tokenizer(source, kind), kind.startswith("siglip")
    tokenizer = pretrained.backend_tokenizer
    tokenizer.enable_truncation(length)
    pad = {"pad_id": pretrained.pad_token_id, "pad_token": pretrained.pad_token}
    tokenizer.enable_padding(**pad, length=length if siglip else None)
    return EncodedTexts(tokenizer), lambda ids, mask: pooled(
        model.get_text_features(ids, torch.ones_like(mask) if siglip else mask)
    )
