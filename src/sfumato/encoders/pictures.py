"""Pictures that are decoded when a batch needs them: for training from pixels on data that do not fit in memory.

Pillow decodes and resizes without holding the interpreter's lock, so threads are enough. What is random depends on a seed, the
step and the place in the batch, never on which thread was faster.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sfumato.data.transforms import Fit, check_fit, check_image, decode_image, random_crop_box
from sfumato.encoders.dual import Item, OnError, Progress
from sfumato.encoders.features import Inputs

_CHECKED_TOGETHER = 512


class PictureStore:
    """Encoded pictures, decoded batch by batch; only the batch is in memory.

    Args:
        items: for each picture, a function that returns its bytes; called from several threads, every time it is needed.
        size: side of the square pictures in pixels.
        fit: how a picture becomes a square outside of training; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest share of either side that a training crop keeps.
        workers: threads that decode; None for as many as this process has processors.

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
        workers = processors() if workers is None else workers
        for name, value in (("size", size), ("workers", workers)):
            if value < 1:
                raise ValueError(f"PictureStore: {name} must be at least 1, got {value}")
        if not 0 < crop_low <= 1:
            raise ValueError(f"PictureStore: crop_low must be in (0, 1], got {crop_low}")
        self.items, self.size, self.fit, self.crop_low, self.workers = items, size, fit, crop_low, workers

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: np.ndarray) -> Inputs:
        """The pictures at (n,) positions, as evaluation sees them.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: a picture can no longer be read or decoded; the message names its position.
        """
        return self._decoded(index, lambda place, data: decode_image(data, self.size, fit=self.fit))

    def training_batch(self, index: np.ndarray, seed_key: Sequence[int]) -> Inputs:
        """The pictures at (n,) positions with the random geometry of PCME++'s training.

        Each is cut to a part of it (:func:`sfumato.data.transforms.random_crop_box`), resized to the square whatever its aspect,
        and mirrored with probability 1/2.

        Args:
            index: (n,) positions.
            seed_key: what the batch's randomness depends on, e.g. (seed, epoch, step, rank), none negative. The picture at
                place i of the batch draws from ``numpy.random.default_rng([*seed_key, i])``.

        Returns:
            (n, 3, size, size) uint8 pixels.

        Raises:
            OSError: a picture can no longer be read or decoded; the message names its position.

        Source: https://github.com/naver-ai/pcmepp, which resizes bilinearly; here it is bicubic, as in evaluation.
        """

        randoms = [np.random.default_rng([*seed_key, place]) for place in range(len(index))]

        def decode(place: int, data: bytes) -> np.ndarray:
            pixels = decode_image(data, self.size, crop=random_crop_box(randoms[place], self.crop_low))
            return pixels[:, :, ::-1] if randoms[place].random() < 0.5 else pixels

        return self._decoded(index, decode)

    def _decoded(self, index: np.ndarray, decode: Callable[[int, bytes], np.ndarray]) -> Inputs:
        """decode(place in the batch, bytes) of every picture, in threads."""
        pixels = np.empty((len(index), 3, self.size, self.size), np.uint8)

        def fill(place: int) -> None:
            position = int(index[place])
            try:
                pixels[place] = decode(place, _bytes(self.items[position]))
            except (ValueError, OSError) as error:
                raise OSError(
                    f"the picture at position {position} can no longer be read: {error}. It could when the data were checked;"
                    " has the file changed, or its disk gone?"
                ) from error

        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(fill, range(len(index))):
                pass
        return Inputs(torch.from_numpy(pixels))


class PictureReader:
    """Checks pictures once and leaves them where they are, to be decoded batch by batch.

    Args:
        size: side of the square pictures in pixels.
        fit: how a picture becomes a square; see :func:`sfumato.data.transforms.decode_image`.
        crop_low: smallest share of either side that a training crop keeps.
        workers: threads that check and decode; None for as many as this process has processors.

    Raises:
        ValueError: as :class:`PictureStore`.
    """

    def __init__(self, size: int, *, fit: Fit = "squash", crop_low: float = 0.6, workers: int | None = None) -> None:
        store = PictureStore([], size, fit=fit, crop_low=crop_low, workers=workers)  # Refuses what makes no sense, now.
        self.size, self.fit, self.crop_low, self.workers = size, fit, crop_low, store.workers

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[PictureStore, np.ndarray]:
        """See :class:`sfumato.encoders.dual.Reader`; every file is read once, and no picture is kept."""

        def check(position: int) -> Exception | None:
            try:
                check_image(_bytes(items[position]))
            except (ValueError, OSError) as error:
                return error
            return None

        kept: list[int] = []
        with ThreadPoolExecutor(self.workers) as pool:
            # In parts: the pool would hold a task for each of millions.
            for start in range(0, len(items), _CHECKED_TOGETHER):
                part = range(start, min(start + _CHECKED_TOGETHER, len(items)))
                for position, error in zip(part, pool.map(check, part), strict=True):
                    if error is None:
                        kept.append(position)
                    elif on_error is None:
                        raise error
                    else:
                        on_error(position, error)
                    if progress:
                        progress(1)
        store = PictureStore(
            [items[i] for i in kept], self.size, fit=self.fit, crop_low=self.crop_low, workers=self.workers
        )
        return store, np.array(kept, dtype=np.int64)


def _bytes(item: Item) -> bytes:
    data = item()
    return data if isinstance(data, bytes) else data.encode()


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
