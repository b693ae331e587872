r"""A Laplace posterior of the two projection layers (BayesVLM): what the data left open about the last matrix.

An embedding is f = W a (+ bias + residual), with the input a of the projection layer. The posterior of W makes f a
Gaussian with covariance (a^T A'^-1 a) B'^-1, or V diag(g) V^T with the eigenvectors V of B and

    g_j = sum_i (u_i . a)^2 / (n alpha_i beta_j + lambda)                                   exact damping
    g_j = sum_i (u_i . a)^2 / (sqrt(n) alpha_i + sqrt(lambda)) / (sqrt(n) beta_j + sqrt(lambda))    split, as published

One pass over pairs and one search for lambda; no gradient step. With final embeddings alone it is not available.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.posthoc.curvature import KroneckerFactors, kronecker_factors, with_bias_column
from sfumato.posthoc.evidence import Damping, EvidenceForm, best_prior_precision
from sfumato.posthoc.method import (
    FrozenPairs,
    PosthocMethod,
    Side,
    check_embeddings,
    check_rows,
    check_side,
    pack_options,
    taken,
    unpack_options,
)

Covariance = Literal["diagonal", "full"]
"""The diagonal of an embedding's covariance, as published, or all of it."""

FACTOR_NAMES = {"image": ("A_img", "B_img"), "text": ("A_txt", "B_txt")}
"""Names of the factors in a file, those of the released code."""

_CLASS_BATCH, _PSEUDO_DATA, _MIN_PAIRS = 4096, 10.0, 16


@dataclass(frozen=True, eq=False)
class ProjectionPosterior:
    """The posterior of one projection layer."""

    activations: Tensor  # (P, P) factor A; (P + 1, P + 1) with a bias column
    gradients: Tensor  # (d, d) factor B
    prior_precision: float  # lambda
    pseudo_data: float = _PSEUDO_DATA  # n, how often the data count
    damping: Damping = "split"  # see :data:`~sfumato.posthoc.evidence.Damping`
    bias_column: bool = False  # whether a 1 is appended to the layer's inputs

    def __post_init__(self) -> None:
        for name in ("activations", "gradients"):
            value = getattr(self, name)
            check_rows(value, "ProjectionPosterior", name, d=len(value))
        for name in ("prior_precision", "pseudo_data"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"ProjectionPosterior: {name} must be positive, got {value}")

    @cached_property
    def _a(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.activations.double())
        return values.clamp_min(0), vectors

    @cached_property
    def _b(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.gradients.double())
        return values.clamp_min(0), vectors

    @property
    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """(P,) and (d,) eigenvalues of the factors, ascending, negative rounding set to 0."""
        return self._a[0], self._b[0]

    @property
    def basis(self) -> Tensor:
        """(d, d) eigenvectors of the covariance of every embedding, in columns."""
        return self._b[1]

    def spectrum(self, hidden: Tensor) -> Tensor:
        """The eigenvalues of the covariance of embeddings. hidden (n, P) -> (n, d)."""
        check_rows(hidden, "laplace", "hidden", d=len(self.activations) - self.bias_column)
        (alpha, u), (beta, _) = self._a, self._b
        squared = (with_bias_column(hidden.double(), self.bias_column) @ u).square()
        n, value = self.pseudo_data, self.prior_precision
        if self.damping == "exact":
            return squared @ (n * torch.outer(alpha, beta) + value).reciprocal()
        own = squared @ (n**0.5 * alpha + value**0.5).reciprocal()
        return torch.outer(own, (n**0.5 * beta + value**0.5).reciprocal())

    def variance(self, hidden: Tensor) -> Tensor:
        """The diagonal of the covariance of embeddings. hidden (n, P) -> (n, d)."""
        return self.spectrum(hidden) @ self.basis.square().T


def cosine_moments(image: GaussianEmbedding, text: GaussianEmbedding) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of the cosine of independent Gaussians with diagonal covariances, between all pairs.

        n = ||f||^2 + sum(v)
        mean = f_i . f_t / sqrt(n_i n_t),    variance = sum[(f_i^2 + v_i) v_t + v_i f_t^2] / (n_i n_t)

    The lengths are taken at their root mean squares, as constants. The variance is that of the inner product.

    Paper: Baumann et al., "Post-hoc probabilistic vision-language models", 2025 (BayesVLM).

    image (n, d), text (m, d).
    """
    lengths = [x.mean.square().sum(1) + x.var.sum(1) for x in (image, text)]
    scale = torch.outer(lengths[0], lengths[1])
    f_i, v_i, f_t, v_t = image.mean, image.var, text.mean, text.var
    variance = (f_i.square() + v_i) @ v_t.T + v_i @ f_t.square().T
    return f_i @ f_t.T / scale.sqrt(), variance / scale


def probit_softmax(mean: Tensor, variance: Tensor) -> Tensor:
    """Class probabilities from the mean and variance of logits, softmax(mean / sqrt(1 + pi/8 variance)).

    mean (n, m), variance (n, m) -> (n, m).
    """
    return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


class LaplaceProjections(PosthocMethod):
    r"""Embeddings with the posterior variance of their projection layer.

    :meth:`embed` gives mean = f / sqrt(m), var = v / m with m = ||f||^2 + sum(v), so that ||mean||^2 + sum(var) = 1 and
    csd = 2 - 2 * expected cosine. The means point as the frozen embeddings do, and are shorter for uncertain items:
    csd and the inner product rank by the expected cosine, the cosine of the means as the frozen model.

    Paper: Baumann et al., "Post-hoc probabilistic vision-language models", 2025 (BayesVLM).
    """

    name = "laplace"
    summary = "total posterior variance of the item's embedding, relative to its squared length, in [0, 1]"
    per_item = True
    needs_hidden = True

    def __init__(
        self,
        image: ProjectionPosterior,
        text: ProjectionPosterior,
        *,
        logit_scale: float,
        logit_bias: float | None = None,
    ) -> None:
        self.image, self.text = image, text
        self.logit_scale, self.logit_bias = logit_scale, logit_bias

    @classmethod
    def fit(
        cls,
        pairs: FrozenPairs,
        *,
        seed: int = 0,
        class_batch: int = _CLASS_BATCH,
        pseudo_data: float = _PSEUDO_DATA,
        damping: Damping = "split",
        evidence: EvidenceForm = "corrected",
        prior_precision: tuple[float, float] | None = None,
    ) -> Self:
        """Factors by one pass over the pairs, prior precisions by the evidence.

        The softmax of CLIP or, with pairs.logit_bias, the sigmoid of SigLIP. A layer with a bias gets a bias column.
        An item counts once for each of its pairs.
        """
        pairs.at_least(_MIN_PAIRS, cls.name)
        scale = _checked_scale(pairs, with_matrices=prior_precision is None)
        order = pairs.pairs[torch.randperm(len(pairs.pairs), generator=torch.Generator().manual_seed(seed))]
        rows: dict[Side, Tensor] = {"image": order[:, 0], "text": order[:, 1]}
        others: dict[Side, Side] = {"image": "text", "text": "image"}
        found = []
        for k, (side, other) in enumerate(others.items()):
            hidden, bias = pairs.hidden(side), pairs.projection_bias(side)
            assert hidden is not None
            factors = kronecker_factors(
                pairs.embeddings(side)[rows[side]],
                hidden[rows[side]],
                pairs.embeddings(other)[rows[other]],
                logit_scale=scale,
                logit_bias=pairs.logit_bias,
                bias_column=bias is not None,
                class_batch=class_batch,
            )
            value = prior_precision[k] if prior_precision else _squared_norm(pairs, side)
            found.append(
                _posterior(factors, value, prior_precision is None, pseudo_data, damping, evidence, bias is not None)
            )
        return cls(*found, logit_scale=scale, logit_bias=pairs.logit_bias)

    @classmethod
    def from_factors(
        cls,
        source: Mapping[str, Tensor] | str | Path,
        *,
        logit_scale: float,
        logit_bias: float | None = None,
        prior_precision: tuple[float, float] | None = None,
        squared_norms: tuple[float, float] | None = None,
        pseudo_data: float = _PSEUDO_DATA,
        damping: Damping = "split",
        evidence: EvidenceForm = "corrected",
        bias_column: bool = False,
    ) -> Self:
        """Use factors that somebody has published."""
        factors = source if isinstance(source, Mapping) else _read(Path(source))
        values = prior_precision or squared_norms
        if values is None or (prior_precision and squared_norms):
            raise ValueError("laplace: give one of prior_precision and squared_norms, for (images, texts)")
        found = []
        for (a, b), value in zip(FACTOR_NAMES.values(), values, strict=True):
            own = KroneckerFactors(taken(factors, a, cls.name), taken(factors, b, cls.name))
            found.append(_posterior(own, value, prior_precision is None, pseudo_data, damping, evidence, bias_column))
        return cls(*found, logit_scale=logit_scale, logit_bias=logit_bias)

    def posterior(self, side: Side) -> ProjectionPosterior:
        """The posterior of one side's layer."""
        check_side(side)
        return self.image if side == "image" else self.text

    def embed_raw(self, side: Side, x: Tensor, *, hidden: Tensor | None) -> GaussianEmbedding:
        """The Gaussians of raw embeddings, with diagonal covariances. x (n, d), hidden (n, P)."""
        own = self.posterior(side)
        x, hidden = _checked_items(own, x, hidden)
        return GaussianEmbedding(x, own.variance(hidden).log())

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; the scale is that of the class docstring, the dtype that of x or better."""
        raw = self.embed_raw(side, x, hidden=hidden)
        length = raw.mean.square().sum(1, keepdim=True) + raw.total_variance.unsqueeze(1)
        found = GaussianEmbedding(raw.mean / length.sqrt(), raw.log_var - length.log())
        return found if x.dtype == torch.float64 else found.to(torch.float32)

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; the total variance of :meth:`embed`."""
        return self.embed(side, queries, hidden=hidden).total_variance

    def logits(
        self,
        images: Tensor,
        texts: Tensor,
        *,
        image_hidden: Tensor | None,
        text_hidden: Tensor | None,
        covariance: Covariance = "diagonal",
        official: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the model's logits between all pairs.

        images (n, d), texts (m, d), image_hidden, text_hidden (n, P).
        """
        if covariance not in ("diagonal", "full"):
            raise ValueError(f"laplace: unknown covariance {covariance!r}; known: diagonal, full")
        image = self.embed_raw("image", images, hidden=image_hidden)
        text = self.embed_raw("text", texts, hidden=text_hidden)
        mean, variance = cosine_moments(image, text)
        if covariance == "full":
            assert image_hidden is not None and text_hidden is not None
            variance = self._full_variance(image.mean, text.mean, image_hidden, text_hidden)
        bias = 0.0 if official or self.logit_bias is None else self.logit_bias
        return self.logit_scale * mean + bias, self.logit_scale**2 * variance

    def _full_variance(self, images: Tensor, texts: Tensor, image_hidden: Tensor, text_hidden: Tensor) -> Tensor:
        """[tr(S_i S_t) + f_i^T S_t f_i + f_t^T S_i f_t] / (n_i n_t) in the eigenvectors of both covariances."""
        g_i, g_t = self.image.spectrum(image_hidden), self.text.spectrum(text_hidden)
        v_i, v_t = self.image.basis, self.text.basis
        variance = g_i @ (v_i.T @ v_t).square() @ g_t.T
        variance += (images @ v_t).square() @ g_t.T + g_i @ (texts @ v_i).square().T
        lengths = images.square().sum(1) + g_i.sum(1), texts.square().sum(1) + g_t.sum(1)
        return variance / torch.outer(*lengths)

    def nlpd(self, pairs: FrozenPairs) -> float:
        """Mean negative log probit probability of the right partner, over both directions."""
        mean, variance = self.logits(
            pairs.images, pairs.texts, image_hidden=pairs.image_hidden, text_hidden=pairs.text_hidden
        )
        image, text = pairs.pairs.T
        i2t = probit_softmax(mean, variance)[image, text]
        t2i = probit_softmax(mean.T, variance.T)[text, image]
        return -float((i2t.log().mean() + t2i.log().mean()) / 2)

    def choose_pseudo_data(
        self,
        held_out: FrozenPairs,
        squared_norms: tuple[float, float],
        *,
        candidates: Sequence[float] = (1.0, 3.0, 10.0, 30.0, 100.0),
        evidence: EvidenceForm = "corrected",
    ) -> Self:
        """The pseudo-data count with the smallest held-out :meth:`nlpd`; each gets its own prior precisions."""
        tried = [self._with_pseudo_data(n, squared_norms, evidence) for n in candidates]
        return min(tried, key=lambda method: method.nlpd(held_out))

    def _with_pseudo_data(self, n: float, squared_norms: tuple[float, float], evidence: EvidenceForm) -> Self:
        found = []
        for own, norm in zip((self.image, self.text), squared_norms, strict=True):
            value = best_prior_precision(*own.eigenvalues, norm, pseudo_data=n, damping=own.damping, form=evidence)
            found.append(replace(own, pseudo_data=n, prior_precision=value))
        return type(self)(*found, logit_scale=self.logit_scale, logit_bias=self.logit_bias)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`."""
        options: dict[str, Any] = {"logit_scale": self.logit_scale, "logit_bias": self.logit_bias}
        tensors: dict[str, Tensor] = {}
        for side, names in FACTOR_NAMES.items():
            own = self.image if side == "image" else self.text
            tensors |= dict(zip(names, (own.activations, own.gradients), strict=True))
            options[side] = {k: v for k, v in vars(own).items() if isinstance(v, float | int | str)}
        return {**tensors, "options": pack_options(options)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        options = unpack_options(state, cls.name)
        found = []
        for side, (a, b) in FACTOR_NAMES.items():
            factors = taken(state, a, cls.name), taken(state, b, cls.name)
            found.append(ProjectionPosterior(*factors, **options[side]))
        return cls(*found, logit_scale=options["logit_scale"], logit_bias=options["logit_bias"])


def _posterior(
    factors: KroneckerFactors,
    value: float,
    is_squared_norm: bool,
    pseudo_data: float,
    damping: Damping,
    evidence: EvidenceForm,
    bias_column: bool,
) -> ProjectionPosterior:
    """A posterior with a given prior precision, or with the best one for a squared norm."""
    given = 1.0 if is_squared_norm else value
    found = ProjectionPosterior(*factors, given, pseudo_data, damping, bias_column)
    if not is_squared_norm:
        return found
    best = best_prior_precision(*found.eigenvalues, value, pseudo_data=pseudo_data, damping=damping, form=evidence)
    return replace(found, prior_precision=best)


def _checked_scale(pairs: FrozenPairs, *, with_matrices: bool) -> float:
    """The logit scale, if everything is there."""
    needed = ["image_hidden", "text_hidden", "logit_scale"]
    needed += ["image_projection", "text_projection"] if with_matrices else []
    missing = [name for name in needed if getattr(pairs, name) is None]
    if missing or pairs.logit_scale is None:
        raise ValueError(
            f"laplace: the pairs have no {', '.join(missing)}. It needs the inputs and the matrices of the projection"
            " layers and the logit scale of the model; with final embeddings alone it is not available"
        )
    return float(pairs.logit_scale)


def _squared_norm(pairs: FrozenPairs, side: Side) -> float:
    """Sum of squares of all parameters of a projection layer."""
    return sum(
        float(x.double().square().sum()) for x in (pairs.projection(side), pairs.projection_bias(side)) if x is not None
    )


def _checked_items(own: ProjectionPosterior, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Raw embeddings and hidden features in float64."""
    check_embeddings(x, "laplace", "embeddings", d=len(own.gradients))
    if hidden is None:
        raise ValueError("laplace: needs the inputs of the projection layer; pass hidden=")
    check_rows(hidden, "laplace", "hidden", n=len(x), d=len(own.activations) - own.bias_column)
    return x.double(), hidden.double()


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    if not path.is_file():
        raise FileNotFoundError(f"no Kronecker factors at {path}")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from error
