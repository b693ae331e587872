"""What a model is: two encoders into one space, a distance, and match probabilities."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.data.image_inputs import ImageInput, image_sources, unreadable, vector_file
from sfumato.distances import Distance, get_distance
from sfumato.encoders.dual import DualEncoder, piece_counter
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import MATCH_PROBABILITY, SampledLogits, match_probability, match_probability_distance
from sfumato.models.unfamiliar import UnfamiliarTexts


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model that embeds and matches: trained, adopted, exported or published.

    Attributes:
        model: the dual encoder, in evaluation mode.
        distance: name in DISTANCES of the distance of the logits.
        logit_scale, logit_bias: match probability = sigmoid(logit_bias - logit_scale * distance).
        source: folder, file or name that it was loaded from.
        kind: what it is, in words.
        calibrated: whether the logits were fitted on held-out pairs; logits learnt by a loss were not.
        calibration: everything that was fitted on held-out pairs; None if nothing was.
        unfamiliar: tells texts of words from made-up ones; None if the training had no texts, or too few.
        sampled_logits: those of PCME's match probability, if the model learnt it; None for all others.
    """

    model: DualEncoder
    distance: str
    logit_scale: float
    logit_bias: float
    source: str = ""
    kind: str = ""
    calibrated: bool = False
    calibration: Calibration | None = None
    unfamiliar: UnfamiliarTexts | None = None
    sampled_logits: SampledLogits | None = None

    def __repr__(self) -> str:
        state = "calibrated" if self.calibrated else "not calibrated"
        kind = f"{self.kind}, " if self.kind else ""
        return f"{type(self).__name__}({self.source!r}, {kind}{self.distance}, {state})"

    def embed_images(self, images: Sequence[ImageInput], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed images.

        Args:
            images: n paths, bytes of image files, Pillow images or arrays of uint8 pixels, also mixed; of a model that
                reads features, n arrays of them, or .npy files.
            batch_size: number of images at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            UserError: an image is missing or cannot be read; the message has its path or its number.
            TypeError: images is a single one, or one has another type.
            ValueError: there are none, or an array has another shape or dtype.
        """
        tower = self.model.image
        sources = image_sources(images, "embed_images", features=tower.processor.reads)
        if not sources:
            raise ValueError("embed_images: got no images, expected at least one")
        errors: list[UserError] = []
        store, _ = tower.processor.read(
            [source.read_bytes for source in sources],
            on_error=lambda i, error: errors.append(unreadable(sources[i], error)),
        )
        if errors:
            raise errors[0]
        return tower.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[Any], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed texts.

        Args:
            texts: n texts; of a model that reads embeddings, n vectors (c,), or n .npy files by path or bytes.
            batch_size: number of texts at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            UserError: the model has no encoder for texts.
            TypeError: texts is a single one, or one is no text.
            ValueError: there are none.
        """
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        texts, reads = list(texts), self.model.text.processor.reads
        if not texts:
            raise ValueError("embed_texts: got no texts, expected at least one")
        for i, text in enumerate(texts):
            if reads and isinstance(text, str):
                raise UserError(
                    f"this model reads {reads} and has no encoder for texts such as {text[:40]!r}; give an array of"
                    " them, or search an index by an item: Searcher.search_items"
                )
            if reads and isinstance(text, os.PathLike):
                texts[i] = Path(text).read_bytes()
            elif reads and not isinstance(text, bytes):
                texts[i] = vector_file(text, f"embed_texts: text {i}", reads)
            elif not reads and not isinstance(text, str):
                raise TypeError(f"embed_texts: text {i} is a {type(text).__name__}, expected a string")
        return self.model.embed_texts(texts, batch_size=batch_size)

    def probability(
        self,
        texts: Sequence[Any] | GaussianEmbedding,
        images: Sequence[ImageInput] | GaussianEmbedding,
        *,
        match_fraction: float | None = None,
    ) -> Tensor:
        """Probability that each text matches each image, by their distance alone.

        It is that of a random pair at this distance. A search among images gives other probabilities: it also knows
        the size of its gallery and the other items near the query.

        Args:
            texts: n texts, or their embeddings.
            images: m images, or their embeddings.
            match_fraction: fraction of matches among pairs like these, in (0, 1): 0.5 if half of them match. None
                takes the fraction of the calibration, where every text was paired with every image. A model without a
                calibration knows none.

        Returns:
            (n, m) probabilities in [0, 1]; not calibrated unless :attr:`calibrated`.

        Raises:
            ValueError: match_fraction is outside of (0, 1), or the model has no calibration for it; see also
                :meth:`embed_texts` and :meth:`embed_images`.
        """
        query = texts if isinstance(texts, GaussianEmbedding) else self.embed_texts(texts)
        items = images if isinstance(images, GaussianEmbedding) else self.embed_images(images)
        distance = get_distance(self.distance).for_direction("t2i").matrix(query, items)
        if self.calibration is not None:
            return self.calibration.probability(distance, match_fraction=match_fraction)
        if match_fraction is not None:
            raise ValueError(
                "probability: match_fraction needs a calibration, and this model has none; calibrate it on held-out"
                " pairs (sfumato calibrate RUN), or leave match_fraction out"
            )
        return match_probability(distance, self.logit_scale, self.logit_bias)

    def unfamiliar_texts(self, texts: Sequence[str]) -> list[bool]:
        """Which texts have words that the model hardly knows.

        Args:
            texts: n texts.

        Returns:
            n answers; all False for a model that cannot tell.
        """
        counter = piece_counter(self.model)
        if self.unfamiliar is None or counter is None:
            return [False] * len(texts)
        return self.unfamiliar.of(texts, counter)

    def ranking_distance(self, name: str | None = None) -> Distance:
        """The distance to rank by.

        Args:
            name: in DISTANCES; or "match_probability", PCME's, with the logits that the model has learnt. None takes
                its own distance.

        Returns:
            The distance.

        Raises:
            UserError: the model has not learnt the logits of a match probability.
            ValueError: there is no such distance.
        """
        if name != MATCH_PROBABILITY:
            try:
                return get_distance(name or self.distance)
            except ValueError as error:
                raise ValueError(f"{error}; or {MATCH_PROBABILITY}, with the logits of the run") from error
        if (logits := self.sampled_logits) is None:
            raise UserError(
                f"{MATCH_PROBABILITY} needs logits that were learnt on distances of samples; this model has none."
                " Name a run that was trained with the loss pcme, or a released model of PCME, or rank by another"
                " distance"
            )
        return match_probability_distance(logits.logit_scale, logits.logit_bias, n_samples=logits.n_samples)
