"""Prompts: class names in templates, pooling of prompts to one Gaussian per class, and the number of prompts to keep.

The caller, zeroshot.py, decides which images are used for the choice and which are reported. The formulas are in
docs/concepts/prompts.md.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import read_lines
from sfumato.progress import progress_bar
from sfumato.search.exact import distance_blocks, top_k

PROMPT_POOLINGS = ("mixture", "unit")
"""The ways to pool prompts into one Gaussian, see :func:`pool_prompts`."""

CLIP_TEMPLATES = Path(__file__).with_name("clip_templates.txt")
"""The 80 templates of CLIP, as the PCME++ paper lists them (C.6)."""

_CLASSES = 64
"""Number of classes that are embedded or pooled at once."""


def read_templates(path: Path | None = None) -> list[str]:
    """Read prompt templates.

    Args:
        path: of a text file with one template per line, each with one {} for the class; the templates of CLIP if None.

    Returns:
        The templates.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or a line has no {} or several, or occurs twice.
    """
    templates, numbers, _ = read_lines(path or CLIP_TEMPLATES)
    for template, number in zip(templates, numbers, strict=True):
        if template.count("{}") != 1:
            raise UserError(
                f"{path}:{number}: expected one {{}} for the class, as in 'a photo of a {{}}.', got {template!r}"
            )
    if twice := next((t for i, t in enumerate(templates) if t in templates[:i]), None):
        raise UserError(f"{path}: the template {twice!r} occurs twice; leave one out")
    return templates


def embed_prompts(model: DualEncoder, classes: Sequence[str], templates: Sequence[str]) -> GaussianEmbedding:
    """Embed every class in every template.

    Args:
        model: embeds the prompts.
        classes: c names.
        templates: p templates with one {} each.

    Returns:
        (c * p, d) embeddings, class by class.
    """
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

    Args:
        prompts: (c * p, d) embeddings, class by class.
        weights: (c, p) weights >= 0; the weights of a class are divided by their sum.
        pooling: "mixture" or "unit".

    Returns:
        (c, d) embeddings.

    Raises:
        ValueError: sizes do not fit, the pooling is unknown, a weight is negative, or a class has no positive weight.
    """
    c, p = weights.shape
    if prompts.n != c * p or pooling not in PROMPT_POOLINGS:
        raise ValueError(
            f"pool_prompts: got {prompts.n} prompts, weights {c} x {p} and pooling {pooling!r};"
            f" expected {c * p} prompts, and {' or '.join(PROMPT_POOLINGS)}"
        )
    if (weights < 0).any() or not (weights.sum(1) > 0).all():
        raise ValueError("pool_prompts: weights must not be negative, and every class needs a positive one")
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
    """Choose the k most certain prompts of each class; ties are decided by order.

    Args:
        uncertainty: (c, p) of every prompt, usually the total variance.
        k: number of prompts, 1 to p: one number for all classes, or (c,) numbers.

    Returns:
        (c, p) weights: 1 for the chosen prompts, else 0.
    """
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

    Args:
        images: (n, d) embeddings; the first five of a class are used.
        labels: (n,) class numbers.
        prompts: (c * p, d) embeddings with variances.
        n_classes: c.
        seed: of the samples.

    Returns:
        (c, p) float64 weights; those of a class sum to 1.

    Source: https://github.com/naver-ai/prolip, "bprw"; Chun et al., ICLR 2025, arXiv 2410.18857.
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


def right_at(images: GaussianEmbedding, labels: np.ndarray, classes: GaussianEmbedding, distance: str) -> np.ndarray:
    """Classify images by the closest class; at equal distances the earlier class is closer.

    Args:
        images: (n, d) embeddings.
        labels: (n,) class numbers.
        classes: (c, d) embeddings.
        distance: name in DISTANCES.

    Returns:
        (n, 2) floats: 1 if the class of an image is the closest one, and if it is among the five closest ones; else 0.
    """
    _, order = top_k(images, classes, 5, distance)
    same = order.numpy() == labels[:, None]
    return np.stack([same[:, 0], same.any(1)], axis=1).astype(float)


def right_by_k(
    images: GaussianEmbedding,
    labels: np.ndarray,
    prompts: GaussianEmbedding,
    uncertainty: Tensor,
    *,
    distance: str,
    pooling: str,
) -> np.ndarray:
    """Count right images for every number of prompts that all classes keep.

    Args:
        images: (n, d) embeddings.
        labels: (n,) class numbers.
        prompts: (c * p, d) embeddings, class by class.
        uncertainty: (c, p) of every prompt; the most certain ones are kept.
        distance: name in DISTANCES.
        pooling: see :func:`pool_prompts`.

    Returns:
        (c, p) numbers of correctly classified images of each class if every class keeps 1, 2 ... p prompts.
    """
    c, p = uncertainty.shape
    counts = np.zeros((c, p), np.int64)
    with progress_bar("choosing K", p) as advance:
        for k in range(p):
            classes = pool_prompts(prompts, certain_prompts(uncertainty, k + 1), pooling=pooling)
            _, closest = top_k(images, classes, 1, distance)
            counts[:, k] = np.bincount(labels[closest[:, 0].numpy() == labels], minlength=c)
            advance(1)
    return counts


def best_k(counts: np.ndarray) -> int:
    """Choose one K for all classes.

    Args:
        counts: (c, p) of :func:`right_by_k`.

    Returns:
        The K with the most correct images; of tied values the largest, which filters least.
    """
    return int(counts.shape[1] - counts.sum(0)[::-1].argmax())


def best_k_per_class(
    images: GaussianEmbedding,
    labels: np.ndarray,
    prompts: GaussianEmbedding,
    uncertainty: Tensor,
    start: np.ndarray,
    *,
    distance: str,
    pooling: str,
) -> np.ndarray:
    """Choose a K for each class, one class after the other.

    Each class takes the K for which the most images of all classes are correct. So a class has no advantage from
    attracting images of other classes. If no K is better than the initial one, a class keeps the initial one.

    Args:
        images: (n, d) embeddings.
        labels: (n,) class numbers.
        prompts: (c * p, d) embeddings, class by class.
        uncertainty: (c, p) of every prompt; the most certain ones are kept.
        start: (c,) initial K of each class.
        distance: name in DISTANCES.
        pooling: see :func:`pool_prompts`.

    Returns:
        (c,) K of each class.
    """
    (n_classes, p), best, own = uncertainty.shape, start.copy(), torch.from_numpy(labels)
    classes = pool_prompts(prompts, certain_prompts(uncertainty, torch.from_numpy(start)), pooling=pooling)
    now = _distances(images, classes, distance)  # (n, c)
    with progress_bar("choosing K per class", n_classes) as advance:
        for c in range(n_classes):
            repeated = GaussianEmbedding.cat([prompts[c * p : (c + 1) * p]] * p)
            kept = certain_prompts(uncertainty[c].expand(p, p), torch.arange(1, p + 1))
            tried = _distances(images, pool_prompts(repeated, kept, pooling=pooling), distance)  # (n, p)
            now[:, c] = torch.inf
            nearest, which = now.min(dim=1, keepdim=True)
            taken = (tried < nearest) | ((tried == nearest) & (which > c))
            counts = torch.where(taken, (own == c).unsqueeze(1), which == own.unsqueeze(1)).sum(0)
            if counts.max() > counts[start[c] - 1]:
                best[c] = p - int(counts.flip(0).argmax())
            now[:, c] = tried[:, best[c] - 1]
            advance(1)
    return best


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide images at random into halves, class by class.

    Args:
        labels: (n,) class numbers.
        seed: of the choice.

    Returns:
        (positions for the choice, positions for the report); with an odd number of images the report has one more.
    """
    random, chosen = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        chosen[own[: len(own) // 2]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def _distances(images: GaussianEmbedding, classes: GaussianEmbedding, distance: str) -> Tensor:
    """(n, c) distances in one tensor: 100 MB for 25,000 images and 1,000 classes."""
    return torch.cat([block for _, block in distance_blocks(images, classes, distance)])
