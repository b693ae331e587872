"""Images as callers give them (paths, bytes, arrays, Pillow images) as sources of the bytes of image files."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
from PIL import Image, ImageOps

from sfumato.data.images import FileImage, ImageSource, MemoryImage
from sfumato.data.region_files import regions_to_bytes
from sfumato.errors import UserError

ImageInput = Union[str, "os.PathLike[str]", bytes, Image.Image, np.ndarray]
"""An image: the path of a file, its bytes, a Pillow image, or (h, w), (h, w, 3) or (h, w, 4) pixels in uint8. For a
model that reads features, a path or the bytes of a .npy file, or an array of floating numbers."""


_LOSSLESS_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


_CHANNELS = (3, 4)


def image_sources(images: Sequence[ImageInput], who: str, *, features: str = "") -> list[ImageSource]:
    """Images as sources of the bytes of image files. Nothing is read from disk yet."""
    one = isinstance(images, str | bytes | os.PathLike | Image.Image)
    if not one and not hasattr(images, "__getitem__") and hasattr(images, "__iter__"):
        raise TypeError(f"{who}: got a {type(images).__name__}, expected a list of images: list(images)")
    if one or not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        raise TypeError(f"{who}: got one {type(images).__name__}, expected a list of images: [image]")
    expected = 1 if features else 3
    if (ndim := getattr(images, "ndim", None)) is not None and ndim <= expected:
        shape = tuple(getattr(images, "shape", ()))
        raise ValueError(
            f"{who}: got one array of shape {shape}, expected a batch: a batch of one is {(1, *shape)}, or a list"
        )
    return [_source(image, f"image {i}", who, features) for i, image in enumerate(images)]


def _source(image: ImageInput, name: str, who: str, features: str) -> ImageSource:
    if isinstance(image, bytes):
        return MemoryImage(name, image)
    if isinstance(image, str | os.PathLike):
        return FileImage(Path(image))
    if features:
        return MemoryImage(name, vector_file(image, f"{who}: {name}", features))
    if isinstance(image, Image.Image):
        return _Encoded(name, lambda: _pillow_file(image))
    array = np.asarray(image) if hasattr(image, "__array__") else None
    if array is None:
        raise TypeError(
            f"{who}: {name} is a {type(image).__name__}; expected a path, the bytes of a file, a Pillow image or an"
            " array of uint8"
        )
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)):
        raise ValueError(
            f"{who}: {name} has pixels of shape {array.shape} in {array.dtype}; expected (h, w), (h, w, 3) or"
            " (h, w, 4) in uint8 from 0 to 255"
        )
    return _Encoded(name, lambda: _pillow_file(Image.fromarray(array)))


class _Encoded:
    """An image in memory that is encoded when it is read."""

    def __init__(self, location: str, encode: Callable[[], bytes]) -> None:
        self.location, self._encode = location, encode

    def read_bytes(self) -> bytes:
        return self._encode()


def _pillow_file(image: Image.Image) -> bytes:
    """The bytes of a lossless file with the pixels of an image, upright."""
    upright, file = ImageOps.exif_transpose(image), io.BytesIO()
    if upright.mode in _LOSSLESS_PNG:
        upright.save(file, "PNG", compress_level=0)
    else:
        upright.save(file, "TIFF")  # It keeps numbers of 32 bits and the channels of prints.
    return file.getvalue()


def vector_file(vector: Any, name: str, features: str) -> bytes:
    """An array as the bytes of a .npy file, for a model that reads features. vector (c,)."""
    value = vector.detach().cpu() if hasattr(vector, "detach") else vector
    array = np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, Image.Image) else None
    if array is None:
        raise TypeError(f"{name} is a {type(vector).__name__}, but this model reads {features}; give an array of them")
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name} has shape {array.shape} in {array.dtype}; expected {features}: floating numbers")
    return regions_to_bytes(np.atleast_2d(array))


def unreadable(source: ImageSource, error: Exception) -> UserError:
    """The error of an image that cannot be used."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"there is no image {source.location}")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(f"{source.location}: {reason}")
