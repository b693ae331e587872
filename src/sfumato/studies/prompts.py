"""Prompts: class names in templates, one Gaussian for each class, pooled from those of its prompts by weights, and how many prompts are best kept.

It knows nothing of what is reported: which pictures to choose on is its caller's business, zeroshot.py. The formulas are in docs/concepts/prompts.md.
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
"""How prompts become one Gaussian, see :func:`pool_prompts`."""

CLIP_TEMPLATES = Path(__file__).with_name("clip_templates.txt")
"""The 80 templates of CLIP, as the PCME++ paper lists them (C.6)."""

_CLASSES = 64


def read_templates(path: Path | None = None) -> list[str]:
    """Templates of a file, one a line, each with one {} where the class goes; those of CLIP if None.

    Raises:
        UserError: there is no such file, it is not UTF-8 or empty, a line has no {} or two, or occurs twice.
    """
    templates, numbers, _ = read_lines(path or CLIP_TEMPLATES)
    for template, number in zip(templates, numbers, strict=True):
        if template.count("{}") != 1:
            raise UserError(
                f"{path}:{number}: expected one {{}} where the class goes, as in 'a photo of a {{}}.', got {template!r}"
            )
    if twice := next((t for i, t in enumerate(templates) if t in templates[:i]), None):
        raise UserError(f"{path}: the template {twice!r} occurs twice; leave one out")
    return templates


def embed_prompts(model: DualEncoder, classes: Sequence[str], templates: Sequence[str]) -> GaussianEmbedding:
    """(c * p, d) embeddings of c classes in p templates, class by class; 64 classes at a time."""
    parts = []
    with progress_bar("embedding prompts", len(classes) * len(templates)) as advance:
        for start in range(0, len(classes), _CLASSES):
            texts = [t.replace("{}", name) for name in classes[start : start + _CLASSES] for t in templates]
            parts.append(model.embed_texts(texts))
            advance(len(texts))
    return GaussianEmbedding.cat(parts)


def pool_prompts(prompts: GaussianEmbedding, weights: Tensor, *, pooling: str = "mixture") -> GaussianEmbedding:
    r"""One Gaussian for each class, from those of its prompts.

        mean = sum_p w_p mean_p        var = sum_p w_p (var_p + (mean_p - mean)^2)

    the moments of the mixture of the prompts, so that csd to it is the weighted mean of csd to each prompt. With "unit", as CLIP does and
    ProLIP's code: the mean scaled to unit length, and var = sum_p w_p var_p.

    Args:
        prompts: (c * p, d) embeddings, class by class.
        weights: (c, p) weights >= 0; those of a class are divided by their sum.
        pooling: "mixture" or "unit".

    Returns:
        (c, d) embeddings.

    Raises:
        ValueError: the sizes do not fit, the pooling is unknown, or a class has no positive weight.
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
    """(c, p) weights, 1 for the k prompts of each class with the least (c, p) uncertainty; equal ones in their order.

    Args:
        uncertainty: of every prompt, usually its total variance.
        k: how many, 1 to p: one number, or (c,) of them.
    """
    c, p = uncertainty.shape
    kept = torch.arange(p) < torch.as_tensor(k).expand(c).unsqueeze(1)
    return torch.zeros(c, p).scatter_(1, uncertainty.argsort(dim=1, stable=True), kept.float())


def mixture_weights(
    images: GaussianEmbedding, labels: np.ndarray, prompts: GaussianEmbedding, n_classes: int, *, seed: int = 0
) -> Tensor:
    """(c, p) proportions of the prompts in a mixture that fits a few labelled pictures of each class, by expectation maximisation.

    The rule of ProLIP's code: 20 draws of each of five pictures, variances of prompts + 0.02, a Dirichlet prior with concentration 2, a
    start in proportion to 1 / variance; the start stays where a class has no picture.

    Args:
        images: pictures with labels; the first five of a class are used.
        labels: (n,) class numbers.
        prompts: (c * p, d) embeddings with variances.
        n_classes: c.
        seed: of the draws.

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
    """(n, 2) floats, 1 where a picture's class is the closest, and where it is among the five closest; ties in the order of the classes."""
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
    """(c, p) pictures of each class that are classified right when every class keeps its 1, 2 ... p prompts of least (c, p) uncertainty."""
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
    """The K with the most right of all classes of :func:`right_by_k`; of equal ones the largest, which filters least."""
    return int(counts.shape[1] - counts.sum(0)[::-1].argmax())


def best_k_per_class(
    images: GaussianEmbedding, labels: np.ndarray, prompts: GaussianEmbedding, uncertainty: Tensor, start: np.ndarray, *,
    distance: str, pooling: str,
) -> np.ndarray:  # fmt: skip
    """(c,) a K for each class: from (c,) ones to start with, class after class takes the K that gets most pictures of all classes right.

    A class that would win pictures of its own by taking those of others gains nothing. Of equal ones the K at the start stays.
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
    """(positions to choose on, positions to report on): a random half of every class each; an odd picture is reported on."""
    random, chosen = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        chosen[own[: len(own) // 2]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def _distances(images: GaussianEmbedding, classes: GaussianEmbedding, distance: str) -> Tensor:
    """(n, c), all at once: 100 MB for 25,000 pictures and 1,000 classes."""
    return torch.cat([block for _, block in distance_blocks(images, classes, distance)])
