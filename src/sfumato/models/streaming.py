"""Retrieval metrics in a program's own loop: batches come one by one, in one process or several.

Every item is kept, because its rank depends on all others. What is computed is evaluate_retrieval of all of them.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sfumato.distances import Distance, get_distance
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.gaussian import Array, GaussianEmbedding, ScalarUncertainty
from sfumato.metrics.relevance import Relevance
from sfumato.models.process_group import PeerLostError, ProcessGroup, alone

_SAME = 0.05
"""Largest distance of two embeddings of one item, relative to their length; rounding is far below it."""

Ids = Sequence[str | int] | Array
Pairs = Iterable[tuple[str | int, str | int]]


class RetrievalMetrics:
    """Retrieval metrics over batches, with ``update``, ``compute`` and ``reset`` in the manner of torchmetrics.

    Items are told by their ids. An item that comes again, as an image with several captions does or what a
    DistributedSampler repeats to fill its last batch, counts once. With torch.distributed, each process updates with
    its own batches and all of them call :meth:`compute`, which gathers the embeddings.

    Args:
        distance: to rank by: a name in DISTANCES, or a distance with images as its first argument.
        uncertainty: the scalar uncertainty of the queries.

    Raises:
        ValueError: there is no such distance.

    Example:
        >>> metrics = RetrievalMetrics(distance="csd")
        >>> for start in (0, 2):
        ...     mean = torch.eye(4)[start:start + 2]
        ...     batch = GaussianEmbedding(mean, torch.zeros(2, 4))
        ...     ids = range(start, start + 2)
        ...     metrics.update(batch, batch, image_ids=ids, text_ids=ids)
        >>> metrics.compute().i2t["recall@1"]
        1.0
    """

    def __init__(self, *, distance: str | Distance = "csd", uncertainty: ScalarUncertainty = "total_variance") -> None:
        self.distance, self.uncertainty = get_distance(distance), uncertainty
        self.reset()

    def __repr__(self) -> str:
        n, m = len(self._images.place), len(self._texts.place)
        return f"RetrievalMetrics({self.distance.name!r}, {n} images, {m} texts)"

    def reset(self) -> None:
        """Forget all batches, for example at the end of an epoch."""
        self._images, self._texts = _Items("image"), _Items("text")
        self._pairs: dict[tuple[str, str], None] = {}

    def update(
        self,
        images: GaussianEmbedding | None = None,
        texts: GaussianEmbedding | None = None,
        *,
        image_ids: Ids = (),
        text_ids: Ids = (),
        pairs: Pairs | None = None,
        relevance: Relevance | Array | None = None,
    ) -> None:
        """Add a batch. Images and texts may also come separately.

        Args:
            images: (n, d) embeddings; kept without their gradient, on their device.
            texts: (m, d) embeddings.
            image_ids: n ids, the same for an item in all batches and processes, and distinct between items.
            text_ids: m ids.
            pairs: (image id, text id) of each match; they may name items of other batches.
            relevance: or the matches of this batch, an (n, m) table or image -> its true texts. If neither is given
                and the batch has images and texts, row i of the images matches row i of the texts.

        Raises:
            ValueError: numbers do not fit, pairs and relevance are both given, or an id came before with another
                embedding: ids that begin again in every batch, or a model in training mode. Nothing is added then.
            TypeError: images or texts are no embeddings.
        """
        batch = ((self._images, images, image_ids), (self._texts, texts, text_ids))
        names: list[list[str]] = []
        for items, embeddings, ids in batch:
            if not isinstance(embeddings, GaussianEmbedding | None):
                raise TypeError(
                    f"RetrievalMetrics.update: {items.what}s are of type {type(embeddings).__name__}; expected a"
                    " GaussianEmbedding; for plain vectors GaussianEmbedding.point(tensor)"
                )
            n, given = 0 if embeddings is None else embeddings.n, _strings(ids)
            if len(given) != n:
                raise ValueError(
                    f"RetrievalMetrics.update: got {len(given)} {items.what}_ids for {n} {items.what}s; give one each"
                )
            names.append(given)
        matches = _matches(names, pairs, relevance, both=images is not None and texts is not None)
        checked = [items.check(embeddings, of) for (items, embeddings, _), of in zip(batch, names, strict=True)]
        for (items, embeddings, _), of, rows in zip(batch, names, checked, strict=True):
            items.add(embeddings, of, rows)
        self._pairs |= dict.fromkeys(matches)

    def compute(self) -> Evaluation:
        """The figures of all items so far, of all processes if there are several; each of them gets all figures.

        Returns:
            What :func:`evaluate_retrieval` returns for all items in the order in which they came; with several
            processes those of the first process, then those of the second, and so on. The order decides between equal
            distances alone.

        Raises:
            ValueError: nothing was added, a pair names an item that never came, or nothing matches.
            RuntimeError: another process has ended or does not answer.
        """
        images, texts, pairs = _gathered(self._images, self._texts, list(self._pairs))
        if not images.place or not texts.place:
            raise ValueError(
                f"RetrievalMetrics.compute: there are {len(images.place)} images and {len(texts.place)} texts; call"
                " update with some of both first"
            )
        rows = []
        for side, items in enumerate((images, texts)):
            number = {identity: i for i, identity in enumerate(items.place)}
            if (unknown := next((pair for pair in pairs if pair[side] not in number), None)) is not None:
                raise ValueError(
                    f"RetrievalMetrics.compute: the pair {unknown} names the {items.what} {unknown[side]!r}, which"
                    " never came"
                )
            rows.append(np.array([number[pair[side]] for pair in pairs], np.int64))
        relevance = Relevance.from_pairs(*rows, n_queries=len(images.place), n_gallery=len(texts.place))
        return evaluate_retrieval(
            images.joined, texts.joined, relevance, distance=self.distance, uncertainty=self.uncertainty
        )


class _Items:
    """The items of one side, each once, in the order in which they came."""

    def __init__(self, what: str) -> None:
        self.what, self.parts = what, list[GaussianEmbedding]()
        self.place: dict[str, tuple[int, int]] = {}  # id -> part and row

    @property
    def joined(self) -> GaussianEmbedding:
        return GaussianEmbedding.cat(self.parts)

    def check(self, embeddings: GaussianEmbedding | None, ids: Sequence[str]) -> list[int]:
        """The rows that are new, if all others are what came before."""
        if embeddings is None:
            return []
        if self.parts and (self.parts[0].d, self.parts[0].dtype) != (embeddings.d, embeddings.dtype):
            raise ValueError(
                f"RetrievalMetrics.update: {self.what}s of d={embeddings.d}, {embeddings.dtype} after d="
                f"{self.parts[0].d}, {self.parts[0].dtype}"
            )
        rows: dict[str, int] = {}
        again: list[tuple[int, Tensor]] = []  # Row, and the mean that its id had before.
        for row, identity in enumerate(ids):
            if identity in self.place:
                part, known = self.place[identity]
                again.append((row, self.parts[part].mean[known]))
            elif rows.setdefault(identity, row) != row:
                again.append((row, embeddings.mean[rows[identity]]))
        if again:
            before = torch.stack([mean for _, mean in again]).detach()
            now = embeddings.mean.detach()[[row for row, _ in again]]
            gap, length = (now - before).norm(dim=1), torch.maximum(now.norm(dim=1), before.norm(dim=1))
            if (other := (gap > _SAME * length).nonzero().flatten().tolist()) != []:
                raise ValueError(
                    f"RetrievalMetrics.update: the {self.what} id {ids[again[other[0]][0]]!r} came before with another"
                    " embedding. Ids are those of the data, not the numbers within a batch; the model must be in"
                    " evaluation mode (model.eval()); call reset() before another epoch"
                )
        return list(rows.values())

    def add(self, embeddings: GaussianEmbedding | None, ids: Sequence[str], rows: Sequence[int]) -> None:
        if embeddings is None or not rows:
            return
        self.place |= {ids[row]: (len(self.parts), k) for k, row in enumerate(rows)}
        chosen = torch.tensor(rows, device=embeddings.device)
        self.parts.append(GaussianEmbedding(embeddings.mean.detach()[chosen], embeddings.log_var.detach()[chosen]))


def _strings(ids: Ids) -> list[str]:
    return [str(i) for i in (ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids)]


def _matches(
    names: Sequence[Sequence[str]], pairs: Pairs | None, relevance: Relevance | Array | None, *, both: bool
) -> list[tuple[str, str]]:
    """The matches of a batch by ids."""
    images, texts = names
    if pairs is not None and relevance is not None:
        raise ValueError("RetrievalMetrics.update: give pairs or relevance, not both")
    if pairs is not None:
        return [(str(image), str(text)) for image, text in pairs]
    if relevance is None:
        if not both:
            return []
        if len(images) != len(texts):
            raise ValueError(
                f"RetrievalMetrics.update: {len(images)} images and {len(texts)} texts; say what matches with pairs or"
                " relevance"
            )
        return list(zip(images, texts, strict=True))
    if isinstance(relevance, Relevance):
        shape, rows, columns = (relevance.n_queries, relevance.n_gallery), relevance.query_of_item, relevance.indices
    else:
        table = np.asarray(relevance.cpu() if isinstance(relevance, Tensor) else relevance)
        shape, at = table.shape, np.argwhere(table)
        rows, columns = (at[:, 0], at[:, 1]) if table.ndim == 2 else (at[:0], at[:0])
    if shape != (len(images), len(texts)):
        raise ValueError(
            f"RetrievalMetrics.update: relevance is {shape}; expected ({len(images)}, {len(texts)}), images by texts"
        )
    return [(images[i], texts[j]) for i, j in zip(rows, columns, strict=True)]


# ---------------------------------------------------------------- several processes
def _gathered(
    images: _Items, texts: _Items, pairs: list[tuple[str, str]]
) -> tuple[_Items, _Items, list[tuple[str, str]]]:
    """The items and matches of all processes, one process after the other."""
    group = _group()
    if group.size == 1:
        return images, texts, pairs
    own = {"pairs": pairs, **{side.what: [list(side.place), *_form(side)] for side in (images, texts)}}
    try:
        loaded = [json.loads(text) for text in _gather_texts(group, json.dumps(own))]
        found = [_gather_items(group, side, [one[side.what] for one in loaded]) for side in (images, texts)]
    except PeerLostError as error:
        raise RuntimeError(
            "RetrievalMetrics.compute: another process has ended or does not answer; all processes must call compute()"
        ) from error
    together = dict.fromkeys((image, text) for one in loaded for image, text in one["pairs"])
    return found[0], found[1], list(together)


def _group() -> ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        return alone()
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), device)


def _form(side: _Items) -> tuple[int, str]:
    return (side.parts[0].d, str(side.parts[0].dtype).removeprefix("torch.")) if side.parts else (0, "")


def _gather_texts(group: ProcessGroup, text: str) -> list[str]:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    counts = group.counts(len(data))
    return [bytes(part.tolist()).decode() for part in group.gather(data, counts).split(counts)]


def _gather_items(group: ProcessGroup, own: _Items, described: Sequence[tuple[list[str], int, str]]) -> _Items:
    forms = {(d, dtype) for ids, d, dtype in described if ids}
    if len(forms) > 1:
        raise ValueError(f"RetrievalMetrics.compute: the processes have {own.what}s of {sorted(forms)}, d and dtype")
    together = _Items(own.what)
    if not forms:
        return together
    ((d, dtype),) = forms
    empty = torch.empty(0, d, dtype=getattr(torch, dtype), device=group.device)
    mine = own.joined if own.parts else GaussianEmbedding(empty, empty)
    counts = [len(ids) for ids, *_ in described]
    everything = group.gather_embeddings(mine, counts)
    for part, ids in zip(
        np.split(np.arange(everything.n), np.cumsum(counts)[:-1]), (d[0] for d in described), strict=True
    ):
        rows = everything[torch.from_numpy(part).to(everything.device)]
        together.add(rows, ids, together.check(rows, ids))
    return together
