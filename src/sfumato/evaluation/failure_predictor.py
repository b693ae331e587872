"""A learnt estimator of uncertainty: the probability that a query's best item is wrong, predicted from its
embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.nn import functional

from sfumato.evaluation.estimators import Estimator
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding

_FORMAT = "sfumato-miss-head-1"


@dataclass(frozen=True, eq=False)
class FailurePredictor:
    """Predicts from a query's embedding the probability that its best item is wrong.

    A logistic regression on the standardised means and log variances. It is fitted on queries with known outcomes, and
    it needs no gallery to score new queries.

    Attributes:
        centre: (f,) means of the features; f = d, or 2 d with log variances.
        scale: (f,) standard deviations of the features.
        weight: (f,) weights of the standardised features.
        bias: logit at the centre.
        penalty: strength of the squared penalty on the weights; cross-validation chose it.

    Paper: the simplest member of the family of Yoo and Kweon, "Learning loss for active learning", CVPR 2019.
    """

    centre: Tensor
    scale: Tensor
    weight: Tensor
    bias: float
    penalty: float

    @classmethod
    def fit(
        cls,
        queries: GaussianEmbedding,
        missed: np.ndarray,
        *,
        penalties: Sequence[float] = (0.01, 0.1, 1.0, 10.0),
        folds: int = 5,
        seed: int = 0,
    ) -> "FailurePredictor":
        """Fit on queries with known outcomes, which must differ from the queries that are scored later.

        Args:
            queries: (n, d) embeddings.
            missed: (n,) 1 where the best item was wrong, else 0.
            penalties: candidates; the one with the lowest log loss in cross-validation is used.
            folds: number of folds of the cross-validation.
            seed: of the assignment to folds.

        Returns:
            The fitted predictor.

        Raises:
            ValueError: shapes differ, there are only hits or only misses, or fewer queries than folds.
        """
        target = torch.from_numpy(np.asarray(missed, float))
        if target.shape != (queries.n,):
            raise ValueError(
                f"FailurePredictor: got {tuple(target.shape)} outcomes for {queries.n} queries; give one for each"
            )
        if not ((target == 0) | (target == 1)).all() or target.min() == target.max():
            raise ValueError("FailurePredictor: outcomes must be 0 and 1, and both must occur")
        if not 2 <= folds <= queries.n:
            raise ValueError(
                f"FailurePredictor: folds must be between 2 and the number of queries {queries.n}, got {folds}"
            )
        with_variance = bool(torch.isfinite(queries.log_var).all())
        features = _features(queries, with_variance)
        centre, scale = features.mean(0), features.std(0, correction=0)
        scale = torch.where(scale > 1e-9, scale, torch.ones_like(scale))
        z = (features - centre) / scale
        fold = torch.from_numpy(np.random.default_rng(seed).permutation(queries.n) % folds)
        losses = []
        for penalty in penalties:
            held = torch.empty_like(target)
            for k in range(folds):
                weight, bias = _logistic(z[fold != k], target[fold != k], penalty)
                held[fold == k] = z[fold == k] @ weight + bias
            losses.append(float(functional.binary_cross_entropy_with_logits(held, target)))
        best = penalties[int(np.argmin(losses))]
        weight, bias = _logistic(z, target, best)
        return cls(centre, scale, weight, bias, best)

    def score(self, queries: GaussianEmbedding) -> Tensor:
        """Predict failures.

        Args:
            queries: (n, d) embeddings of the model that it was fitted on.

        Returns:
            (n,) float64 probabilities in (0, 1) that the best item of each query is wrong.

        Raises:
            ValueError: another number of dimensions, or points where it was fitted on Gaussians.
        """
        with_variance = len(self.weight) == 2 * queries.d
        if not with_variance and len(self.weight) != queries.d:
            raise ValueError(
                f"FailurePredictor: fitted on {len(self.weight)} features, but {queries.d} dimensions give other"
                " features; use embeddings of the model that it was fitted on"
            )
        features = _features(queries, with_variance)
        if not torch.isfinite(features).all():
            raise ValueError("FailurePredictor: fitted on Gaussians with variances, got points or NaN")
        device = features.device
        z = (features - self.centre.to(device)) / self.scale.to(device)
        return torch.sigmoid(z @ self.weight.to(device) + self.bias)

    def estimator(self, name: str = "predicted_miss") -> Estimator:
        """Convert this predictor to an :class:`~sfumato.evaluation.estimators.Estimator`.

        Args:
            name: of the estimator.

        Returns:
            An estimator to measure beside those of ESTIMATORS.
        """
        return Estimator(
            name,
            "probability that the best item is wrong, by a logistic regression fitted on other queries",
            "both",
            "n d, fitted once on labelled queries",
            lambda block: self.score(block.queries),
            needs_gallery=False,
        )

    def save(self, path: str | Path) -> None:
        """Write the predictor into one safetensors file, atomically.

        Args:
            path: of the file.
        """
        # The file calls the scale "spread".
        tensors = {"centre": self.centre, "spread": self.scale, "weight": self.weight}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        tensors["numbers"] = torch.tensor([self.bias, self.penalty], dtype=torch.float64)
        write_atomically(path, safetensors_bytes(tensors, {"format": _FORMAT}))

    @classmethod
    def load(cls, path: str | Path) -> "FailurePredictor":
        """Read a file of :meth:`save`.

        Args:
            path: of the file.

        Returns:
            The predictor that was saved.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or not a file of :meth:`save`.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no failure predictor at {path}; write one with FailurePredictor.save()")
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != _FORMAT:
                    raise ValueError(f"{path}: not a failure predictor of sfumato (expected format {_FORMAT!r})")
                bias, penalty = file.get_tensor("numbers").tolist()
                centre, scale, weight = (file.get_tensor(name) for name in ("centre", "spread", "weight"))
                return cls(centre, scale, weight, bias, penalty)
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or not a failure predictor ({error}); fit and write it again") from error


def _features(queries: GaussianEmbedding, with_variance: bool) -> Tensor:
    return torch.cat([queries.mean, queries.log_var] if with_variance else [queries.mean], dim=1).double()


def _logistic(z: Tensor, target: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and bias of a logistic regression: mean log loss + penalty / 2 ||weight||^2, the bias free."""
    parameters = torch.zeros(z.shape[1] + 1, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(z @ parameters[:-1] + parameters[-1], target)
        loss = loss + penalty / 2 * parameters[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    found = parameters.detach()
    return found[:-1].clone(), float(found[-1])
