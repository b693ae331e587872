"""A gallery that knows its model: texts and images search it, and every answer says how sure it is."""

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Union, overload

import numpy as np
from PIL import Image

from sfumato.arrays import as_numpy, is_tensor
from sfumato.data.images import Images, ImageSource, MemoryImage
from sfumato.encoders.encoder_protocol import TwoTowers, piece_counter
from sfumato.errors import UserError
from sfumato.files import check_gallery
from sfumato.gaussian import GaussianEmbedding
from sfumato.search import languages
from sfumato.search import texts as wording
from sfumato.search.answer import NATIVE, Answer, Duplicates, Hit, Order, QueryInfo, SearchOptions, Target, TextQuery
from sfumato.search.collection import GaussianCollection
from sfumato.search.gallery import Gallery
from sfumato.search.index import GaussianIndex, copy_gallery
from sfumato.search.languages import (
    as_english,
    e5,
    known_words,
    odd_words,
    other_language,
    split_facts,
    strange_script,
    words_of,
)
from sfumato.search.stores.protocol import own_or_anchored, parse_where

Modality = Literal["texts", "images"]

OneQuery = Union[str, "os.PathLike[str]", bytes, Image.Image]
"""A single query: a text, or an image by its path (a :class:`~pathlib.Path`), its bytes or as a Pillow image."""


_DEFAULT = SearchOptions()


class QueryModel(Protocol):
    """What a gallery asks of its model."""

    @property
    def model(self) -> TwoTowers:
        """The encoders."""

    def embed_texts(self, texts: Sequence[Any]) -> GaussianEmbedding:
        """Embed texts. Returns (n, d)."""

    def embed_images(self, images: Sequence[Any]) -> GaussianEmbedding:
        """Embed images. Returns (n, d)."""

    def unfamiliar_texts(self, texts: Sequence[str]) -> list[bool]:
        """Which texts have words that the model hardly knows."""


@dataclass(eq=False)
class Searcher(contextlib.AbstractContextManager["Searcher"]):
    """A gallery that knows its model, so that texts and images search it; :func:`load_index` opens one.

    Attributes:
        gallery: the index in memory or the collection.
        source: its folder; of a gallery in memory, the source of its model.
        open_model: loads its model, when the first query needs it.
        open_images: opens the images of its items, when the first is shown; None if there are none.
    """

    gallery: Gallery
    source: str
    open_model: Callable[[], QueryModel] = field(repr=False)
    open_images: Callable[[], Images | None] = field(default=lambda: None, repr=False)

    def __len__(self) -> int:
        return len(self.gallery)

    def __repr__(self) -> str:
        items = "images" if self.native == "texts" else "texts"
        state = "calibrated" if self.gallery.calibrated else "not calibrated"
        return f"Searcher({len(self)} {items}, {self.gallery.distance}, {state}, {self.source!r})"

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files and connections of a collection."""
        self.gallery.close()

    @cached_property
    def model(self) -> QueryModel:
        """The model that the gallery was made with."""
        return self.open_model()

    @property
    def native(self) -> Modality:
        """The kind of queries that its probabilities are calibrated for: "texts" in a gallery of images."""
        return "texts" if NATIVE[self.gallery.scorer.direction] == "text" else "images"

    @overload
    def search(
        self,
        queries: OneQuery,
        k: int = 10,
        *,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
        where: Sequence[str] = (),
        also: Sequence[str] = (),
        without: Sequence[str] = (),
        duplicates: Duplicates = "show",
        order: Order = "fits",
        target: Target = "fits",
    ) -> Answer: ...

    @overload
    def search(
        self,
        queries: Sequence[Any] | np.ndarray | GaussianEmbedding,
        k: int = 10,
        *,
        modality: Modality | None = None,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
        where: Sequence[str] = (),
        also: Sequence[str] = (),
        without: Sequence[str] = (),
        duplicates: Duplicates = "show",
        order: Order = "fits",
        target: Target = "fits",
    ) -> list[Answer]: ...

    def search(
        self,
        queries: OneQuery | Sequence[Any] | np.ndarray | GaussianEmbedding,
        k: int = 10,
        *,
        modality: Modality | None = None,
        min_probability: float | None = None,
        coverage: float | None = None,
        max_risk: float | None = None,
        where: Sequence[str] = (),
        also: Sequence[str] = (),
        without: Sequence[str] = (),
        duplicates: Duplicates = "show",
        order: Order = "fits",
        target: Target = "fits",
    ) -> Answer | list[Answer]:
        """The k closest items of a text or an image, or of each of several.

        Args:
            queries: a text; an image, as a :class:`~pathlib.Path`, the bytes of its file or a Pillow image; a list of
                texts, or of images (also arrays of uint8 pixels); or (n, d) embeddings. For a model that reads
                features, a list or an array of them in place of what it has no encoder for.
            k: number of hits; all items if the gallery is smaller.
            modality: what embeddings or features are of; None: :attr:`native`. Not with texts and images themselves.
            min_probability: leave out hits with a lower match probability.
            coverage: also return the set of items that holds a match with at least this probability.
            max_risk: largest fraction of answers with a wrong first hit; less certain queries are marked.
            where: conditions that an item must fulfil, such as "folder=beach" or "date>=2024-06": a field, one of
                =, >=, <=, > and <, and a value. Several values of a field are alternatives, several fields must all
                fit. Not with coverage and max_risk.
            also: further texts that a hit should fit, beside every query by text.
            without: texts that a hit should not fit. Such answers are not calibrated.
            duplicates: "fold" lists an image that is nearly the same as a hit above in :attr:`Hit.duplicates` of that
                hit, and fills the list up to k; "show" lists every image.
            order: of the hits of a text where texts of items are evidence. "fits": the k most probable items;
                "distance": the k closest, with the same probabilities.
            target: what the probabilities of a text's hits are of. "fits": the texts of items are evidence, where they
                have some; "listed": by distance alone.

        Returns:
            One answer for a single text or image; for a list, an array or embeddings, a list of n answers.

        Raises:
            UserError: the model is missing, a text is empty, an image cannot be used, `also` or `without` are beside
                other queries than texts, or a guarantee is asked for queries other than :attr:`native`.
            TypeError: a query has another type, or texts and images are mixed.
            ValueError: a condition cannot be read, or `order`, `target` or `duplicates` has another value; see also
                :meth:`Gallery.search`.
        """
        options = SearchOptions(
            min_probability=min_probability, coverage=coverage, max_risk=max_risk,
            filter=parse_where(where) if where else None, duplicates=duplicates, order=order, target=target,
        )  # fmt: skip
        single = isinstance(queries, str | os.PathLike | bytes | Image.Image)
        asked: Any = [queries] if single else queries
        if also or without:
            if isinstance(asked, GaussianEmbedding) or not all(isinstance(query, str) for query in asked):
                raise UserError("search: also and without stand beside texts to search for; leave them out")
            asked = [TextQuery(query, tuple(also), tuple(without)) for query in asked]
        answers = self.answers(asked, k, options, modality=modality)
        return answers[0] if single else answers

    def answers(
        self,
        queries: Sequence[Any] | np.ndarray | GaussianEmbedding,
        k: int = 10,
        options: SearchOptions = _DEFAULT,
        *,
        modality: Modality | None = None,
    ) -> list[Answer]:
        """The k closest items of each of several queries.

        Args:
            queries: as for :meth:`search`; a text may be a :class:`TextQuery`.
            k: number of hits.
            options: how to search.
            modality: what embeddings or features are of.

        Returns:
            n answers.

        Raises:
            UserError: see :meth:`search`.
            TypeError: see :meth:`search`.
            ValueError: see :meth:`search`.
        """
        kind = self._modality(queries) or modality or self.native
        some: Any = queries
        if modality not in (None, kind):
            raise TypeError(f"search: the queries are {kind}; leave out modality={modality!r}")
        if isinstance(queries, GaussianEmbedding):
            embedded, names = queries, [str(i) for i in range(queries.n)]
        elif kind == "texts" and all(isinstance(query, str | TextQuery) for query in queries):
            texts = [query if isinstance(query, TextQuery) else TextQuery(query) for query in queries]
            texts = [with_facts(one, self.gallery, options) for one in texts]
            embedded = combined(texts, self.model.embed_texts([part for one in texts for part in one.parts]))
            return self.gallery.search(embedded, k, options, self.about(texts), image_of=self.image_of)
        elif kind == "texts":
            embedded, names = self.model.embed_texts(list(some)), _names(some, "text")
        else:
            embedded, names = self.model.embed_images(some), _names(some, "image")
        about = [QueryInfo(name, native=kind == self.native) for name in names]
        return self.gallery.search(embedded, k, options, about, image_of=self.image_of)

    def about(self, texts: Sequence[TextQuery]) -> list[QueryInfo]:
        """What is known of texts to search for, which the service embeds itself.

        Args:
            texts: n texts.

        Returns:
            n times what :meth:`Gallery.search` reads.
        """
        unfamiliar = self.model.unfamiliar_texts([one.joined for one in texts])
        native, model = self.native == "texts", self.model.model
        return [
            replace(QueryInfo(one.name, one, native and one.is_one, strange), **advice(one, self.gallery, model))
            for one, strange in zip(texts, unfamiliar, strict=True)
        ]

    def search_items(self, ids: Sequence[str], k: int = 10, options: SearchOptions = _DEFAULT) -> list[Answer]:
        """The k closest items of items of the gallery itself, by distance alone; the model is not loaded.

        Args:
            ids: n ids.
            k: number of hits.
            options: how to search, without guarantees.

        Returns:
            n answers, not calibrated.

        Raises:
            UserError: there is no such item.
        """
        found = self.gallery.get(ids)
        if missing := [i for i in ids if i not in found.ids]:
            way = "ids are those that a search returns"
            raise UserError(f"{self.source} has no item {missing[0]!r} to search by; {way}")
        rows = np.array([found.ids.index(i) for i in ids], np.int64)
        about = [QueryInfo(i, native=False) for i in ids]
        return self.gallery.search(found.embeddings[rows], k, options, about, image_of=self.image_of)

    def image_of(self, hit: Hit) -> ImageSource | None:
        """The image of a hit, if the gallery knows where its images are.

        Args:
            hit: a hit of this gallery.

        Returns:
            Its image; None for a text, for features, and for an image that is gone.
        """
        data = None if self._images is None else self._images.read(hit.id, hit.payload)
        return None if data is None else MemoryImage(hit.id, data)

    @cached_property
    def _images(self) -> Images | None:
        with contextlib.suppress(UserError):  # The data have moved: a search goes on without its images.
            return self.open_images()
        return None

    def save(self, folder: str | Path) -> None:
        """Write a collection, for :func:`load_index` and `sfumato search`.

        Args:
            folder: new or empty.

        Raises:
            TypeError: it is a collection, which is in its store already.
            UserError: the folder is not empty.
            ValueError: the distance does not lift.
        """
        if not isinstance(self.gallery, GaussianIndex):
            raise TypeError(f"save: {self.source} is a collection and stores itself; copy it with copy_gallery")
        copy_gallery(self.gallery, folder).close()

    def _modality(self, queries: Any) -> Modality | None:
        """What queries are of; None if they do not say, as the files of a model that reads embeddings of both sides."""
        found = _modality(queries)
        return None if found == "images" and self.model.model.text.processor.reads else found


def open_gallery(folder: str | Path, store: str | None = None, *, unfinished: bool = False) -> GaussianCollection:
    """Open a collection that `sfumato index` has written."""
    check_gallery(folder)
    return GaussianCollection.open(folder, None if store is None else own_or_anchored(store), unfinished=unfinished)


_FOREIGN = 0.4
"""What a text with an odd word has that is not English: of 4,000 misspelt parts of captions 1.2 % do."""


_NEGATION = re.compile(r"\b(no|not|without|never|neither|nor|except|\w+n['\u2019]t)\b", re.IGNORECASE)


def advice(query: TextQuery, gallery: Gallery, model: TwoTowers) -> dict[str, Any]:
    """The fields of :class:`QueryInfo` that say what a model cannot read of a text, and what it would be in English."""
    if word := _NEGATION.search(query.joined):
        told = f"Searches do not understand {word[0]!r}: give what should not be seen as --without (without=)"
        return {"warning": told}
    if wording.FUNCTION_WORDS.issuperset(wording.stemmed(query.joined).values()):
        return {"warning": "These words say nothing of what is shown, so the probabilities mean nothing: name a thing"}
    counter = piece_counter(model)
    known = known_words(model)
    strange = f"in {script} script" if counter and (script := strange_script(query.joined, counter)) else ""
    odd = odd_words(query.joined, gallery.words, known)
    if not strange and (language := other_language(odd)):
        strange = f"of {language}"
    if (strange or odd) and gallery.scorer.direction == "t2i" and e5() is not None:
        found = as_english([query.joined, *query.parts], str(gallery.metadata.get("model")))
        strange = strange or ("of another language" if found.foreign[0] > _FOREIGN else "")
        if strange and (found.embeddings is not None or gallery.is_read_by_e5):
            own = None if found.embeddings is None else combined([query], found.embeddings[1:])
            text = replace(query, across=replace(found, embeddings=own))
            return {"text": text, "unfamiliar": False, "warning": languages.MATCHED}
    if strange:
        return {"warning": languages.guesses(strange, has_extra=e5() is not None)}
    if any(_is_cut(text, model) for text in query.parts):
        way = "shorten it, or give its end as --also (also=)"
        return {"warning": f"The model reads only the beginning of this text: {way}"}
    if counter and all(n == 1 for n in counter(words_of(query.text))):
        return {}  # The model knows all words.
    return {"suggestion": wording.spelling(query.typed or query.text, gallery.words, known)}


_MAY_NAME = re.compile(r",|\b(in|at|on|from|near|during|(19|20)\d\d)\b", re.IGNORECASE)
"""What stands in a text that names a time or a place."""


def with_facts(query: TextQuery, gallery: Gallery, options: SearchOptions) -> TextQuery:
    """A query with its words of time and place apart, if items of the gallery have them and other words are left."""
    by_texts = gallery.texts is not None and options.target == "fits" and not options.is_guaranteed
    if not by_texts or not _MAY_NAME.search(query.text):
        return query
    rest, places, dates = split_facts(query.text, *gallery.facts())
    if not (places or dates) or wording.FUNCTION_WORDS.issuperset(words_of(rest)):
        return query
    return replace(query, text=rest, facts=(tuple(places), tuple(dates)), typed=query.text)


_READ = 25
"""Words of a text that every model reads."""


def _is_cut(text: str, model: TwoTowers) -> bool:
    """Whether a model passes over the end of a text: its last word changes nothing."""
    words = text.split()
    if len(words) <= _READ:
        return False
    mean = as_numpy(model.embed_texts([text, " ".join(words[:-1])]).mean)
    return bool((mean[0] == mean[1]).all())


_UNWANTED = 0.5
"""Weight of a text that a hit should not fit; chosen on photographs of Flickr8k's validation split."""


def combined(queries: Sequence[TextQuery], parts: GaussianEmbedding) -> GaussianEmbedding:
    """(n, d) embedding of each query from those of all their parts.

    The mean is that of the wanted texts minus half of each unwanted one, as long as that of the first text. By csd and
    squared L2, the nearest items are those of the smallest weighted sum of distances but for their own variances.
    """
    if all(one.is_one for one in queries):
        return parts
    rows, end = list[GaussianEmbedding](), 0
    for one in queries:
        start, n, end = end, len(one.wanted), end + len(one.parts)
        own = parts[start:end]
        mean = own.mean[:n].mean(0, keepdims=True) - _UNWANTED * own.mean[n:].sum(0, keepdims=True)
        mean *= np.linalg.norm(own.mean[0]) / np.maximum(np.linalg.norm(mean), 1e-9)
        rows.append(GaussianEmbedding(own.mean[:1] if one.is_one else mean, own.log_var[:n].mean(0, keepdims=True)))
    return GaussianEmbedding.cat(rows)


def _names(queries: Sequence[Any], noun: str) -> list[str]:
    """Texts and paths as they are, others by their number."""
    return [str(q) if isinstance(q, str | os.PathLike) else f"{noun} {i}" for i, q in enumerate(queries)]


def _modality(queries: Any) -> Modality | None:
    """What queries are of; None for embeddings and features, which do not say."""
    if isinstance(queries, GaussianEmbedding):
        return None
    if not (isinstance(queries, Sequence | np.ndarray) or is_tensor(queries)):
        expected = "a text, a pathlib.Path or another image, a list of them, or a GaussianEmbedding"
        raise TypeError(f"search: got a {type(queries).__name__}; expected {expected}")
    found = {_kind(query) for query in queries}
    if len(found) > 1:
        raise TypeError("search: the queries mix texts and images; search for one kind at a time")
    if not found:
        raise ValueError("search: got no queries, expected at least one")
    return found.pop()


def _kind(query: Any) -> Modality | None:
    if isinstance(query, str | TextQuery):
        return "texts"
    floating = hasattr(query, "dtype") and str(query.dtype).rpartition(".")[2].startswith(("float", "bfloat"))
    return None if floating else "images"
