"""Prompts of classes: templates, pooling to one Gaussian per class, their choice by uncertainty, and the closest class.

The formulas are in papers/docs/prompts.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.errors import UserError, progress_bar
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import read_lines
from sfumato.search.exact import distance_blocks, top_k

PROMPT_POOLINGS = ("mixture", "unit")
"""The ways to pool prompts into one Gaussian, see :func:`pool_prompts`."""

CLIP_TEMPLATES = Path(__file__).with_name("clip_templates.txt")
"""The 80 templates of CLIP, as the PCME++ paper lists them (C.6)."""

_CLASSES = 64
"""Number of classes that are embedded or pooled at once."""


def read_templates(path: Path | None = None) -> list[str]:
    """Read prompt templates."""
    templates, numbers, _ = read_lines(path or CLIP_TEMPLATES)
    for template, number in zip(templates, numbers, strict=True):
        if template.count("{}") != 1:
            raise UserError(
                f"{path}:{number}: expected one {{}} for the class, as in 'a photo of a {{}}.', got {template!r}"
            )
    if twice := next((t for i, t in enumerate(templates) if t in templates[:i]), None):
        raise UserError(f"{path}: the template {twice!r} occurs twice; leave one out")
    return templates


def embed_prompts(model: TwoTowers, classes: Sequence[str], templates: Sequence[str]) -> GaussianEmbedding:
    """Embed every class in every template. Returns (c * p, d)."""
    parts = []
    with progress_bar("embedding prompts", len(classes) * len(templates)) as advance:
        for start in range(0, len(classes), _CLASSES):
            texts = [t.replace("{}", name) for name in classes[start : start + _CLASSES] for t in templates]
            parts.append(model.embed_texts(texts))
            advance(len(texts))
    return GaussianEmbedding.cat(parts)


def pool_prompts(prompts: GaussianEmbedding, weights: Tensor, *, pooling: str = "mixture") -> GaussianEmbedding:
    r"""Pool the prompts of each class into one Gaussian.

        mean = sum_p w_p mean_p        var = sum_p w_p (var_p + (mean_p - mean)^2)

    These are the moments of the mixture of the prompts, so csd to the result is the weighted mean of csd to each
    prompt. With "unit", as in CLIP and in ProLIP's code, the mean is scaled to unit length, and var = sum_p w_p var_p.

    prompts (c * p, d) class by class, weights (c, p) >= 0, divided by their sum over a class -> (c, d).
    """
    c, p = weights.shape
    weights = (weights.double() / weights.double().sum(1, keepdim=True)).to(prompts.dtype)
    parts = []
    for start in range(0, c, _CLASSES):
        w = weights[start : start + _CLASSES].unsqueeze(2)  # (b, p, 1)
        own = prompts[start * p : (start + len(w)) * p]
        means, var = own.mean.view(len(w), p, -1), own.var.view(len(w), p, -1)
        mean = (w * means).sum(1)
        if pooling == "mixture":
            var = var + (means - mean.unsqueeze(1)).square()
        else:
            mean = functional.normalize(mean, dim=-1)
        parts.append(GaussianEmbedding(mean, (w * var).sum(1).log()))
    return GaussianEmbedding.cat(parts)


def certain_prompts(uncertainty: Tensor, k: int | Tensor) -> Tensor:
    """Choose the k most certain prompts of each class; ties are decided by order. uncertainty (c, p) -> (c, p)."""
    c, p = uncertainty.shape
    kept = torch.arange(p) < torch.as_tensor(k).expand(c).unsqueeze(1)
    return torch.zeros(c, p).scatter_(1, uncertainty.argsort(dim=1, stable=True), kept.float())


def mixture_weights(
    images: GaussianEmbedding, labels: np.ndarray, prompts: GaussianEmbedding, n_classes: int, *, seed: int = 0
) -> Tensor:
    """Fit the weights of the prompts in a mixture to a few labelled images of each class, by expectation maximisation.

    This is the rule of ProLIP's code: 20 samples of each of five images, variances of prompts + 0.02, a Dirichlet prior
    with concentration 2, and initial weights proportional to 1 / variance. A class without images keeps its initial
    weights.

    Source: https://github.com/naver-ai/prolip, "bprw"; Chun et al., ICLR 2025, arXiv 2410.18857.

    images (n, d), labels (n,), prompts (c * p, d) -> (c, p).
    """
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / prompts.total_variance.double().view(n_classes, -1)
    weights = weights / weights.sum(1, keepdim=True)
    p = weights.shape[1]
    for c in range(n_classes):
        few = torch.from_numpy(np.flatnonzero(labels == c)[:5])
        if not len(few):
            continue
        x = images[few].sample(20, generator=generator).flatten(0, 1).double()  # (100, d)
        own = prompts[c * p : (c + 1) * p]
        mean, var = own.mean.double(), own.var.double() + 0.02
        squares = x.square() @ (1 / var).T - 2 * x @ (mean / var).T + (mean.square() / var).sum(1)
        log_density = -(squares + var.log().sum(1)) / 2  # (100, p), up to a constant
        for _ in range(1000):
            new = (log_density + weights[c].log()).softmax(dim=1).sum(0) + 1
            step, weights[c] = (new / new.sum() - weights[c]).norm(), new / new.sum()
            if step < 1e-12:
                break
    return weights


@dataclass(frozen=True, eq=False)
class LabelledEmbeddings:
    """(n, d) embeddings and (n,) class numbers of images."""

    images: GaussianEmbedding
    labels: np.ndarray

    def select(self, index: np.ndarray) -> "LabelledEmbeddings":
        """Some of the images. index (k,)."""
        return LabelledEmbeddings(self.images[torch.from_numpy(index)], self.labels[index])


@dataclass(frozen=True, eq=False)
class Classifier:
    """The prompts of c classes in p templates, their order in a class, and how images find the closest class."""

    prompts: GaussianEmbedding  # (c * p, d), class by class
    order: Tensor  # (c, p) numbers; the smallest are kept first: their uncertainties, or random ones
    distance: str
    pooling: str = "mixture"

    def right(self, shown: LabelledEmbeddings, weights: Tensor) -> np.ndarray:
        """Whether the closest class is right, and one of the five closest; ties go to the earlier class.

        weights (c, p) -> (n, 2).
        """
        _, order = top_k(shown.images, pool_prompts(self.prompts, weights, pooling=self.pooling), 5, self.distance)
        same = order.numpy() == shown.labels[:, None]
        return np.stack([same[:, 0], same.any(1)], axis=1).astype(float)

    def right_by_k(self, shown: LabelledEmbeddings) -> np.ndarray:
        """Count right images of each class for every number of prompts that all classes keep. Returns (c, p)."""
        c, p = self.order.shape
        counts = np.zeros((c, p), np.int64)
        with progress_bar("choosing K", p) as advance:
            for k in range(p):
                found = self.right(shown, certain_prompts(self.order, k + 1))[:, 0] > 0
                counts[:, k] = np.bincount(shown.labels[found], minlength=c)
                advance(1)
        return counts

    def k_per_class(self, shown: LabelledEmbeddings, start: np.ndarray) -> np.ndarray:
        """Choose a K for each class, one class after the other.

        Each class takes the K for which the most images of all classes are correct. So a class has no advantage from
        attracting images of other classes. If no K is better than the initial one, a class keeps the initial one.

        start (c,) -> (c,).
        """
        (n_classes, p), best, own = self.order.shape, start.copy(), torch.from_numpy(shown.labels)
        now = self._distances(shown, self.prompts, certain_prompts(self.order, torch.from_numpy(start)))  # (n, c)
        with progress_bar("choosing K per class", n_classes) as advance:
            for c in range(n_classes):
                repeated = GaussianEmbedding.cat([self.prompts[c * p : (c + 1) * p]] * p)
                kept = certain_prompts(self.order[c].expand(p, p), torch.arange(1, p + 1))
                tried = self._distances(shown, repeated, kept)  # (n, p)
                now[:, c] = torch.inf
                nearest, which = now.min(dim=1, keepdim=True)
                taken = (tried < nearest) | ((tried == nearest) & (which > c))
                counts = torch.where(taken, (own == c).unsqueeze(1), which == own.unsqueeze(1)).sum(0)
                if counts.max() > counts[start[c] - 1]:
                    best[c] = p - int(counts.flip(0).argmax())
                now[:, c] = tried[:, best[c] - 1]
                advance(1)
        return best

    def _distances(self, shown: LabelledEmbeddings, prompts: GaussianEmbedding, weights: Tensor) -> Tensor:
        """Distances to the pooled prompts in one tensor: 100 MB for 25,000 images and 1,000 classes."""
        classes = pool_prompts(prompts, weights, pooling=self.pooling)
        return torch.cat([block for _, block in distance_blocks(shown.images, classes, self.distance)])


def best_k(counts: np.ndarray) -> int:
    """Choose one K for all classes. counts (c, p)."""
    return int(counts.shape[1] - counts.sum(0)[::-1].argmax())


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide images at random into halves, class by class.

    labels (n,) -> (positions for the choice, positions for the report).
    """
    random, chosen = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        chosen[own[: len(own) // 2]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def prompts_kept(counts: Sequence[np.ndarray], n_images: int, images: str) -> dict[str, Any]:
    """Accuracy by the number of prompts that every class keeps: figure C.2 of the PCME++ paper.

    counts are (c, p) of :meth:`Classifier.right_by_k`: by uncertainty, then in each random order, of which top-1 is the
    mean. images: "others", on which K was chosen, or "reported". best_k is None for a class without a right image.
    """
    own, *others = counts
    best = own.shape[1] - own[:, ::-1].argmax(axis=1)
    return {
        "images": images,
        "top1": (own.sum(axis=0) / n_images).tolist(),
        "random_top1": (np.mean([other.sum(axis=0) for other in others], axis=0) / n_images).tolist(),
        "best_k": [int(k) if right else None for k, right in zip(best, own.max(axis=1), strict=True)],
    }


def verdict(methods: Sequence[Mapping[str, Any]], chance: float) -> str:
    """Judge for each filter whether it helps beyond noise."""
    filtered = [m for m in methods if m["against_random"] is not None]
    if not filtered:
        return "Nothing was filtered."
    beating = [(m["top1"]["value"] if m["top1"]["low"] is None else m["top1"]["low"]) > chance for m in filtered]
    if not any(beating):
        return (
            f"No filter is better than always answering the most frequent class ({100 * chance:.1f}% right), so"
            " whether filtering helps cannot be told. Take another model, other class names, or more images."
        )
    return "\n".join(
        f"{m['name']}: {points(m['against_all'])} points against all prompts, {_judged(m['against_all'])};"
        f" {points(m['against_random_order'])} against a random order with K chosen in the same way,"
        f" {_judged(m['against_random_order'])}."
        if beats
        else f"{m['name']}: not better than always answering the most frequent class."
        for m, beats in zip(filtered, beating, strict=True)
    )


def _judged(difference: Mapping[str, Any]) -> str:
    if difference["low"] is None:
        return "not measured"
    return "which helps" if difference["low"] > 0 else "which hurts" if difference["high"] < 0 else "within noise"


def points(one: Mapping[str, Any] | None) -> str:
    """A difference in percentage points, with its sign and interval."""
    if one is None:
        return "–"
    value, low, high = (one[key] if one[key] is None else f"{100 * one[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]" if low else str(value)
