"""Copies of galleries: all items of one become a new collection, in any store."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from sfumato.files import write_atomically
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.stores.open import beside
from sfumato.search.stores.protocol import Records
from sfumato.search.texts import TextStore, item_texts


def copy_gallery(
    source: Gallery,
    folder: str | Path,
    store: str = "store",
    *,
    texts: bool = False,
    batch: int = 2048,
    progress: Callable[[int], None] | None = None,
) -> GaussianCollection:
    """Copy all items of a gallery into a new collection, with the images that were uploaded to it."""
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
        texts=(texts or source.texts is not None) and beside(store) is not None,
    )
    try:
        with copy.filling(f"a copy was interrupted; remove it (and {copy.store.url}) and copy again"):
            if isinstance(source, GaussianCollection):
                _copy_uploads(source.folder, copy.folder)
                for records in source.store.scan(batch):  # As they were when the scan began, also while others write.
                    if copy.texts is not None:
                        _copy_texts(source.texts, copy.texts, records)
                    copy.store.upsert(records)
                    if progress:
                        progress(len(records))
                _copy_uploads(source.folder, copy.folder)  # Again: items may have come before the scan began.
            else:
                for items in source.scan(batch):
                    copy.upsert(items.embeddings, items.ids, payloads=items.payloads, batch=batch, progress=progress)
            copy.optimise()
    except BaseException:
        copy.close()
        raise
    return copy


def _copy_texts(source: TextStore | None, copy: TextStore, records: Records) -> None:
    """Store the vectors of the texts of some records."""
    own = [i for i, payload in enumerate(records.payloads) if item_texts(payload)]
    ids, payloads = [records.ids[i] for i in own], [records.payloads[i] for i in own]
    if source is None:
        copy.upsert(ids, payloads)
    elif own:
        copy.write(ids, source.vectors_for(ids, payloads), payloads)


def _copy_uploads(folder: Path, copy: Path) -> None:
    """Copy the uploaded images that are not in the copy yet; each has the name of its content."""
    for image in sorted((folder / UPLOADED_IMAGES).rglob("*")):
        new = copy / image.relative_to(folder)
        with contextlib.suppress(FileNotFoundError):  # It was removed meanwhile.
            if image.is_file() and image.suffix != ".tmp" and not new.exists():
                content = image.read_bytes()
                new.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(new, content)
