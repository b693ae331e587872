"""The reliability of the probabilities beside first hits: what was predicted against what was observed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfumato.arrays import Array, as_tensor
from sfumato.charts import FAINT, FIRST, STYLE, new_axes, require_matplotlib
from sfumato.metrics.reliability import (
    N_BINS,
    calibration_error_by_chance,
    expected_calibration_error,
    reliability_curve,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities against outcomes; make one with :meth:`of` or :meth:`LoadedModel.reliability`.

    Attributes:
        curve: bins of equally many predictions, see :func:`~sfumato.metrics.reliability.reliability_curve`.
        ece: expected calibration error, in N_BINS bins however many the curve has: the figure of `sfumato trust`.
        ece_by_chance: what perfect probabilities of as many cases would show.
        n: number of predictions.
        mean_probability: mean prediction.
        rate: fraction of matches.
    """

    curve: tuple[dict[str, Any], ...]
    ece: float
    ece_by_chance: float
    n: int
    mean_probability: float
    rate: float

    @classmethod
    def of(cls, probability: Array, match: Array, *, n_bins: int = N_BINS) -> "Reliability":
        """Compare predictions with outcomes.

        Args:
            probability: (k,) predictions in [0, 1], a tensor or an array.
            match: (k,) outcomes in [0, 1].
            n_bins: number of bins of the curve, each with equally many predictions.

        Returns:
            The comparison.

        Raises:
            ValueError: see :func:`~sfumato.metrics.reliability.reliability_curve`.
        """
        p = as_tensor(probability, "probability", "Reliability.of").double()
        y = as_tensor(match, "match", "Reliability.of").double()
        return cls(
            tuple(reliability_curve(p, y, n_bins=n_bins)),
            expected_calibration_error(p, y),
            calibration_error_by_chance(p),
            len(p),
            float(p.mean()),
            float(y.mean()),
        )

    def __repr__(self) -> str:
        return (
            f"Reliability({self.n} hits, {self.mean_probability:.1%} probable on average, right in {self.rate:.1%};"
            f" calibration error {self.ece:.3f}, of perfect probabilities {self.ece_by_chance:.3f})"
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the curve with the 95 % intervals and the number of cases of each bin.

        Args:
            ax: axes of matplotlib to draw on; new ones if None.

        Returns:
            The axes.

        Raises:
            UserError: matplotlib is not installed.
        """
        require_matplotlib()
        import matplotlib
        from matplotlib.ticker import PercentFormatter

        if ax is None:
            ax = new_axes(4.4, 4.2)
        with matplotlib.rc_context(STYLE):
            x, y, low, high, count = (
                [b[key] for b in self.curve] for key in ("probability", "observed", "low", "high", "count")
            )
            gaps = [[max(0.0, b - a) for a, b in zip(low, y, strict=True)],
                    [max(0.0, b - a) for a, b in zip(y, high, strict=True)]]  # fmt: skip
            ax.plot([0, 1], [0, 1], linestyle="--", color=FAINT, zorder=1)
            ax.errorbar(x, y, yerr=gaps, fmt="o-", color=FIRST, markersize=5, zorder=2)
            beside = [f"n = {size}" if i == 0 else str(size) for i, size in enumerate(count)]
            for at, top, text in zip(x, high, beside, strict=True):
                ax.annotate(text, (at, top), (0, 4), textcoords="offset points", ha="center", fontsize=8, color=FAINT)
            ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.1), xlabel="predicted probability", ylabel="fraction of matches")
            ax.xaxis.set_major_formatter(PercentFormatter(1))
            ax.yaxis.set_major_formatter(PercentFormatter(1))
            ax.set_title(
                f"calibration error {self.ece:.3f}, of perfect probabilities {self.ece_by_chance:.3f}",
                loc="left",
                fontsize=9,
            )
            ax.grid(True)
        return ax
