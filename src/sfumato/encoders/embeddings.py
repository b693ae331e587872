"""Embeddings of another model as inputs: rows of a table, without an encoder of images or texts before them.

Only the heads are trained. The number of channels is that of the data, and a run stores it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from sfumato.data.embedding_tables import EmbeddingRow, EmbeddingTable
from sfumato.data.pairs import PairData
from sfumato.data.region_features import regions_from_bytes
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    EncoderConfig,
    ImageEncoderConfig,
    Item,
    OnError,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.features import Inputs, Store
from sfumato.encoders.frozen import FeatureInput, Whiten
from sfumato.encoders.regions import FeatureProcessor, stacked
from sfumato.errors import UserError


class EmbeddingImageConfig(ImageEncoderConfig):
    """Embeddings of images that another model has made (data.source=embeddings)."""

    from_pixels: ClassVar[bool] = False
    needs_description: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True

    kind: Literal["embeddings"] = "embeddings"
    whiten: Whiten = None


class EmbeddingTextConfig(TextEncoderConfig):
    """Embeddings of texts that another model has made (data.source=embeddings)."""

    needs_description: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True

    kind: Literal["embeddings"] = "embeddings"
    whiten: Whiten = None


class EmbeddingStore:
    """Rows of a table that stays on disk: a batch reads only its own rows."""

    def __init__(self, table: EmbeddingTable, index: np.ndarray) -> None:
        self.table, self.index = table, index

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: np.ndarray) -> Inputs:
        """See :class:`~sfumato.encoders.features.Store`: one token an item, (n, 1, c) and no mask."""
        return Inputs(self.table.rows(self.index[index]).unsqueeze(1))


class EmbeddingProcessor(FeatureProcessor):
    """Leaves the rows of a table on disk; other items are the bytes of .npy files of one vector each."""

    reads: ClassVar[str] = "embeddings"

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`. Its source has checked the rows."""
        rows = [item for item in items if isinstance(item, EmbeddingRow)]
        if rows and len(rows) == len(items) and all(item.table is rows[0].table for item in rows):
            table = rows[0].table
            if table.channels != self.channels:
                raise UserError(f"{table.name}: has {table.channels} channels, and this model reads {self.channels}")
            if progress:
                progress(len(items))
            return EmbeddingStore(table, np.array([item.row for item in rows], np.int64)), np.arange(len(items))
        found, kept = [], []
        for position, item in enumerate(items):
            try:
                found.append(self.features(item()))
                kept.append(position)
            except (ValueError, OSError) as error:
                if on_error is None:
                    raise
                on_error(position, error)
            if progress:
                progress(1)
        return stacked(found, self.channels), np.array(kept, dtype=np.int64)

    def features(self, data: bytes | str) -> np.ndarray:
        """One vector for each image."""
        if isinstance(data, str):
            raise UserError(
                f"this model reads embeddings and has no encoder for {data[:40]!r}: give a .npy file of"
                f" {self.channels} numbers, or search by an item that is there (`sfumato search INDEX --id ID`)"
            )
        values = regions_from_bytes(data)
        if values.shape != (1, self.channels):
            n, channels = values.shape
            raise ValueError(f"holds {n} x {channels} numbers; this model reads one embedding of {self.channels}")
        return values


class EmbeddingInput(FeatureInput):
    """The encoder of embeddings: one token each, whitened and with dropout, without trained parameters."""

    @property
    def description(self) -> dict[str, Any]:
        """The number of channels of the data."""
        return {"channels": self._received}


def described_by(data: PairData) -> dict[str, dict[str, int]]:
    """What data say about the encoders that read them."""
    rows = {"image": data.images[:1], "text": data.text_rows[:1]}
    return {
        side: {"channels": row.table.channels}
        for side, first in rows.items()
        for row in first
        if isinstance(row, EmbeddingRow)
    }


def build_embeddings(config: EncoderConfig, context: BuildContext) -> tuple[EmbeddingProcessor, EmbeddingInput]:
    """Build a side of kind "embeddings". Returns (processor, encoder)."""
    if context.description is None:
        raise ValueError("an encoder of kind 'embeddings' has the channels of its data; none are given")
    channels = context.description["channels"]
    encoder = EmbeddingInput(channels, context.feature_dropout, whiten=dict(config)["whiten"])
    return EmbeddingProcessor(channels), encoder
