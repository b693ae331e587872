"""A run as ONNX graphs, which need no torch: one a side, from what its processor gives to mean and log variance.

Frozen encoders of the package are not in the graphs, since every installation has them. A CLIP or SigLIP of
transformers whose joint embeddings a run takes is in them.
"""

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.arrays import as_numpy
from sfumato.data.image_decoding import encode_png
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.encoders import package_weights as weights
from sfumato.encoders.backbones import GRAPHS, EncodedTexts, describe_processor, prepared_images
from sfumato.encoders.encoder_protocol import Inputs, Processor, TwoTowers
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.heads import GPO, Pooling
from sfumato.encoders.processors import ImageFileProcessor
from sfumato.encoders.scratch import StandardisedPixels
from sfumato.encoders.towers import Tower
from sfumato.errors import UserError, first_line, need
from sfumato.files import TOKENIZER
from sfumato.ids import Side
from sfumato.models.run import Run, load_model

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
        _write(tower, network, store.batch(np.arange(3)).to(), folder / name, where)
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


def _write(tower: Tower, network: Callable[..., Tensor] | None, example: Inputs, path: Path, where: str) -> None:
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
    pretrained, length = weights.pretrained_tokenizer(source), int(model.config.text_config.max_position_embeddings)
    tokenizer, siglip = pretrained.backend_tokenizer, str(model.config.model_type).startswith("siglip")
    tokenizer.enable_truncation(length)
    pad = {"pad_id": pretrained.pad_token_id, "pad_token": pretrained.pad_token}
    tokenizer.enable_padding(**pad, length=length if siglip else None)
    return EncodedTexts(tokenizer), lambda ids, mask: pooled(model.get_text_features(ids, mask))
