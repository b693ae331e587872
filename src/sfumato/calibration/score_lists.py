r"""Probabilities of the hits of any search engine, from its lists of scores alone. NumPy is all that it needs.

For a hit of score s in the list of its query, with the largest score top, the second largest, the mean and the standard
deviation d of the list, and r - 1 larger scores:

    gap = (s - top) / d             lead = (top - second) / d           crowd = -log(sum over the list of exp(gap))
    order = -log(r)                 height = (top - mean) / d

    logit = intercept + the weighted sum of these, of the score itself where scores of different queries are comparable,
            and of further evidence

None of the five changes if all scores of a query are multiplied and shifted. The weights of gap, order and score are
not negative, so a higher score in a list never gets a lower probability. They are fitted by logistic regression with a
ridge penalty; a hit of rank r weighs 1 / r.
"""

import json
import math
import warnings
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.arrays import sigmoid
from sfumato.calibration.logistic import Floats, HitLists, ScoreFormula, fit_formula, log_losses, priors
from sfumato.errors import refuse_newer
from sfumato.files import write_json

_FORMAT = 1

_HUGE = 1e100

_UPSIDE_DOWN = (
    "hits match more often where the score is smaller: if scores are distances, give higher_is_better=False"
    " (--lower-is-better)"
)

_SAME = object()
"""An argument that stays as it is."""


class ScoreCalibrator:
    """Match probabilities for the hits of any search engine, in the manner of scikit-learn.

    It sees whole lists of hits: what is learnt is how far a hit stands above the others of its query. Fit and predict
    with lists of about the same length. Nothing of scikit-learn is needed; `clone`, `Pipeline` and `GridSearchCV` take
    it.

    Args:
        higher_is_better: whether a larger score is a better hit; False for distances.
        comparable: whether equal scores of different queries mean the same, as those of BM25 hardly do. "auto": the
            held-out log loss decides.
        penalty: strength of the ridge penalty on the weights of standardised features.
        prior: "bm25", "cosine" or "fusion" (reciprocal ranks): start from constants that were fitted on captions of
            photographs; or a file of :meth:`save`, for its formula. They predict without :meth:`fit`, as a guess; a
            fit goes from them to what the labels say.

    Example:
        >>> scores = [9.0, 4.0, 3.5, 3.0, 5.0, 4.9, 4.8, 4.7]
        >>> query = [1, 1, 1, 1, 2, 2, 2, 2]
        >>> calibrator = ScoreCalibrator().fit(scores, [1, 0, 0, 0, 0, 1, 0, 0], groups=query)
        >>> calibrator.predict_proba(scores, groups=query)[:, 1].round(2)
        array([0.62, 0.32, 0.26, 0.23, 0.39, 0.24, 0.15, 0.09])
    """

    _estimator_type = "classifier"
    classes_ = np.array([0, 1])
    _of_file: tuple[str, ScoreFormula] | None = None  # a prior that is a file, and what it says; read once

    def __init__(
        self,
        *,
        higher_is_better: bool = True,
        comparable: bool | str = "auto",
        penalty: float = 1.0,
        prior: str | Path | None = None,
    ) -> None:
        self.higher_is_better, self.comparable, self.penalty, self.prior = higher_is_better, comparable, penalty, prior

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"ScoreCalibrator({given})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments, for scikit-learn.

        Args:
            deep: no meaning here.

        Returns:
            The arguments by name.
        """
        return {name: getattr(self, name) for name in ("higher_is_better", "comparable", "penalty", "prior")}

    def set_params(
        self, *, higher_is_better: Any = _SAME, comparable: Any = _SAME, penalty: Any = _SAME, prior: Any = _SAME
    ) -> "ScoreCalibrator":
        """Change arguments, for scikit-learn.

        Args:
            higher_is_better, comparable, penalty, prior: new values; those that are left out stay.

        Returns:
            The calibrator itself.
        """
        given = {"higher_is_better": higher_is_better, "comparable": comparable, "penalty": penalty, "prior": prior}
        vars(self).update({name: value for name, value in given.items() if value is not _SAME})
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        target, classes = TargetTags(required=True), ClassifierTags(multi_class=False)
        inputs = InputTags(one_d_array=True)
        return Tags(estimator_type="classifier", target_tags=target, classifier_tags=classes, input_tags=inputs)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "formula_") or self.prior is not None

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> "ScoreCalibrator":
        """Learn from lists of hits and which of them match.

        Args:
            X: (n,) scores of n hits of several queries, or (n, 1 + e) scores and e columns of further evidence, such
                as another score. Without groups the last of two or more columns is
                the query of the hit, a number.
            y: (n,) 1 where a hit matches, 0 where it does not, NaN where nobody judged.
            groups: (n,) the query of each hit, numbers or texts.

        Returns:
            The calibrator itself, with `formula_`.

        Raises:
            ValueError: sizes do not fit, a score is not finite, a label is not 0, 1 or NaN, or all labels are equal.
        """
        self._check_arguments()
        lists = self._read(X, groups)
        label = _labels(y, len(lists.score))[lists.order]
        judged = label[~np.isnan(label)]
        if judged.min(initial=1) >= judged.max(initial=0):
            raise ValueError("ScoreCalibrator: all labels are equal; give hits that match and hits that do not")
        if lists.is_upside_down(label):
            warnings.warn(_UPSIDE_DOWN, stacklevel=2)
        self.formula_ = fit_formula(lists, label, comparable=self.comparable, penalty=self.penalty, prior=self._prior())
        return self

    def decision_function(self, X: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Floats:
        """Logits of matches.

        Args:
            X, groups: hits as for :meth:`fit`; whole lists.

        Returns:
            (n,) logits.

        Raises:
            ValueError: as for :meth:`fit`; or it was not fitted and has no prior.
        """
        lists, logit = self._logit(X, groups)
        found = np.empty(len(logit))
        found[lists.order] = logit
        return found

    def predict_proba(self, X: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Floats:
        """Probabilities that hits match.

        Args:
            X, groups: see :meth:`decision_function`.

        Returns:
            (n, 2) probabilities of no match and of a match.

        Raises:
            ValueError: see :meth:`decision_function`.
        """
        p = sigmoid(self.decision_function(X, groups))
        return np.stack([1 - p, p], axis=1)

    def predict(self, X: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Which hits match more probably than not.

        Args:
            X, groups: see :meth:`decision_function`.

        Returns:
            (n,) 0 and 1.

        Raises:
            ValueError: see :meth:`decision_function`.
        """
        return (self.decision_function(X, groups) > 0).astype(np.int64)

    def expected_matches(self, X: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Floats:
        """The expected number of matches in each list.

        Args:
            X, groups: see :meth:`decision_function`.

        Returns:
            (q,) sums of probabilities, by list in the order of the first hits.

        Raises:
            ValueError: see :meth:`decision_function`.
        """
        lists, logit = self._logit(X, groups)
        return lists.sums(sigmoid(logit))

    def nothing_matches(self, X: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Floats:
        """The probability that no hit of a list matches.

        It is fitted on the lists: matches of a query exclude each other or come together, so it is no product.

        Args:
            X, groups: see :meth:`decision_function`.

        Returns:
            (q,) probabilities, at most that the first hit does not match.

        Raises:
            ValueError: see :meth:`decision_function`.
        """
        return self._known().nothing_matches(*self._logit(X, groups))

    def score(self, X: npt.ArrayLike, y: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> float:
        """Minus the log loss, where a hit of rank r weighs 1 / r: what `GridSearchCV` maximises.

        Args:
            X, groups: see :meth:`decision_function`.
            y: (n,) labels.

        Returns:
            The mean, in nats.

        Raises:
            ValueError: see :meth:`decision_function`.
        """
        lists, logit = self._logit(X, groups)
        label = _labels(y, len(logit))[lists.order]
        weight = ~np.isnan(label) / lists.rank()
        if not weight.any():
            raise ValueError("ScoreCalibrator: no label of y is 0 or 1; give some")
        return -float(np.average(log_losses(logit, np.nan_to_num(label)), weights=weight))

    def save(self, path: str | Path) -> None:
        """Write the calibrator as JSON.

        Args:
            path: file; an existing one is replaced in one step.

        Raises:
            ValueError: it was not fitted and has no prior.
        """
        arguments = self.get_params() | {"prior": None if self.prior is None else str(self.prior)}
        values: dict[str, Any] = {"format": _FORMAT, "arguments": arguments, "formula": self._known().to_json()}
        if (prior := self._prior()) is not None and str(self.prior) not in priors():
            values["prior"] = prior.to_json()
        write_json(path, {"kind": "sfumato score calibrator", **values})

    @classmethod
    def load(cls, path: str | Path) -> "ScoreCalibrator":
        """Read a file of :meth:`save`.

        Args:
            path: the file.

        Returns:
            The calibrator.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no file of a calibrator.
            UserError: a later version of sfumato wrote it.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            refuse_newer(str(path), values["format"], _FORMAT)
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']!r}")
            made = cls(**values["arguments"])
            made._check_arguments()
            made.formula_ = ScoreFormula.from_json(values["formula"])
            if "prior" in values:
                made._of_file = str(made.prior), ScoreFormula.from_json(values["prior"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: no file of a score calibrator ({error}); fit and save it again") from error
        return made

    def _check_arguments(self) -> None:
        if not isinstance(self.comparable, bool | np.bool_) and self.comparable != "auto":
            raise ValueError(f"ScoreCalibrator: comparable must be True, False or 'auto', got {self.comparable!r}")
        if not (isinstance(self.penalty, Real) and 0 < self.penalty < math.inf):
            raise ValueError(f"ScoreCalibrator: penalty must be a number above 0, got {self.penalty!r}")

    def _prior(self) -> ScoreFormula | None:
        if self.prior is None or str(self.prior) in priors():
            return priors().get(str(self.prior))
        if self._of_file is None or self._of_file[0] != str(self.prior):
            if not Path(self.prior).is_file():
                expected = f"{', '.join(priors())}, the file of a calibrator or None"
                raise ValueError(f"ScoreCalibrator: prior must be {expected}, got {self.prior!r}")
            self._of_file = str(self.prior), self.load(self.prior).formula_
        return self._of_file[1]

    def _known(self) -> ScoreFormula:
        """The fitted formula, or that of the prior."""
        if hasattr(self, "formula_"):
            return self.formula_
        self._check_arguments()
        if (prior := self._prior()) is None:
            raise ValueError("ScoreCalibrator: not fitted; call fit with labels, or give prior='bm25' or another")
        return prior

    def _read(self, X: npt.ArrayLike, groups: npt.ArrayLike | None) -> HitLists:
        """The lists, with scores of which the larger are better."""
        try:
            values = np.asarray(X, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"ScoreCalibrator: X holds what is no number ({error}); give (n,) or (n, c)") from error
        values = values.reshape(-1, 1) if values.ndim == 1 else values
        if values.ndim != 2 or not values.shape[1]:
            raise ValueError(f"ScoreCalibrator: X must be (n,) or (n, c), got {np.shape(X)}")
        if not (np.abs(values) < _HUGE).all():
            raise ValueError(f"ScoreCalibrator: a number of X is not finite, or above {_HUGE:g}; leave such hits out")
        if groups is None:
            group, values = (values[:, -1], values[:, :-1]) if values.shape[1] > 1 else (np.zeros(len(values)), values)
        else:
            group = np.asarray(groups).reshape(-1)
            if group.dtype == object:
                if any(one is None for one in group):
                    raise ValueError("ScoreCalibrator: a query of groups is None; give a number or a text for each hit")
                group = group.astype(str)
        if len(group) != len(values):
            raise ValueError(f"ScoreCalibrator: got {len(group)} groups for {len(values)} hits; give one for each")
        score = values[:, 0] if self.higher_is_better else -values[:, 0]
        return HitLists.of(score, group, values[:, 1:])

    def _logit(self, X: npt.ArrayLike, groups: npt.ArrayLike | None) -> tuple[HitLists, Floats]:
        """The lists, and (n,) logits in their order."""
        lists, known = self._read(X, groups), self._known()
        if (n := lists.evidence.shape[1]) != known.n_evidence:
            found = f"X has {n} columns of further evidence, and the fit had {known.n_evidence}"
            raise ValueError(f"ScoreCalibrator: {found}; give the same columns")
        return lists, known.logit(lists)


def _labels(y: npt.ArrayLike, n: int) -> Floats:
    """(n,) labels 0, 1 or NaN."""
    try:
        label = np.asarray(y, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ScoreCalibrator: a label of y is no number ({error}); give 1 for a match, else 0") from error
    if len(label) != n:
        raise ValueError(f"ScoreCalibrator: got {len(label)} labels for {n} hits; give one for each")
    if not np.isin(label[~np.isnan(label)], (0, 1)).all():
        raise ValueError("ScoreCalibrator: a label of y is not 0, 1 or NaN; give 1 for a hit that matches, else 0")
    return label
