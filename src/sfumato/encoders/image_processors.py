"""Image processors: files are decoded once and kept in memory, or decoded batch by batch."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from sfumato.data.transforms import Fit, check_fit, check_image, decode_image, random_crop_box
from sfumato.encoders.encoder_protocol import Item, OnError, Progress, item_bytes
from sfumato.encoders.features import Inputs, PixelStore, Store


class PixelProcessor:
    """Decodes images to squares of one size, once, and keeps the pixels in memory.

    Args:
        size: side in pixels.
        fit: "squash" or "crop", see :func:`~sfumato.data.transforms.decode_image`.
    """

    def __init__(self, size: int, *, fit: Fit = "squash") -> None:
        self.size, self.fit = size, fit

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`."""
        pixels = np.empty((len(items), 3, self.size, self.size), np.uint8)
        errors: dict[int, Exception] = {}

        def decode(position: int) -> None:
            try:
                pixels[position] = decode_image(item_bytes(items[position]), self.size, fit=self.fit)
            except (ValueError, OSError) as error:
                errors[position] = error

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(decode, range(len(items))):
                if progress:
                    progress(1)
        for position in sorted(errors):
            if on_error is None:
                raise errors[position]
            on_error(position, errors[position])
        kept = np.array([i for i in range(len(items)) if i not in errors], dtype=np.int64)
        return PixelStore(torch.from_numpy(pixels if not errors else pixels[kept])), kept


_BLOCK = 512


class ImageFileStore:
    """Image files, decoded batch by batch; only the batch is in memory.

    Args:
        items: for each image, a function that returns its bytes. It is called whenever the image is needed, from
            several threads.
        size: side of the square images in pixels.
        fit: how an image becomes a square outside of training; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest fraction of either side that a training crop keeps.
        workers: number of threads that decode; None: one for each CPU that this process may use.

    Raises:
        ValueError: size or workers are less than 1, fit is unknown, or crop_low is not in (0, 1].
    """

    def __init__(
        self,
        items: Sequence[Item],
        size: int,
        *,
        fit: Fit = "squash",
        crop_low: float = 0.6,
        workers: int | None = None,
    ) -> None:
        check_fit(fit)
        workers = available_cpus() if workers is None else workers
        for name, value in (("size", size), ("workers", workers)):
            if value < 1:
                raise ValueError(f"ImageFileStore: {name} must be at least 1, got {value}")
        if not 0 < crop_low <= 1:
            raise ValueError(f"ImageFileStore: crop_low must be in (0, 1], got {crop_low}")
        self.items, self.size, self.fit, self.crop_low, self.workers = items, size, fit, crop_low, workers

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> Inputs:
        """The images at some positions, without random changes.

        Args:
            index: (n,) positions.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: an image can no longer be read or decoded; the message names its position.
        """
        return self._decoded(index, lambda _, data: decode_image(data, self.size, fit=self.fit))

    def training_batch(self, index: np.ndarray, seed_key: Sequence[int]) -> Inputs:
        """The images at some positions with the random geometry of PCME++'s training.

        Each image is cut to a random box (:func:`sfumato.data.transforms.random_crop_box`), resized to the square
        without keeping its aspect ratio, and mirrored with probability 1/2.

        Args:
            index: (n,) positions.
            seed_key: numbers >= 0 that determine all random choices of the batch, e.g. (seed, epoch, step, rank). Image
                i of the batch has the generator ``numpy.random.default_rng([*seed_key, i])``.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: an image can no longer be read or decoded; the message names its position.

        Source: https://github.com/naver-ai/pcmepp, which resizes bilinearly; here it is bicubic, as in evaluation.
        """
        generators = [np.random.default_rng([*seed_key, i]) for i in range(len(index))]

        def decode(i: int, data: bytes) -> np.ndarray:
            pixels = decode_image(data, self.size, crop=random_crop_box(generators[i], self.crop_low))
            return pixels[:, :, ::-1] if generators[i].random() < 0.5 else pixels

        return self._decoded(index, decode)

    def _decoded(self, index: np.ndarray, decode: Callable[[int, bytes], np.ndarray]) -> Inputs:
        """decode(number in the batch, bytes) of every image, in threads."""
        pixels = np.empty((len(index), 3, self.size, self.size), np.uint8)

        def fill(i: int) -> None:
            position = int(index[i])
            try:
                pixels[i] = decode(i, item_bytes(self.items[position]))
            except (ValueError, OSError) as error:
                raise OSError(
                    f"the image at position {position} can no longer be read: {error}. It was readable when the data"
                    " were checked. Check that the file is unchanged and that its disk is mounted"
                ) from error

        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(fill, range(len(index))):
                pass
        return Inputs(torch.from_numpy(pixels))


class ImageFileProcessor:
    """Checks image files once and leaves them on disk; each batch is decoded when it is needed.

    Args:
        size: side of the square images in pixels.
        fit: how an image becomes a square; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest fraction of either side that a training crop keeps.
        workers: number of threads that check and decode; None: one for each CPU that this process may use.

    Raises:
        ValueError: as :class:`ImageFileStore`.
    """

    def __init__(self, size: int, *, fit: Fit = "squash", crop_low: float = 0.6, workers: int | None = None) -> None:
        # The store checks the arguments: a wrong one is refused now, not after the data were read.
        store = ImageFileStore([], size, fit=fit, crop_low=crop_low, workers=workers)
        self.size, self.fit, self.crop_low, self.workers = size, fit, crop_low, store.workers

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[ImageFileStore, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`. Every file is read once; no pixels are kept."""

        def check(position: int) -> Exception | None:
            try:
                check_image(item_bytes(items[position]))
            except (ValueError, OSError) as error:
                return error
            return None

        kept: list[int] = []
        with ThreadPoolExecutor(self.workers) as pool:
            # In blocks: the pool would hold a task for each of millions of files.
            for start in range(0, len(items), _BLOCK):
                block = range(start, min(start + _BLOCK, len(items)))
                for position, error in zip(block, pool.map(check, block), strict=True):
                    if error is None:
                        kept.append(position)
                    elif on_error is None:
                        raise error
                    else:
                        on_error(position, error)
                    if progress:
                        progress(1)
        store = ImageFileStore(
            [items[i] for i in kept], self.size, fit=self.fit, crop_low=self.crop_low, workers=self.workers
        )
        return store, np.array(kept, dtype=np.int64)


def available_cpus() -> int:
    """Number of CPUs that this process may use.

    Returns:
        At least 1.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BilinearProcessor:
    """Images resized as in PCME++'s training code: to a square, bilinearly, without smoothing.

    Args:
        size: side in pixels.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._squares = ImageFileProcessor(size)

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`."""
        return self._squares.read([self._square(item) for item in items], progress=progress, on_error=on_error)

    def _square(self, item: Item) -> Item:
        """The image at its final size, in a lossless format."""

        def read() -> bytes:
            pixels = torch.from_numpy(decode_image(item_bytes(item), None)).float()
            square = functional.interpolate(pixels[None], size=(self.size, self.size), mode="bilinear")[0]
            buffer = io.BytesIO()
            Image.fromarray(square.round().byte().permute(1, 2, 0).numpy()).save(buffer, "BMP")
            return buffer.getvalue()

        return read
