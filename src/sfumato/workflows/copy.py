"""Copying of galleries: as they are into another store, or with the embeddings of another model.

A copy by another model is a second collection, which grows while the first one answers. The same copy again brings it
up to date, so it can be compared in peace. The last step is short: services of the first collection wait with their
writes, what has changed is embedded, and a symbolic link that they were started with is pointed at the copy.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from sfumato.data.images import DIGEST, POINTER, Problems, UploadedImages
from sfumato.encoders.minilm import has_minilm
from sfumato.encoders.processors import available_cpus
from sfumato.errors import UserError
from sfumato.evaluation.hits import HitFigures, hit_figures
from sfumato.files import sync_folder
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import embedding_steps, encode_each, model_digest
from sfumato.models.model import Model
from sfumato.models.run import trained_digests
from sfumato.progress import progress_bar, say
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection, copy_gallery
from sfumato.search.gallery import Gallery
from sfumato.search.searcher import Searcher
from sfumato.workflows import index
from sfumato.workflows.embed import in_threads

_BATCH, _AT_A_TIME = 64, 512

_FEW, _MOST_PASSES = 100, 10
"""Changes since the last pass that are few enough for the last step, and passes until then."""

_GO_ON = "it is a copy that was interrupted; run the same command again, and it goes on"

_WAIT = 60.0
"""Longest time to wait for the running writes of services, in seconds."""


def copy_index(folder: str | Path, out: str | Path, store: str, *, source_store: str | None = None) -> tuple[str, int]:
    """Copy an index or a collection into a new collection. Returns (URL of the new store, number of items in it)."""
    with (
        contextlib.closing(index.open_gallery(folder, source_store)) as gallery,
        progress_bar("copying", len(gallery)) as advance,
        copy_gallery(gallery, out, index.own_or_anchored(store), progress=advance) as copied,
    ):
        return copied.store.url, len(copied)


@dataclass(frozen=True)
class Compared:
    """Two galleries of the same items, asked the same queries; both search by distance alone."""

    n: int  # number of queries
    trained: int  # of these captions of images that trained one of the models
    calibrated: tuple[bool, bool]  # whether the probabilities of each mean something
    said: tuple[float, float]  # mean probability of the first hits, of the first gallery and of the second
    same_first: float  # fraction of queries with the same first hit in both
    figures: tuple[HitFigures, HitFigures] | None  # where the queries are captions, whose items are known

    @property
    def rows(self) -> list[list[str]]:
        """Each figure in words, of the first gallery, and of the second."""

        def row(name: str, values: Iterable[float], form: str) -> list[str]:
            cells = zip(values, self.calibrated, strict=True)
            return [name, *(format(value, form) if known else "not calibrated" for value, known in cells)]

        said = row("mean probability of the first hit", self.said, ".1%")
        if self.figures is None:
            return [said]
        return [
            ["first hit is the caption's own item", *(f"{one.rate:.1%}" for one in self.figures)],
            said,
            row("calibration error of first hits", (one.ece for one in self.figures), ".3f"),
            row("  of perfect probabilities", (one.ece_by_chance for one in self.figures), ".3f"),
        ]


@dataclass
class Copied:
    """What a copy by another model has done."""

    out: Path
    store: str = ""
    n: int = 0  # items of the copy
    embedded: int = 0
    deleted: int = 0
    switched: bool = False
    note: str = ""  # what the probabilities are worth where images trained the model
    compared: Compared | None = None
    problems: Problems = field(default_factory=Problems)

    def to_json(self) -> dict[str, Any]:
        """The numbers, with the number of items left out."""
        compared = None if self.compared is None else asdict(self.compared)
        own = {name: value for name, value in vars(self).items() if name not in ("problems", "compared")}
        return {**own, "out": str(self.out), "problems": self.problems.left_out, "compared": compared}


class _Copy:
    """A collection by another model that follows a gallery. Use it as a context manager."""

    def __init__(self, gallery: Gallery, model: Model, out: Path, store: str) -> None:
        self._gallery, self._model, self.done, self._store_url = gallery, model, Copied(out), store
        self._images = index.item_images(gallery, str(gallery.metadata.get("run", "")))
        self._of_texts = gallery.scorer.direction == "i2t"
        tower = model.model.text if self._of_texts else model.model.image
        self._prepare, self._encode = embedding_steps(tower, "texts" if self._of_texts else "images")
        self._unusable: dict[str, bytes] = {}  # by id the digest of its payload
        self._open = contextlib.ExitStack()
        self.collection: GaussianCollection | None = None

    def __enter__(self) -> "_Copy":
        if GaussianCollection.is_one(self.done.out):
            self._begin(GaussianCollection.open(self.done.out, unfinished=True))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _begin(self, collection: GaussianCollection) -> None:
        if collection.metadata.get("model") != model_digest(self._model.model):
            collection.close()
            raise UserError(
                f"{self.done.out} is by the model {collection.metadata.get('run')}; give a new folder for a copy by"
                f" {self._model.source}"
            )
        index.check_same(collection, self._model, self._gallery.scorer.direction)
        self._open.callback(collection.close)
        if _origin(collection) != _origin(self._gallery):
            self._open.close()
            raise UserError(f"{self.done.out} is not a copy of this gallery; give another folder for the copy")
        self._open.enter_context(collection.filling(_GO_ON))
        known = self._gallery.metadata
        removed = sorted({*known.get("removed", []), *collection.metadata.get("removed", [])})
        own = {"sources": known["sources"], "removed": removed} if "sources" in known else {}
        collection.keep({**own, "copy_of": _origin(self._gallery)})
        self.collection = collection

    def check_complete(self) -> None:
        """Refuse to switch to a copy that lacks many items."""
        lacking, n = len(self._unusable), 0 if self.collection is None else len(self.collection)
        if lacking > max(3, n // 100):
            raise UserError(
                f"{lacking} of {n + lacking} items cannot be embedded, and would be missing after the switch, so it was"
                f" not made; bring their images back:\n{self.done.problems.summary()}"
            )

    def finish(self) -> None:
        """Close the copy as complete."""
        assert self.collection is not None, "follow() makes it"
        self.done.store, self.done.n = self.collection.store.url, len(self.collection)
        self._open.close()

    def _create(self, first: GaussianEmbedding, ids: Sequence[str]) -> GaussianCollection:
        """An empty collection with what the first one knows of its images."""
        known = self._gallery.metadata
        part = index.GalleryPart(first, ids, ids if self._of_texts else None, images=known.get("pictures") or {})
        texts = self._gallery.texts is not None and has_minilm()
        made = index.create_collection(
            self._model, part, self.done.out, index.own_or_anchored(self._store_url), texts=texts
        )
        made.keep({"copy_of": _origin(self._gallery)})
        return made

    def follow(self) -> int:
        """Embed what is new or changed, and delete what is gone. Returns the number of changes."""
        there = {} if self.collection is None else _digests(self.collection)
        now = _digests(self._gallery)
        self._unusable = {i: digest for i, digest in self._unusable.items() if now.get(i) == digest}
        todo = [i for i, digest in now.items() if there.get(i) != digest and self._unusable.get(i) != digest]
        with progress_bar("embedding", len(todo)) as advance:
            for start in range(0, len(todo), _AT_A_TIME):
                ids = todo[start : start + _AT_A_TIME]
                self._store(ids, now)
                advance(len(ids))
        if self.collection is None:
            raise UserError(f"no item of the gallery can be embedded:\n{self.done.problems.summary()}")
        gone = [i for i in there if i not in now or (i in self._unusable and there[i] != now[i])]
        self.done.deleted += (deleted := index.remove_items(self.collection, gone) if gone else 0)
        return len(todo) + deleted

    def _store(self, ids: Sequence[str], digests: Mapping[str, bytes]) -> None:
        records = self._gallery.get(ids)
        items = list(zip(records.ids, records.payloads, strict=True))
        prepared = in_threads(items, self._read, available_cpus(), ahead=2 * _BATCH)
        usable = [(item, value) for item, value in prepared if self._noted(item, value)]
        kept, rows = list[tuple[str, Mapping[str, str]]](), list[GaussianEmbedding]()
        for start in range(0, len(usable), _BATCH):
            found, embedded = encode_each(self._encode, usable[start : start + _BATCH], self._leave_out)
            kept, rows = kept + found, rows + embedded
        self._unusable |= {i: digests[i] for i in {*records.ids} - {i for i, _ in kept}}
        if not kept:
            return
        embeddings = GaussianEmbedding.cat(rows)
        if self.collection is None:
            self._begin(self._create(embeddings, list(digests)))
            assert self.collection is not None, "begun"
        if isinstance(self._images, UploadedImages):
            uploads = UploadedImages(self.collection.folder / UPLOADED_IMAGES)
            for i, payload in kept:
                if POINTER in payload and (data := self._images.read(i, payload)) is not None:
                    uploads.write(i, data)
        self.collection.upsert(embeddings, [i for i, _ in kept], payloads=[payload for _, payload in kept])
        self.done.embedded += len(kept)

    def _read(self, item: tuple[str, Mapping[str, str]]) -> Any:
        """The prepared input of an item, or what is wrong with it."""
        id, payload = item
        try:
            if self._of_texts:
                return self._prepare(payload["text"])
            data = None if self._images is None else self._images.read(id, payload)
            if data is None:
                raise ValueError("its image is not there")
            return self._prepare(data)
        except (ValueError, OSError, LookupError, MemoryError) as error:
            return error

    def _noted(self, item: tuple[str, Mapping[str, str]], value: Any) -> bool:
        if wrong := isinstance(value, Exception):
            self._leave_out(item, value)
        return not wrong

    def _leave_out(self, item: tuple[str, Mapping[str, str]], error: Exception) -> None:
        self.done.problems.add(item[0], str(error) or type(error).__name__)


def _digests(gallery: Gallery) -> dict[str, bytes]:
    """A digest of the payload of each item; that of an image names its content."""
    return {
        i: hashlib.blake2b(json.dumps(dict(payload), sort_keys=True).encode(), digest_size=16).digest()
        for records in gallery.scan()
        for i, payload in zip(records.ids, records.payloads, strict=True)
    }


def _origin(gallery: Gallery) -> str:
    """What all copies of a gallery by other models share; of an index, its items."""
    if "copy_of" in gallery.metadata:
        return str(gallery.metadata["copy_of"])
    if isinstance(gallery, GaussianCollection):
        return gallery.store.fingerprint
    return hashlib.blake2b("\n".join(_digests(gallery)).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _without_writers(gallery: Gallery) -> Iterator[None]:
    """While no service writes to a gallery; those that want to wait."""
    if not isinstance(gallery, GaussianCollection):
        yield
        return
    lock = gallery.writers_lock(_WAIT)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"services have been writing to {gallery.folder} for {_WAIT:.0f} seconds without a pause, so nothing was"
            " switched; send the same command again"
        ) from error
    try:
        yield
    finally:
        lock.release()


def check_alias(folder: Path, out: Path) -> None:
    """Refuse what cannot be pointed elsewhere while it is used."""
    if folder.is_symlink() and folder.resolve() != out.resolve():
        return
    if folder.is_symlink():
        raise UserError(f"{folder} points to {out} already; give another folder for the copy")
    new = folder.with_name(folder.name + "-1")
    raise UserError(
        f"--switch: {folder} is a folder, expected a symbolic link that can be pointed at the copy. Make it one, while"
        f" nothing uses it: mv {folder} {new} && ln -s {new.name} {folder}"
    )


def point(alias: Path, folder: Path) -> None:
    """Point a symbolic link at a folder, in one step."""
    target = os.path.relpath(folder.resolve(), alias.parent.resolve())
    temporary = alias.with_name(f".{alias.name}.{secrets.token_hex(8)}.tmp")
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, alias)
    sync_folder(alias.parent)


def copy_by_model(
    folder: Path,
    out: Path,
    store: str,
    model: Model,
    *,
    source_store: str | None = None,
    switch: bool = False,
    queries: Sequence[str] = (),
) -> Copied:
    """Embed the items of a gallery by another model into a new collection, or bring such a copy up to date.

    Then both are compared on the same queries: the given ones, else captions of the items. With ``switch`` the symbolic
    link ``folder`` points at the copy at the end, with nothing lost that a service has written meanwhile.
    """
    if switch:
        check_alias(folder, out)
    if folder.resolve() == out.resolve():
        raise UserError(f"{folder} and {out} are one folder; give another folder for the copy")
    with contextlib.closing(index.open_gallery(folder, source_store)) as gallery:
        if gallery.metadata.get("model") == model_digest(model.model):
            raise UserError(f"{folder} is by the model {model.source} already; leave --model out to copy it as it is")
        with _Copy(gallery, model, out, store) as copy:
            for _ in range(_MOST_PASSES):
                if copy.follow() <= _FEW:
                    break
            made = copy.collection
            assert made is not None, "follow() makes it"
            made.optimise()
            index.keep_trained(made, model)
            copy.done.note = index.training_note(made)
            try:
                copy.done.compared = _compare(folder, gallery, made, model, queries)
            except UserError as error:
                say(f"the models cannot be compared: {error}")
            if not switch:
                copy.finish()
                return copy.done
            with _without_writers(gallery):
                copy.follow()
                copy.check_complete()
                copy.finish()
                point(folder, out)
            copy.done.switched = True
        return copy.done


_N_QUERIES, _FEWEST = 500, 50
"""Captions that are asked at most, and those of images that trained neither model that are enough alone."""


def _compare(
    folder: Path, gallery: Gallery, made: GaussianCollection, model: Model, queries: Sequence[str]
) -> Compared | None:
    """Ask both galleries the same texts; None if there are none."""
    if gallery.scorer.direction == "i2t":
        return None
    truth, trained = list[str](), 0
    if not queries:
        sample = made.sample(_N_QUERIES)
        captions = [payload.get("captions", "").split("\n")[0].strip() for payload in sample.payloads]
        known = trained_digests(Path(model.source)) | trained_digests(Path(str(gallery.metadata.get("run", ""))))
        asked = [i for i, caption in enumerate(captions) if caption]
        others = [i for i in asked if sample.payloads[i].get(DIGEST) not in known]
        trained, asked = (0, others) if len(others) >= _FEWEST else (len(asked) - len(others), asked)
        truth, queries = [sample.ids[i] for i in asked], [captions[i] for i in asked]
    if not queries:
        return None
    say(f"comparing both models on {len(queries)} {'captions' if truth else 'queries'}")
    both = (
        Searcher(gallery, str(folder), lambda: index.load_retrieval_model(gallery, folder)),
        Searcher(made, str(made.folder), lambda: model),
    )
    old, new = (one.search(list(queries), 1, target="listed") for one in both)
    if not all(map(len, (*old, *new))):  # One of them is empty by now.
        return None
    said = [torch.tensor([answer.best_probability for answer in answers]).double() for answers in (old, new)]
    figures: list[HitFigures] = []
    if truth:
        for p, answers in zip(said, (old, new), strict=True):
            y = torch.tensor([answer[0].id == i for answer, i in zip(answers, truth, strict=True)]).double()
            figures.append(hit_figures(p, y, "t2i", len(made), 1))
    same = [a[0].id == b[0].id for a, b in zip(old, new, strict=True)]
    means = float(said[0].mean()), float(said[1].mean())
    calibrated = gallery.calibrated, made.calibrated
    return Compared(
        len(queries), trained, calibrated, means, sum(same) / len(same), (figures[0], figures[1]) if truth else None
    )
