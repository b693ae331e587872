"""The joint embeddings of CLIP and SigLIP models, as they are: after their projections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.data.image_decoding import decode_image
from sfumato.encoders.features import FrozenBackbone
from sfumato.encoders.open_clip import OpenClipImage, OpenClipText, is_open_clip
from sfumato.encoders.package_weights import from_pretrained, import_transformers, model_hash, pretrained_tokenizer
from sfumato.encoders.precision import Precision, number_format
from sfumato.errors import UserError


class _Joint:
    """One side of a dual encoder of transformers; its features are one token, in float32."""

    feature_dtype = "float32"

    def __init__(self, name: str, precision: Precision, wanted: str, other: str) -> None:
        self.name, self._dtype = joint_name(name), number_format(precision)
        model = from_pretrained(import_transformers().AutoModel, self.name)
        self._embed = getattr(model, wanted, None)
        if self._embed is None:
            raise UserError(
                f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts; give a CLIP"
                " or SigLIP model, or train heads on its features: sfumato train own-pictures"
            )
        of_precision = "" if precision == "float32" else f" {self._dtype}"
        self.fingerprint = f"transformers joint {other} {model_hash(model, self.name)}{of_precision}"
        self._model = model.eval().to(self._dtype)
        self.channels = 0

    def _features(self, inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
        with torch.inference_mode():
            found = self._embed(**inputs)  # type: ignore[misc]
        # Newer versions of transformers return an output with the embedding as its pooled part.
        values: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return list(values.float().unsqueeze(1).cpu().numpy())


class JointImage(_Joint):
    """The image side of CLIP or SigLIP, with the model's own preprocessing."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "get_image_features", "image")
        self._processor = from_pretrained(import_transformers().AutoImageProcessor, self.name)
        self.fingerprint += f" processor={self._processor.to_json_string()}"
        self.channels = self._of([Image.new("RGB", (64, 64), "white")])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (1, c) float32 features of each."""
        return self._of([Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items])

    def _of(self, images: Sequence[Image.Image]) -> list[np.ndarray]:
        pixels = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return self._features({"pixel_values": pixels.to(self._dtype)})


class JointText(_Joint):
    """The text side of CLIP or SigLIP; texts longer than its context are cut."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "get_text_features", "text")
        self._tokenizer = pretrained_tokenizer(self.name)
        config = self._model.config
        # SigLIP was trained on texts that are padded to its whole context.
        self._padding = "max_length" if str(config.model_type).startswith("siglip") else True
        self._length = int(config.text_config.max_position_embeddings)
        self.channels = self(["a"])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (1, c) float32 features of each."""
        tokens = self._tokenizer(
            list(items), padding=self._padding, truncation=True, max_length=self._length, return_tensors="pt"
        )
        return self._features({k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")})

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        found = self._tokenizer(list(words), add_special_tokens=False)["input_ids"] if words else []
        return [len(ids) for ids in found]


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def joint_image(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The image side of a CLIP or SigLIP model of transformers, or of a model of open_clip."""
    return (OpenClipImage if is_open_clip(name) else JointImage)(name, precision=precision)


def joint_text(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The text side of the model, see :func:`joint_image`."""
    return (OpenClipText if is_open_clip(name) else JointText)(name, precision=precision)
