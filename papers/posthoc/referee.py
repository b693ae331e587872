"""The referee: post-hoc uncertainties of a frozen model against each other and against baselines, by one protocol.

Methods are fitted on train pairs. Two numbers (Platt) turn their uncertainty into the probability that the first hit is
right, fitted on validation with its own gallery. They hold for galleries of that size, so a larger test split is dealt
into galleries of about as many images, and all their queries count. The test split is read once for each method and
seed; nothing is chosen on it. The ranking is that of the frozen cosine for all. papers/docs/referee.md says how to
read the figures.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers.posthoc import METHODS, NOT_BUILT, AdapterMethod
from papers.posthoc.added import AddedMethod
from papers.posthoc.closed_forms import fit_hit_logits
from papers.posthoc.contestants import (
    Contestant,
    answerable_without,
    contestants,
    fit_contestant,
    is_own,
    pair_calibration,
)
from papers.posthoc.frozen_model import FrozenCorruption, FrozenModel, FrozenSplit
from papers.posthoc.peak_memory import PeakMemory
from papers.posthoc.referee_report import (
    FORMAT,
    ContestantFigures,
    CorruptionFigures,
    FittedMethod,
    Machine,
    RefereeReport,
    SplitSizes,
    UnavailableMethod,
)
from papers.uncertainty.binned_recall import RecallBinning, binned_recall
from papers.uncertainty.corruption import corruption_statistics
from sfumato.calibration.calibrator import Calibration
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Query
from sfumato.evaluation.trust import error_statistics, many_to_many
from sfumato.files import read_json, write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, OTHER_SIDE, Direction, Side
from sfumato.imports import HOW
from sfumato.matching import match_probability
from sfumato.metrics.bootstrap import (
    Interval,
    Statistic,
    auroc,
    balanced_spearman,
    bootstrap,
    mean_statistic,
    percentile_interval,
    resampled_balanced_spearman,
)
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import calibration_error_by_chance, expected_calibration_error

BINNINGS: tuple[RecallBinning, ...] = ("count", "width")

_SIDES: tuple[Side, ...] = ("text", "image")

_SMALLEST = 1e-12


@dataclass(frozen=True)
class RefereeOptions:
    """What is compared, and how it is measured."""

    methods: tuple[str, ...] = field(default_factory=contestants)
    fit: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of the fit by method
    n_resamples: int = 200  # of the intervals
    n_absent: int = 200  # largest number of queries of a direction whose matches are taken out of the gallery
    seed: int = 0  # of the fits and all random choices


def wanted_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The contestants of a list of names."""
    known = contestants()
    if unknown := [name for name in names if name not in (*known, "all")]:
        raise UserError(f"unknown method {unknown[0]!r}; known: all, {', '.join(known)}; {HOW}")
    if not names:
        raise UserError(f"no method is named; known: all, {', '.join(known)}")
    return known if "all" in names else tuple(name for name in known if name in names)


def adapter_epochs(epochs: int) -> dict[str, dict[str, Any]]:
    """Options of the fit of the methods that train a network."""
    adapters = {name: m.default for name, m in METHODS.items() if epochs and issubclass(m, AdapterMethod)}
    return {name: {"training": replace(default, epochs=epochs)} for name, default in adapters.items()}


def referee_model(
    model: FrozenModel,
    options: RefereeOptions | None = None,
    *,
    path: Path | None = None,
    about: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
    added: Sequence[AddedMethod] = (),
) -> dict[str, Any]:
    """Fit and measure every contestant on one frozen model; those that were registered or added are measured anew."""
    options = options or RefereeOptions()
    own = {method: method.contestants(model) for method in added}
    report = _kept(path, model, options) or _new_report(model, options)
    missing = [name for name in options.methods if name not in report["methods"] or is_own(name)]
    if missing or added:
        report["about"] = dict(about or {})
        splits, n, seed = {"val": model.val, **model.tests}, len(model.val.images), options.seed
        dealt = {split: x.galleries(n, seed=seed) for split, x in splits.items()}
        scenes = {
            split: {side: _Scene(x, side, [_Gallery.of(part, side) for part in dealt[split]]) for side in _SIDES}
            for split, x in splits.items()
        }
        calibration = pair_calibration(model, reference=False)
        for name in missing:
            report["methods"][name] = _measured(name, model, options, calibration, scenes)
            say(f"{model.name}, seed {options.seed}: {name}, {report['methods'][name].get('fit_seconds', 0):.1f} s fit")
            if path is not None:
                write_json(path, report)
        for method, by_split in own.items():
            report["methods"][method.name] = _added(method, by_split, options, scenes)
    if path is not None:
        write_json(path, report)
    return report


def _new_report(model: FrozenModel, options: RefereeOptions) -> dict[str, Any]:
    splits = {"train": model.train, "val": model.val, **model.tests}
    versions = platform.python_version(), str(torch.__version__), version("sfumato")
    report = RefereeReport(
        format=FORMAT,
        model=model.name,
        seed=options.seed,
        digest=model.digest,
        options=_described(options),
        sizes={
            name: SplitSizes(len(x.images), len(x.texts), len(x.pairs), x.images.shape[1]) for name, x in splits.items()
        },
        notes=list(model.notes),
        not_built=dict(NOT_BUILT),
        about={},
        machine=Machine(platform.processor() or platform.machine(), torch.get_num_threads(), *versions),
        methods={},
    )
    return asdict(report)


def _described(options: RefereeOptions) -> dict[str, Any]:
    """The options on which figures depend, as JSON values."""
    fit = {name: {key: str(value) for key, value in given.items()} for name, given in options.fit.items()}
    return {"fit": fit, "n_resamples": options.n_resamples, "n_absent": options.n_absent, "seed": options.seed}


def _kept(path: Path | None, model: FrozenModel, options: RefereeOptions) -> dict[str, Any] | None:
    """The report of an earlier call for the same embeddings and options."""
    if path is None or not path.is_file():
        return None
    try:
        report: dict[str, Any] = read_json(path)
    except UserError:  # Damaged: made anew.
        return None
    same = (report.get("format"), report.get("digest"), report.get("options"))
    if same != (FORMAT, model.digest, _described(options)):
        return None
    kept = {name: method for name, method in report["methods"].items() if not method.get("added")}
    return report | {"methods": kept}


@dataclass(frozen=True, eq=False)
class _Gallery:
    """The queries of one side that have a match in one gallery, and whether the frozen cosine finds one first."""

    split: FrozenSplit
    relevance: Relevance
    kept: np.ndarray
    hit: np.ndarray
    groups: np.ndarray | None

    @classmethod
    def of(cls, split: FrozenSplit, side: Side) -> "_Gallery":
        relevance = split.relevance(side)
        hit = split.query(side).first_hits("squared_l2")
        kept = np.flatnonzero(~np.isnan(hit))
        groups = split.resampled_together(side)
        return cls(split, relevance, kept, hit[kept], None if groups is None else groups[kept])


@dataclass(frozen=True, eq=False)
class _Scene:
    """The queries of one side of a split, in galleries of about the size of validation's."""

    whole: FrozenSplit
    side: Side
    galleries: Sequence[_Gallery]

    @property
    def hit(self) -> np.ndarray:
        return np.concatenate([gallery.hit for gallery in self.galleries])

    @property
    def groups(self) -> np.ndarray | None:
        found, first = [], 0
        for gallery in self.galleries:
            if gallery.groups is None:
                return None
            found.append(gallery.groups + first)
            first = int(found[-1].max(initial=first)) + 1
        return np.concatenate(found)

    def uncertainty(self, contestant: Contestant) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of the queries with a match, and of all queries of each gallery."""
        every = [contestant.uncertainty(gallery.split, self.side, None) for gallery in self.galleries]
        return np.concatenate([u[g.kept] for u, g in zip(every, self.galleries, strict=True)]), every


_Scenes = Mapping[str, Mapping[Side, _Scene]]  # by split, "val" among them


def _measured(
    name: str, model: FrozenModel, options: RefereeOptions, calibration: Calibration, scenes: _Scenes
) -> dict[str, Any]:
    try:
        with PeakMemory() as memory:
            started = time.perf_counter()
            contestant = fit_contestant(name, model, calibration, seed=options.seed, options=options.fit.get(name))
            seconds = time.perf_counter() - started
    except (ValueError, ArithmeticError, UserError) as error:
        return asdict(UnavailableMethod(str(error)))
    tests = _tests(dict.fromkeys(scenes, contestant), options, scenes)
    suited = [corruption for corruption in model.corruptions if corruption.side in contestant.sides]
    damaged = {corruption.name: _of_corruption(contestant, corruption, options) for corruption in suited}
    costs = seconds, memory.megabytes, contestant.n_bytes
    return asdict(FittedMethod(contestant.summary, *costs, contestant.needs_gallery, tests, damaged))


def _added(
    method: AddedMethod, by_split: Mapping[str, Contestant], options: RefereeOptions, scenes: _Scenes
) -> dict[str, Any]:
    """The figures of a method whose uncertainties are given; nobody knows its costs."""
    tests = {
        split: {d: replace(f, ms_per_query=None, query_megabytes=None) for d, f in of_directions.items()}
        for split, of_directions in _tests(by_split, options, scenes).items()
    }
    return asdict(FittedMethod(by_split["val"].summary, None, None, None, False, tests, {}, str(method.path)))


def _tests(
    by_split: Mapping[str, Contestant], options: RefereeOptions, scenes: _Scenes
) -> dict[str, dict[Direction, ContestantFigures]]:
    """The figures of a contestant in every measured split, of which each, like validation, may have its own object."""
    tests: dict[str, dict[Direction, ContestantFigures]] = {split: {} for split in scenes if split != "val"}
    for side in by_split["val"].sides:
        platt, rate = _platt(by_split["val"], scenes["val"][side])
        for split, found in tests.items():
            found[DIRECTION_OF[side]] = _figures(by_split[split], scenes[split][side], platt, rate, options)
    return tests


def _of_corruption(contestant: Contestant, corruption: FrozenCorruption, options: RefereeOptions) -> CorruptionFigures:
    """Whether the contestant is less certain of corrupted queries."""
    side, clean = corruption.side, corruption.splits[0]
    u = np.stack([contestant.uncertainty(split, side, None) for split in corruption.splits])
    recall = [float(split.query(side).first_hits("squared_l2").mean()) for split in corruption.splits]
    figures, groups = corruption_statistics(u, corruption.strengths), clean.resampled_together(side)
    found = bootstrap(figures, u.shape[1], n_resamples=options.n_resamples, groups=groups, seed=options.seed)
    return CorruptionFigures(DIRECTION_OF[side], u.shape[1], corruption.strengths, recall, **found)


def _platt(contestant: Contestant, scene: _Scene) -> tuple[tuple[float, float] | None, float]:
    """The logits of the first hit on validation, if the uncertainty has the right sign; and the smoothed hit rate."""
    hit = scene.hit
    rate = (hit.sum() + 1) / (len(hit) + 2)
    u, _ = scene.uncertainty(contestant)
    if contestant.probability(u) is None:
        with suppress(ValueError):
            return fit_hit_logits(torch.from_numpy(u), torch.from_numpy(hit)), rate
    return None, rate


def _figures(
    contestant: Contestant, scene: _Scene, platt: tuple[float, float] | None, rate: float, options: RefereeOptions
) -> ContestantFigures:
    with PeakMemory() as memory:
        started = time.perf_counter()
        u, every = scene.uncertainty(contestant)
        seconds = time.perf_counter() - started
    hit, groups = scene.hit, scene.groups
    p = contestant.probability(u)
    if p is None:
        p = np.full(len(u), rate) if platt is None else match_probability(torch.from_numpy(u), *platt).numpy()
    p = p.clip(_SMALLEST, 1 - _SMALLEST)
    statistics: dict[str, Statistic] = {
        "recall": mean_statistic(hit),
        **error_statistics(u, 1 - hit),
        "log_loss": mean_statistic(-np.log(np.where(hit > 0, p, 1 - p))),
    }
    n, seed = options.n_resamples, options.seed
    binned = {
        binning: binned_recall(u, hit, binning=binning, n_resamples=n, groups=groups, seed=seed) for binning in BINNINGS
    }
    recall_after, recall_csd = _recall_of_gaussians(contestant, scene)
    probability = torch.from_numpy(p)
    return ContestantFigures(
        n_queries=len(u),
        n_galleries=len(scene.galleries),
        **bootstrap(statistics, len(u), n_resamples=n, groups=groups, seed=seed),
        recall_after=recall_after,
        recall_csd=recall_csd,
        ece=expected_calibration_error(probability, torch.from_numpy(hit)),
        ece_by_chance=calibration_error_by_chance(probability),
        platt=platt,
        absent_auroc=_absent(contestant, scene, every, options),
        ambiguity=_ambiguity(contestant, scene, options),
        minus_s_r2=binned,
        ms_per_query=1000 * seconds / max(1, sum(map(len, every))),
        query_megabytes=memory.megabytes,
    )


def _recall_of_gaussians(contestant: Contestant, scene: _Scene) -> tuple[float | None, float | None]:
    """Recall@1 by the cosine of the contestant's means, and by csd of its Gaussians."""
    after, by_csd = [], []
    for part in scene.galleries:
        queries = contestant.gaussians(part.split, scene.side)
        gallery = contestant.gaussians(part.split, OTHER_SIDE[scene.side])
        if queries is None or gallery is None:
            return None, None
        by_csd.append(Query(DIRECTION_OF[scene.side], queries, gallery, part.relevance).first_hits("csd"))
        a, b = (GaussianEmbedding.point(torch.nn.functional.normalize(x.mean, dim=1)) for x in (queries, gallery))
        after.append(Query(DIRECTION_OF[scene.side], a, b, part.relevance).first_hits("squared_l2"))
    return float(np.nanmean(np.concatenate(after))), float(np.nanmean(np.concatenate(by_csd)))


def _absent(contestant: Contestant, scene: _Scene, every: list[np.ndarray], options: RefereeOptions) -> float:
    """AUROC of the same queries without and with their matches in the gallery."""
    if not contestant.needs_gallery:
        return 0.5
    rng, present, absent = np.random.default_rng(options.seed), [], []
    for part, u in zip(scene.galleries, every, strict=True):
        usable = answerable_without(part.split, scene.side)
        rows = np.sort(rng.permutation(usable)[: -(-options.n_absent // len(scene.galleries))])
        if len(rows):
            present.append(u[rows])
            absent.append(contestant.uncertainty(part.split, scene.side, rows))
    if not present:
        return 0.5
    scores = np.concatenate([*present, *absent])
    return auroc(scores, np.repeat([0, 1], len(scores) // 2))


def _ambiguity(contestant: Contestant, scene: _Scene, options: RefereeOptions) -> Interval | None:
    """Balanced Spearman with the true number of matches in the whole split, for data that lists many for one text."""
    if not many_to_many(scene.whole.relevance("image")):
        return None
    counts = scene.whole.relevance(scene.side).counts
    kept = np.flatnonzero(counts)
    u, counts = contestant.uncertainty(scene.whole, scene.side, None)[kept], counts[kept]
    value = balanced_spearman(u, counts, seed=options.seed)
    resampled = resampled_balanced_spearman({"u": u}, counts, n_resamples=options.n_resamples, seed=options.seed)
    return percentile_interval(value, resampled["u"])
