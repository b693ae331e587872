"""A model for the benchmarks of MTEB and MIEB: `mteb.evaluate(MTEBEncoder(sfumato.load("runs/mine")), tasks)`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import UserError, need
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.model import Model, model_digest

with need("mteb", "sfumato.adapters.mteb needs mteb"):
    from mteb.models.model_meta import ModelMeta


class MTEBEncoder:
    """Embeds texts or images for tasks of MTEB, and compares them by the distance of the model.

    A vector has the d means of its item, and behind them its d variances if the model has some: so tasks that rank use
    the model's own distance. Tasks that fit something on the vectors see both.
    """

    def __init__(self, model: Model, name: str = "", *, distance: str | None = None) -> None:
        self.model, self.distance = model, model.ranking_distance(distance)
        if not self.distance.symmetric:
            hint = "and MTEB does not say which side are the images; give a symmetric one: distance='csd'"
            raise UserError(f"MTEBEncoder: the distance {self.distance.name} is not symmetric, {hint}")
        self._with_variances = model.model.image.variances or model.model.text.variances
        dim = model.model.text.dim * (1 + self._with_variances)
        known: dict[str, Any] = {"modalities": ["image", "text"], "embed_dim": dim, "framework": ["PyTorch"]}
        known["name"] = name or f"sfumato/{Path(model.source).name or 'model'}"
        known["revision"] = model_digest(model.model)[:16]  # By name and revision MTEB finds earlier results.
        self.mteb_model_meta = ModelMeta.create_empty(known)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: Any = None,
        batch_size: int = 256,
        show_progress_bar: bool = False,
        precision: Any = None,
    ) -> Tensor:
        """The (n, d) or (n, 2 d) vectors of the texts or images of a task's batches; of the options, a batch's size."""
        found = GaussianEmbedding.cat([self._embed(batch, batch_size) for batch in inputs])
        return torch.cat((found.mean, found.log_var.exp()), dim=1) if self._with_variances else found.mean

    def _embed(self, batch: Mapping[str, Sequence[Any]], batch_size: int) -> GaussianEmbedding:
        images, texts = batch.get("image"), batch.get("text")
        if images is not None and texts is None:
            return self.model.embed_images([image.convert("RGB") for image in images], batch_size=batch_size)
        if texts is not None and images is None:
            return self.model.embed_texts(list(texts), batch_size=batch_size)
        raise UserError(f"MTEBEncoder: the items of this task have {', '.join(batch)}; expected an image or a text")

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(n, m) minus the distances."""
        return torch.neg(self.distance.matrix(self._gaussians(embeddings1), self._gaussians(embeddings2)))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(n,) minus the distances of the pairs."""
        return torch.neg(self.distance.row(self._gaussians(embeddings1), self._gaussians(embeddings2)))

    def _gaussians(self, vectors: Any) -> GaussianEmbedding:
        rows = torch.atleast_2d(torch.as_tensor(vectors))
        if not self._with_variances:
            return GaussianEmbedding.point(rows)
        mean, variance = rows.chunk(2, dim=1)
        return GaussianEmbedding(mean, variance.log())
