"""Copies of a gallery: a snapshot of a collection, or the move of an index or a collection to another store."""

import shutil
from collections.abc import Callable
from pathlib import Path

from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.gallery import Gallery


def copy_gallery(
    source: Gallery,
    folder: str | Path,
    store: str = "store",
    *,
    batch: int = 2048,
    progress: Callable[[int], None] | None = None,
) -> GaussianCollection:
    """Copy all items of a gallery into a new collection, with the images that were uploaded to it.

    Args:
        source: an index, or a collection; the vectors of a collection are copied bit by bit.
        folder: see :meth:`GaussianCollection.create`.
        store: see :meth:`GaussianCollection.create`.
        batch: largest number of items per write.
        progress: called with the number of items just copied.

    Returns:
        The new collection, open.

    Raises:
        UserError: the folder is not empty, or the store cannot be created.
        ValueError: the distance does not lift, so that no store can keep it.
    """
    scorer = source.scorer
    copy = GaussianCollection.create(
        folder,
        store,
        d=source.d,
        distance=source.distance,
        centre=source.centre,
        logit_scale=scorer.logit_scale,
        logit_bias=scorer.logit_bias,
        calibration=scorer.calibration,
        direction=scorer.direction,
        metadata=source.metadata,
    )
    try:
        with copy.filling(f"a copy was interrupted; remove it (and {copy.store.url}) and copy again"):
            if isinstance(source, GaussianCollection):
                if (source.folder / UPLOADED_IMAGES).is_dir():
                    shutil.copytree(source.folder / UPLOADED_IMAGES, copy.folder / UPLOADED_IMAGES)
                for records in source.store.scan(batch):
                    copy.store.upsert(records)
                    if progress:
                        progress(len(records))
            else:
                for items in source.scan(batch):
                    copy.upsert(items.embeddings, items.ids, payloads=items.payloads, batch=batch, progress=progress)
            copy.optimise()
    except BaseException:
        copy.close()
        raise
    return copy
