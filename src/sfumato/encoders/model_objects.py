"""Models that a program holds in memory, written as folders that are loaded by name: sentence-transformers, open_clip.

Only safetensors are written. What the folder makes of a text and of an image is compared with the object.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save as safetensors_bytes

from sfumato.data.transforms import encode_png
from sfumato.encoders.joint import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, import_open_clip, joint_image, joint_text
from sfumato.errors import UserError
from sfumato.files import write_atomically, write_json
from sfumato.ids import Side

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
    sides: tuple[tuple[Side, Any, Any, Any], ...] = (
        ("text", joint_text, _TEXT, _TEXT),
        ("image", joint_image, encode_png(pixels), Image.fromarray(pixels.transpose(1, 2, 0))),
    )
    was_training = network.training
    network.eval()
    for side, load, stored, held in sides:
        with torch.inference_mode():
            expected = np.ravel(embed[side](held))
        loaded = np.ravel(load(str(folder))([stored])[0])
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
