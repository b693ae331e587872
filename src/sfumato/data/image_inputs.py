"""Images as callers give them (paths, bytes, arrays, Pillow images) as sources of the bytes of image files.

Features of an image are an array of (r, c) numbers, and their bytes those of a .npy file.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, Union

import numpy as np
from PIL import Image, ImageOps

from sfumato.data.images import FileImage, ImageSource, LazyImage, MemoryImage
from sfumato.errors import UserError, first_line

ImageInput = Union[str, "os.PathLike[str]", bytes, Image.Image, np.ndarray]
"""An image: the path of a file, its bytes, a Pillow image, or (h, w), (h, w, 3) or (h, w, 4) pixels in uint8. For a
model that reads features, a path or the bytes of a .npy file, or an array of floating numbers."""


_LOSSLESS_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


FLOATS = (np.float16, np.float32, np.float64)
"""Types of the numbers of features."""


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
        raise ValueError(f"{who}: got one array of shape {shape}; a batch of one is {(1, *shape)}, or a list")
    return [_source(image, f"image {i}", who, features) for i, image in enumerate(images)]


def _source(image: ImageInput, name: str, who: str, features: str) -> ImageSource:
    if isinstance(image, bytes):
        return MemoryImage(name, image)
    if isinstance(image, str | os.PathLike):
        return FileImage(Path(image))
    if features:
        return MemoryImage(name, vector_file(image, f"{who}: {name}", features))
    if isinstance(image, Image.Image):
        return LazyImage(name, lambda: _pillow_file(image))
    array = np.asarray(image) if hasattr(image, "__array__") else None
    if array is None:
        expected = "a path, the bytes of a file, a Pillow image or an array of uint8"
        raise TypeError(f"{who}: {name} is a {type(image).__name__}; expected {expected}")
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        form = "(h, w), (h, w, 1), (h, w, 3) or (h, w, 4) in uint8 from 0 to 255"
        raise ValueError(f"{who}: {name} has pixels of shape {array.shape} in {array.dtype}; expected {form}")
    pixels = array[..., 0] if array.shape[2:] == (1,) else array
    return LazyImage(name, lambda: _pillow_file(Image.fromarray(pixels)))


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


def load_array(source: Path | IO[bytes], mode: Literal["r", "c"] | None = None) -> np.ndarray:
    """The array of a .npy file, with a mode memory-mapped: its header may claim more than the memory holds."""
    try:
        with np.errstate(over="ignore"):  # Of the sizes in a damaged header.
            array = np.load(source, mmap_mode=mode, allow_pickle=False)
    except Exception as error:  # numpy lets through what parsing the header raises, also MemoryError and TokenError.
        if "pickle" in str(error) or "Object arrays" in str(error) or "Python objects" in str(error):
            reason = "holds pickled Python objects, which can run code when read; save plain numbers with numpy.save"
            raise ValueError(reason) from error
        raise ValueError(f"not a complete .npy file ({first_line(error)})") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("an archive of several arrays; save one array with numpy.save")
    return array


REGION_ENDINGS = frozenset({".npy"})
"""File name endings that count as region features when a folder is searched through."""


def regions_to_bytes(features: np.ndarray) -> bytes:
    """Features as the bytes of a .npy file, the inverse of :func:`regions_from_bytes`. features (r, c)."""
    file = io.BytesIO()
    np.lib.format.write_array(file, features, allow_pickle=False)
    return file.getvalue()


def regions_from_bytes(data: bytes, channels: int | None = None) -> np.ndarray:
    """Read the features of one image from the bytes of a .npy file; pickled data is refused. data (r, c) -> (r, c)."""
    if not data.startswith(b"\x93NUMPY"):
        way = "`python -m papers regions` makes them from images"
        raise ValueError(f"not a .npy file: region features are expected here, not an image; {way}")
    array = load_array(io.BytesIO(data))
    if array.dtype.newbyteorder("=") not in FLOATS or array.ndim not in (1, 2) or not array.size:
        form = "the (regions, channels) of one image in float32 or float16"
        raise ValueError(f"holds {array.dtype} of shape {array.shape}; expected {form}")
    with np.errstate(over="ignore"):  # Numbers that are too large for float32 become infinity, and are refused below.
        features: np.ndarray = array.reshape(-1, array.shape[-1]).astype(np.float32)
    if channels is not None and features.shape[1] != channels:
        raise ValueError(f"has {features.shape[1]} channels; the model reads {channels} (model.image.channels)")
    if not np.isfinite(features).all():
        raise ValueError("holds NaN or infinity")
    return features
