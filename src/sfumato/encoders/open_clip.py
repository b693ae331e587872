"""The joint embeddings of open_clip's models, as they are (extra ``open-clip``).

A model is a folder of the hub's layout: ``open_clip_config.json`` beside ``open_clip_model.safetensors``. Weights that
come only as a pickle are refused.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from sfumato.data.image_decoding import decode_image
from sfumato.encoders.package_weights import hub_reachable, model_hash
from sfumato.encoders.precision import Precision, number_format
from sfumato.errors import UserError

PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""

_CONFIG, _WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def is_open_clip(name: str) -> bool:
    """Whether a name is that of a model of open_clip."""
    return name.startswith(PREFIXES) or ((Path(name) / _CONFIG).is_file() and not (Path(name) / "config.json").exists())


def import_open_clip() -> Any:
    """Import the package open_clip."""
    try:
        import open_clip
    except ImportError as error:
        raise UserError("models of open_clip need its package: pip install 'sfumato[open-clip]'") from error
    except RuntimeError as error:
        raise UserError(
            f"open_clip cannot be imported: {str(error).splitlines()[0]}. It needs a torchvision that was built for the"
            f" installed torch {torch.__version__}; install both from the same index"
        ) from error
    return open_clip


class _OpenClip:
    """One side of a model of open_clip; its features are one token, in float32."""

    feature_dtype = "float32"

    def __init__(self, name: str, precision: Precision, side: str) -> None:
        package = import_open_clip()
        self.name, self._dtype = name, number_format(precision)
        self._source = f"local-dir:{_folder(name, package)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = package.create_model(self._source, require_pretrained=True)
            except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"cannot load {name!r} with open_clip {package.__version__}: {reason}") from error
        of_precision = "" if precision == "float32" else f" {self._dtype}"
        self.fingerprint = f"open_clip joint {side} {model_hash(model, name)}{of_precision}"
        self._model, self._package = model.eval().to(self._dtype), package
        self.channels = 0

    def _features(self, values: Tensor) -> list[np.ndarray]:
        return list(values.float().unsqueeze(1).cpu().numpy())


class OpenClipImage(_OpenClip):
    """The image side of a model of open_clip, with the model's own preprocessing."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "image")
        prepared = self._model.visual.preprocess_cfg
        settings = self._package.transform.PreprocessCfg(**prepared)
        self._prepare = self._package.transform.image_transform_v2(settings, is_train=False)
        self.fingerprint += f" processor={json.dumps(prepared, sort_keys=True)}"
        self.channels = self._of([Image.new("RGB", (64, 64), "white")])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (1, c) float32 features of each."""
        return self._of([Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items])

    def _of(self, images: Sequence[Image.Image]) -> list[np.ndarray]:
        pixels = torch.stack([self._prepare(image) for image in images]).to(self._dtype)
        with torch.inference_mode():
            return self._features(self._model.encode_image(pixels))


class OpenClipText(_OpenClip):
    """The text side of a model of open_clip; texts longer than its context are cut."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "text")
        try:
            self._tokenizer = self._package.get_tokenizer(self._source)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error
        self.channels = self(["a"])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (1, c) float32 features of each."""
        with torch.inference_mode():
            return self._features(self._model.encode_text(self._tokenizer(list(items))))

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        if inner := getattr(self._tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return [len(ids) for ids in inner(list(words), add_special_tokens=False)["input_ids"]] if words else []
        return [len(self._tokenizer.encode(word)) for word in words]


def _folder(name: str, package: Any) -> Path:
    """The local folder of a model; one of the hub is downloaded into the hub's cache."""
    folder = Path(name)
    if not name.startswith(PREFIXES):
        if not (folder / _WEIGHTS).is_file():
            raise UserError(f"{folder} has no {_WEIGHTS}; other weights are pickles, which sfumato does not load")
        return folder.resolve()
    repository = name.split(":", 1)[1]
    architecture, _, tag = repository.partition("/")
    if published := package.get_pretrained_cfg(architecture, tag):
        repository = str(published["hf_hub"]).rstrip("/")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reachable = hub_reachable()
    try:
        found = Path(
            snapshot_download(
                repository,
                allow_patterns=[_CONFIG, _WEIGHTS, "*token*", "vocab*", "merges.txt", "*.model"],
                local_files_only=not reachable,
            )
        )
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot load {name!r}: there is no connection to the hub, and no copy in its cache. Give a local folder"
            f" with {_CONFIG} and {_WEIGHTS}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"cannot load {name!r}: the hub has no {repository!r} that you may read. A name is"
            " open_clip:ARCHITECTURE/TAG, as open_clip.list_pretrained() has them, or hf-hub:OWNER/NAME"
        ) from error
    if missing := [file for file in (_CONFIG, _WEIGHTS) if not (found / file).is_file()]:
        raise UserError(f"{repository!r} has no {missing[0]} on the hub or in its cache; it cannot be loaded safely")
    return found
