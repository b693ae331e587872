"""A collection of a person's photographs: filled from folders, manifests and archives, and kept in step with them.

Items are read and decoded in threads, embedded in batches and stored batch by batch, so that an interrupted run goes on
where it stopped. Each keeps size, time and digest of its file: an unchanged one is not read again, a moved one keeps
its embedding.
"""

import contextlib
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sfumato.data.image_decoding import PIXELS, is_cut, n_pixels, needs_extra
from sfumato.data.images import DIGEST, FILE, POINTER, ROOT, Problem, Problems
from sfumato.data.photographs import OCR, UNREADABLE, lines_in
from sfumato.encoders.processors import in_threads
from sfumato.errors import UserError, counted, first_line, progress_bar, say
from sfumato.files import available_cores
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import NO_TEXT, check_id, is_text
from sfumato.models.embed import embedding_steps, encode_each, file_endings
from sfumato.models.model import Model
from sfumato.search.collection import GaussianCollection
from sfumato.search.folder import is_collection
from sfumato.search.languages import e5
from sfumato.search.searcher import open_gallery
from sfumato.search.stores.protocol import own_or_anchored
from sfumato.search.texts import item_texts
from sfumato.workflows import index as filling
from sfumato.workflows.own_items import Item, Source, list_items, missing_note, named_source, some_items, sources_of

STAT = "_stat"
"""Hidden fields of an item: what its file was when it was read."""

_BATCH, _STORED = 32, 256
_ASKED = 2_000

_MOST_DELETED, _FEW = 0.5, 10


NewCollection = Callable[[GaussianEmbedding, Sequence[str]], GaussianCollection]
"""Makes a collection for embeddings like these."""


@dataclass
class Filled:
    """What a filling has done, in numbers of items."""

    new: int = 0
    changed: int = 0
    moved: int = 0
    unchanged: int = 0
    deleted: int = 0
    with_texts: int = 0
    store: str = ""  # URL of the store
    note: str = ""  # what the probabilities are worth where images trained the model
    problems: Problems = field(default_factory=Problems)  # of listing and of reading

    @property
    def line(self) -> str:
        """In words."""
        counts = {name: getattr(self, name) for name in ("new", "changed", "moved", "unchanged", "deleted")}
        counts["of these read with captions, tags or a title"] = self.with_texts
        return ", ".join(f"{n:,} {name}" for name, n in counts.items() if n) or "nothing to do"

    def to_json(self) -> dict[str, Any]:
        """The numbers, the store and the note."""
        n_problems = self.problems.left_out + len(self.problems.remarks)
        numbers = {"problems": n_problems, "excluded": self.problems.excluded.total()}
        return {name: n for name, n in vars(self).items() if name != "problems"} | numbers


@dataclass(frozen=True, eq=False)
class _Read:
    """A read item: its input of the model, None for a moved one, or what is wrong with it."""

    payload: dict[str, str] = field(default_factory=dict)
    prepared: Any = None
    error: Exception | None = None
    notes: Sequence[Problem] = ()
    moved: str = ""  # the id that it had before


@dataclass(eq=False)
class Filling:
    """Puts items of a source into a collection, which is made for the first embeddings if there is none."""

    model: Model
    source: Source
    number: int  # of the source among those of the collection
    collection: GaussianCollection | NewCollection
    known: Mapping[str, Mapping[str, str]]  # the payloads of items that are there
    done: Filled
    ocr: bool = False  # whether the text in images is read
    waiting: list[tuple[Item, _Read, GaussianEmbedding]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prepare, self._encode = embedding_steps(self.model.model.image, "images")

    def fill(self, items: Sequence[Item], gone: dict[str, str]) -> None:
        """Embed the items that are new or changed; ``gone`` has the ids of vanished ones by the digest of the file."""
        todo = [item for item in items if not self._unchanged(item)]
        is_first = len(todo) > 0 and not self.done.new + self.done.changed
        if is_first and self.ocr:
            say("note: text in new photographs is read, .07 s each, .3 s where there is some; --no-ocr leaves it out")
        if is_first and e5() is not None:
            say("note: new texts get a second vector for other languages (extra multilingual), .01 to .02 s each")
        batch: list[tuple[Item, _Read]] = []
        with progress_bar("embedding images", len(todo)) as advance:
            for item, found in in_threads(todo, partial(self._read, gone=gone), available_cores(), ahead=2 * _BATCH):
                self.done.problems.remarks += found.notes
                if found.error is not None:
                    self._leave_out(item, found.error)
                elif found.moved:
                    self._move(item, found)
                else:
                    batch.append((item, found))
                if len(batch) == _BATCH:
                    self._embed(batch)
                    batch = []
                advance(1)
            self._embed(batch)
            self._store()

    def _unchanged(self, item: Item) -> bool:
        known = self.known.get(item.id)
        self.done.unchanged += (same := known is not None and bool(item.stat) and known.get(STAT) == item.stat)
        return same

    def _read(self, item: Item, *, gone: dict[str, str]) -> _Read:
        own = Problems()
        try:
            check_id(item.id)
            data = item.image.read_bytes()
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
            payload = {**item.fields(data, own), ROOT: str(self.number), STAT: item.stat, DIGEST: digest}
            payload[PIXELS] = str(n_pixels(data))
            if is_cut(data):
                own.remark(item.image.location, "the file is cut short; the rest of the image is grey")
            if any(one.reason.startswith(UNREADABLE) for one in own.remarks):
                payload[STAT] = ""  # So that the next synchronisation reads it again.
            if item.file and item.file != item.id:
                payload[FILE] = item.file
            if not all(is_text(text) for pair in payload.items() for text in pair):
                raise ValueError(NO_TEXT)
            if (known := self.known.get(item.id)) is not None:
                if POINTER in known or known.get(ROOT, payload[ROOT]) != payload[ROOT]:
                    raise ValueError(f"another image has the id {item.id!r}; rename the file")
                if known.get(DIGEST) == digest:
                    return _Read(_with_text(payload, known.get(OCR)), moved=item.id, notes=own.remarks)
            elif before := gone.pop(digest, ""):
                return _Read(_with_text(payload, self.known[before].get(OCR)), moved=before, notes=own.remarks)
            payload = _with_text(payload, self._text_in(item, data, own))
            return _Read(payload, self._prepare(data), notes=own.remarks)
        except (ValueError, OSError, MemoryError) as error:
            return _Read(error=error)

    def _text_in(self, item: Item, data: bytes, problems: Problems) -> str:
        """The text in an image; where the reader fails, nothing and a remark."""
        try:
            return lines_in(data) if self.ocr else ""
        except Exception as error:
            problems.remark(item.image.location, f"its text could not be read: {first_line(error)}")
            return ""

    def _leave_out(self, item: Item, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        location = str(Path(self.source.root, item.file)) if item.file else item.id
        if needs_extra(location):
            return self.done.problems.note(location, reason)
        self.done.problems.add(location, reason or type(error).__name__)

    def _move(self, item: Item, found: _Read) -> None:
        assert isinstance(self.collection, GaussianCollection), "something was there before"
        if self.known.get(item.id) == found.payload:
            self.done.unchanged += 1
            return
        self.collection.rename(found.moved, item.id, found.payload)
        self.done.changed += found.moved == item.id
        self.done.moved += found.moved != item.id

    def _embed(self, batch: Sequence[tuple[Item, _Read]]) -> None:
        """Embed a batch, and store enough of them at a time."""
        values = [((item, found), found.prepared) for item, found in batch]
        kept, embeddings = encode_each(self._encode, values, lambda one, error: self._leave_out(one[0], error))
        self.waiting += [(item, found, row) for (item, found), row in zip(kept, embeddings, strict=True)]
        if len(self.waiting) >= _STORED:
            self._store()

    def _store(self) -> None:
        if not self.waiting:
            return
        items, found, embeddings = zip(*self.waiting, strict=True)
        payloads, ids = [one.payload for one in found], [item.id for item in items]
        joined = GaussianEmbedding.cat(embeddings)
        if not isinstance(self.collection, GaussianCollection):
            self.collection = self.collection(joined, ids)
        self.collection.upsert(joined, ids, payloads=payloads)
        n_changed = sum(item.id in self.known for item in items)
        self.done.changed += n_changed
        self.done.new += len(items) - n_changed
        self.done.with_texts += sum(bool(item_texts(payload)) for payload in payloads)
        self.waiting = []


def _with_text(payload: dict[str, str], lines: str | None) -> dict[str, str]:
    return {**payload, OCR: lines} if lines else payload


def index_data(
    model: Model, data: str, out: Path, store: str, exclude: Sequence[str] = (), *, ocr: bool = False
) -> tuple[int, Filled]:
    """Make a collection of what a user named, or go on with an interrupted one. Returns (its items, what was done)."""
    if is_collection(out):
        return add_data(model, data, out, exclude, ocr=ocr)
    source, done, endings = named_source(data).excluding(exclude), Filled(), file_endings(model.model)
    items = some_items(source, endings, done.problems)
    with contextlib.ExitStack() as stack:

        def create(embeddings: GaussianEmbedding, ids: Sequence[str]) -> GaussianCollection:
            images = {"folder": source.root} if source.kind == "folder" else {}
            like = filling.GalleryPart(embeddings, [item.id for item in items], images=images)
            collection = filling.create_collection(model, like, out, own_or_anchored(store), texts=True)
            stack.callback(collection.close)
            collection.keep({"sources": [source.to_json()]})
            stack.enter_context(collection.filling(_GO_ON))
            made.append(collection)
            return collection

        made: list[GaussianCollection] = []
        Filling(model, source, 0, create, {}, done, ocr).fill(items, {})
        if not made:
            raise UserError(f"none of {counted(len(items), 'image')} can be used:\n{done.problems.summary()}")
        _finish(made[0], model, done)
        return len(made[0]), done


_GO_ON = "it was interrupted while being filled; run the same command again, and it goes on"


def add_data(
    model: Model, data: str, out: Path, exclude: Sequence[str] = (), *, ocr: bool = False
) -> tuple[int, Filled]:
    """Add what a user named to a collection; what is there and unchanged stays."""
    with GaussianCollection.open(out, unfinished=True) as collection:
        filling.check_same(collection, model, "t2i")
        source, sources, done = named_source(data), sources_of(collection), Filled()
        number, below = _place(source, sources)
        if number == len(sources):
            source = replace(source, begin=_beginning(source, sources) if len(collection) else "")
            sources.append(source)
        sources[number] = sources[number].excluding(exclude, below)
        endings = file_endings(model.model)
        items = [one for one in some_items(sources[number], endings, done.problems) if one.file.startswith(below)]
        with collection.filling(_GO_ON):
            collection.keep({"sources": [one.to_json() for one in sources]})
            known = _look_up(collection, [item.id for item in items])
            Filling(model, sources[number], number, collection, known, done, ocr).fill(items, {})
            _finish(collection, model, done)
        return len(collection), done


def sync_data(
    model: Model, out: Path, *, force: bool = False, exclude: Sequence[str] = (), ocr: bool = False
) -> tuple[int, Filled]:
    """Bring a collection in step with its sources: new, changed, moved and deleted files."""
    done = Filled()
    with GaussianCollection.open(out, unfinished=True) as collection:
        filling.check_same(collection, model, "t2i")
        if not (sources := [one.excluding(exclude) for one in sources_of(collection)]):
            raise UserError(f"{out} names no folder of its images; add one with sfumato index --data FOLDER --add")
        removed, endings = set(collection.metadata.get("removed", [])), file_endings(model.model)
        scanned = collection.store.scan()
        known = {i: own for records in scanned for i, own in zip(records.ids, records.payloads, strict=True)}
        left_out = removed - known.keys()  # What was deleted and added again is not.
        missing = [one.root for one in sources if not os.path.isdir(one.root)]
        if missing and not force:
            raise UserError(f"{missing_note(collection).removeprefix('note: ')}; --force drops its images")
        there_are = [[] if one.root in missing else list_items(one, endings, done.problems) for one in sources]
        listed = [[item for item in items if item.id not in left_out] for items in there_are]
        there = {item.id for items in listed for item in items}
        vanished = _vanished(known, there, sources, done.problems)
        n_own, n_new = sum(ROOT in payload for payload in known.values()), len(there - known.keys())
        if not force and len(vanished) > max(_FEW, _MOST_DELETED * n_own) and 2 * n_new < len(vanished):
            gone_from = f"{', '.join(one.root for one in sources)} any more, and nothing was changed"
            ways = "if a folder has moved, say so with --images NEW; --force deletes them"
            raise UserError(f"{len(vanished):,} of {n_own:,} images are excluded, or not in {gone_from}; {ways}")
        if not force and (folder := _emptied([_path_of(known[i], i, sources) for i in vanished], sources)):
            found = f"{folder} is empty now, nothing was changed"
            raise UserError(f"{found}: is a disk not mounted? --force deletes its images")
        gone = {known[i][DIGEST]: i for i in vanished if DIGEST in known[i]}
        with collection.filling(_GO_ON):
            for number, (source, items) in enumerate(zip(sources, listed, strict=True)):
                Filling(model, source, number, collection, known, done, ocr).fill(items, gone)
            done.deleted = collection.delete(list(_look_up(collection, vanished)))
            if exclude:
                collection.keep({"sources": [one.to_json() for one in sources]})
            _finish(collection, model, done)
        return len(collection), done


def _vanished(
    known: Mapping[str, Mapping[str, str]], there: Collection[str], sources: Sequence[Source], problems: Problems
) -> list[str]:
    """Items of the sources whose files are gone; not those in a folder that cannot be read, or without an extra."""
    unseen = {note.location for note in problems.notes}
    unseen |= {problem.location for problem in problems.items if os.path.isdir(problem.location)}
    absent = {i: known[i] for i in known if i not in there and known[i].get(ROOT, "").isdecimal()}
    of_sources = {i: _path_of(one, i, sources) for i, one in absent.items() if int(one[ROOT]) < len(sources)}
    return [i for i, path in of_sources.items() if unseen.isdisjoint(map(str, (path, *path.parents)))]


def _path_of(payload: Mapping[str, str], id: str, sources: Sequence[Source]) -> Path:
    return Path(sources[int(payload[ROOT])].root, payload.get(FILE, id))


def _emptied(vanished: Sequence[Path], sources: Sequence[Source]) -> Path | None:
    """A folder of which all is gone: that of a source, or one that had many files."""
    roots = {Path(one.root) for one in sources}
    counts = Counter(folder for path in vanished for folder in path.parents)
    large = (folder for folder, n in counts.items() if n > _FEW or folder in roots)
    return next((folder for folder in large if folder.is_dir() and not any(folder.iterdir())), None)


def move_sources(folder: Path, moved: Sequence[str]) -> None:
    """Say where the images of a collection are now: NEW for its one folder, or OLD=NEW."""
    with contextlib.closing(open_gallery(folder, unfinished=True)) as gallery:
        sources, pictures = sources_of(gallery), dict(gallery.metadata.get("pictures") or {})
        roots = list(dict.fromkeys(one.root for one in sources))
        for given in moved:
            old, equals, new = given.rpartition("=")
            if not equals and len(roots) != 1:
                there = ", ".join(roots) or "no folder"
                raise UserError(f"--images {given}: the images of {folder} are in {there}; give OLD=NEW")
            old, path = os.path.abspath(old) if equals else roots[0], Path(new).resolve()
            if old not in roots:
                raise UserError(f"--images {given}: {folder} has no images in {old}, but in {', '.join(roots)}")
            if not path.is_dir():
                raise UserError(f"--images {given}: there is no folder {new}")
            sources = [one.moved(str(path)) if one.root == old else one for one in sources]
            pictures |= {"folder": str(path)} if pictures.get("folder") == old else {}
        gallery.keep({"sources": [one.to_json() for one in sources], "pictures": pictures})


def _look_up(collection: GaussianCollection, ids: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """The payloads of those of some items that a collection has."""
    found: dict[str, Mapping[str, str]] = {}
    for start in range(0, len(ids), _ASKED):
        records = collection.store.get(ids[start : start + _ASKED])
        found |= zip(records.ids, records.payloads, strict=True)
    return found


def _place(source: Source, sources: Sequence[Source]) -> tuple[int, str]:
    """The number of a known source that holds this one, and the beginning of its paths there; else the next number."""
    for number, known in enumerate(sources):
        if (known.path, known.kind) == (source.path, source.kind):
            return number, ""
        if known.kind == source.kind == "folder" and Path(source.root).is_relative_to(known.root):
            return number, f"{Path(source.root).relative_to(known.root).as_posix()}/"
    return len(sources), ""


def _beginning(source: Source, sources: Sequence[Source]) -> str:
    """The beginning of the ids of a further source: its name, which no other source and no folder of the first has."""
    taken = {one.begin.rstrip("/") for one in sources}
    taken |= {path.name for one in sources if not one.begin for path in Path(one.root).glob("*")}
    name = Path(source.path).stem if source.kind != "folder" else Path(source.path).name
    return next(f"{n}/" for k in itertools.count(1) if (n := name + f"-{k}" * (k > 1)) not in taken)


def _finish(collection: GaussianCollection, model: Model, done: Filled) -> None:
    """Build the search structures, and count the images that trained the model."""
    collection.optimise()
    collection.keep({"run": filling.source_of(model)})
    filling.keep_trained(collection, model)
    done.store, done.note = collection.store.url, filling.calibrate_by_captions(collection, model)
