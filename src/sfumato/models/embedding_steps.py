"""The embedding of single items: the digest of a model, its input files, and its two steps."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from sfumato.data.region_features import REGION_ENDINGS, regions_from_bytes
from sfumato.data.transforms import IMAGE_ENDINGS, check_image, decode_image
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.features import PixelStore, RaggedStore
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.image_processors import ImageFileProcessor, PixelProcessor
from sfumato.encoders.regions import RegionProcessor, stacked, uses_regions
from sfumato.gaussian import GaussianEmbedding


def file_endings(model: DualEncoder) -> frozenset[str]:
    """File name endings of what a model embeds on its image side: images, or region features.

    Args:
        model: images and texts to Gaussians.

    Returns:
        The endings in lower case, with the dot.
    """
    return REGION_ENDINGS if uses_regions(model) else IMAGE_ENDINGS


def model_digest(model: DualEncoder) -> str:
    """The SHA-256 of a model's weights and of its processor and head settings, independent of its path and device.

    Args:
        model: images and texts to Gaussians.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for part in (model.image.processor, model.image.head, model.text.processor, model.text.head):
        digest.update(type(part).__name__.encode())
        known = {"backbone": part.backbone.fingerprint} if isinstance(part, FrozenProcessor) else vars(part)
        for key, value in sorted(known.items()):
            if key.startswith("_") or key in ("training", "workers"):
                continue
            if isinstance(value, Tokenizer):
                digest.update(value.to_str().encode())
            elif isinstance(value, int | str):
                digest.update(f"{key}={value}".encode())
    return digest.hexdigest()


def embedding_steps(
    tower: Tower, modality: str
) -> tuple[Callable[[bytes | str], Any], Callable[[list[Any]], GaussianEmbedding]]:
    """The two steps that embed items batch by batch; frozen backbones do not use their cache on disk.

    Args:
        tower: of images or texts.
        modality: "images" or "texts".

    Returns:
        (prepare, encode). ``prepare``, for worker threads, converts the bytes of an image, or a text, to the input of
        the encoder; ``encode`` converts a list of n inputs to (n, d) embeddings.
    """
    processor = tower.processor
    if isinstance(processor, FrozenProcessor):
        backbone = processor.backbone

        def features(values: list[Any]) -> GaussianEmbedding:
            found = backbone(values)
            lengths = np.array([len(item) for item in found], dtype=np.int64)
            store = RaggedStore(np.concatenate(found), np.cumsum(lengths) - lengths, lengths)
            return tower.embed(store, batch_size=len(values))

        return _checked if modality == "images" else _same, features

    if isinstance(processor, RegionProcessor):
        channels = processor.channels

        def regions(values: list[Any]) -> GaussianEmbedding:
            return tower.embed(stacked(values, channels), batch_size=len(values))

        return partial(_regions, channels), regions

    def texts(values: list[Any]) -> GaussianEmbedding:
        store, _ = processor.read([partial(_same, value) for value in values])
        return tower.embed(store, batch_size=len(values))

    def pixels(values: list[Any]) -> GaussianEmbedding:
        return tower.embed(PixelStore(torch.from_numpy(np.stack(values))), batch_size=len(values))

    def decoded(data: bytes | str) -> Any:
        assert isinstance(data, bytes)
        if isinstance(processor, PixelProcessor | ImageFileProcessor):
            return decode_image(data, processor.size, fit=processor.fit)
        store, _ = processor.read([lambda: data])
        return store.batch(np.zeros(1, np.int64)).values[0].numpy()

    return (_same, texts) if modality == "texts" else (decoded, pixels)


def _regions(channels: int, data: bytes | str) -> np.ndarray:
    assert isinstance(data, bytes)
    return regions_from_bytes(data, channels)


def _checked(data: bytes | str) -> bytes | str:
    assert isinstance(data, bytes)
    check_image(data)
    return data


def _same(data: bytes | str) -> bytes | str:
    return data
