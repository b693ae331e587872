"""`python -m papers multiplicity`: how many images people find for a caption, estimated from the caption alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from papers.commands import Bootstrap, Seed, app
from sfumato.cli.common import AsJson, command, flag
from sfumato.errors import UserError
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.tables import Table, compact_interval, compact_number, number

if TYPE_CHECKING:
    from papers.multiplicity.data import Captions
    from papers.multiplicity.estimate import Scene

_OWN = {"p10_own": "p10_mean", "rr_own": "rr_mean"}
"""What is said of the search by one's own model."""


@command(app)
def multiplicity(
    data: Path = flag(
        ...,
        "Folder with train.jsonl and validation.jsonl: a line has caption, relevant (list of image ids), clip_p10,"
        " blip2_p10, clip_rr, blip2_rr. Or with PQPP's train.csv and validation.csv, without relevant images.",
        metavar="FOLDER",
    ),
    estimator: list[str] | None = flag(
        None, "Estimator; several times for several. Default: all but those that train, variance_by_*.", metavar="NAME"
    ),
    model: str = flag("small", "Model whose text Gaussians are read."),
    predict: Path | None = flag(
        None,
        "JSONL file of captions, here or in FOLDER. Prints for each, as a list of objects with id, image_id and"
        " caption: log_relevant (natural log of the number of relevant images), p10_mean, rr_mean (means of CLIP and"
        " BLIP-2), clip_p10, blip2_p10, clip_rr, blip2_rr; by the regression, fitted on train and validation.",
        metavar="FILE",
    ),
    picture: Path | None = flag(None, "Folder for multiplicity.png and .svg: estimates beside people's numbers."),
    agree: Path | None = flag(
        None,
        "Folder of the id lists of the package eccv_caption: print how CxC, ECCV Caption and PQPP agree, Spearman with"
        " intervals, on the captions that two of them have.",
        metavar="FOLDER",
    ),
    images: Path | None = flag(
        None,
        "Folder of COCO's images: rank them for each caption by --model; adds p10_own and rr_own, its precision at 10"
        " and reciprocal rank by people.",
        metavar="FOLDER",
    ),
    bootstrap: Bootstrap = 1000,
    captions: list[Path] | None = flag(
        None,
        "More captions without labels, among which the others are placed: a JSONL file, or one with a caption a line."
        " Several times for several.",
        metavar="FILE",
    ),
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Estimate how many images people find for a caption and how well a search by it does, beside published figures.

    Measures estimators on validation, fitted on train, or predicts for captions.
    """
    from papers.multiplicity import data as pqpp
    from papers.multiplicity.estimate import ESTIMATORS, REGRESSION, TAUGHT, Scene

    names = list(dict.fromkeys(estimator or [name for name in ESTIMATORS if name not in TAUGHT]))
    if unknown := [name for name in names if name not in ESTIMATORS]:
        raise UserError(f"unknown estimator {unknown[0]!r}; known: {', '.join(ESTIMATORS)}")
    options = {
        "--predict": predict,
        "--agree": agree,
        "--estimator": estimator,
        "--picture": picture,
        "--images": images,
    }
    given = [name for name, value in options.items() if value]
    if (predict or agree) and len(given) > 1:
        raise UserError(f"{given[0]} does not go with {given[1]}; leave one of them out")
    train, validation = (pqpp.read_split(data, split) for split in ("train", "validation"))
    both = pqpp.Captions.joined(train, validation)
    if not both.labels:
        raise UserError(f"{data}: train and validation have no label in common; expected {', '.join(pqpp.LABELS)}")
    others = [text for path in captions or () for text in pqpp.read_texts(path)]
    if predict:
        asked = pqpp.read_captions(predict if predict.exists() else data / predict)
        values = Scene(both, asked.texts, others, model).estimates([REGRESSION])[REGRESSION]
        return _show(asked.rows, values, as_json)
    if agree:
        pairs = pqpp.agreement(both, agree, n_resamples=bootstrap, seed=seed)
        if as_json:
            return print(json.dumps({pair: {"n": n, **asdict(value)} for pair, (n, value) in pairs.items()}))
        cells = [[pair, str(n), compact_interval(value)] for pair, (n, value) in pairs.items()]
        return Table("numbers of images by two sets of people", ["people", "captions", "spearman"], cells).show()
    scene = Scene(train, validation.texts, others, model, seed)
    _measure(scene, validation, names, images=images, picture=picture, bootstrap=bootstrap, as_json=as_json)


def _measure(
    scene: "Scene", validation: "Captions", names: list[str], *,
    images: Path | None, picture: Path | None, bootstrap: int, as_json: bool,
) -> None:  # fmt: skip
    """Print the figures of estimators on validation."""
    from papers.multiplicity import data as pqpp
    from papers.multiplicity.ranking import ranked

    truth = {name: own for name, own in validation.labels.items() if name in scene.known.labels}
    predicted = dict(zip(truth, truth, strict=True))
    if images:
        truth |= ranked(validation, scene.model, images)
        predicted |= {name: mean for name, mean in _OWN.items() if mean in truth}
    estimates = scene.estimates(names)
    first = next(iter(truth))
    figures = {
        name: {
            label: pqpp.correlations(of[same], truth[label], n_resamples=bootstrap, seed=scene.seed)
            for label, same in predicted.items()
        }
        for name, of in estimates.items()
    }
    if picture:
        _draw({name: of[first] for name, of in estimates.items()}, truth[first], first, picture)
    searches = {
        "CLIP": ("clip_p10", "clip_rr"),
        "BLIP-2": ("blip2_p10", "blip2_rr"),
        scene.model: ("p10_own", "rr_own"),
    }
    searches = {name: keys for name, keys in searches.items() if truth.keys() >= {*keys}}
    means = {name: [float(truth[key].mean()) for key in keys] for name, keys in searches.items()}
    if as_json:
        own = {n: {k: {c: asdict(v) for c, v in of.items()} for k, of in f.items()} for n, f in figures.items()}
        about = {"split": "validation", "n": len(validation.rows), "published": pqpp.PUBLISHED, "source": pqpp.SOURCE}
        single = {"caption": validation.texts} | {name: of[first].tolist() for name, of in estimates.items()}
        about |= {"search, mean p10 and rr": means, "estimators": own, f"estimates of {first}": single}
        return print(json.dumps(about))
    cells = [[name, *(number(value, 3) for value in own)] for name, own in means.items()]
    if cells:
        head = ["model", "precision at 10", "mean reciprocal rank"]
        Table("search by the captions, relevant by people", head, cells).show()
    for label in predicted:
        _table(label, {name: of[label] for name, of in figures.items()}, pqpp.PUBLISHED.get(label, {})).show()
    print(f"published: {pqpp.SOURCE}")


def _show(rows: list[dict[str, Any]], values: Mapping[str, np.ndarray], as_json: bool) -> None:
    """Print predictions."""
    if as_json:
        rounded = {name: column.round(6).tolist() for name, column in values.items()}
        return print(json.dumps([row | {n: own[i] for n, own in rounded.items()} for i, row in enumerate(rows)]))
    shown = {"relevant images": ("log_relevant", math.exp, 1), "precision at 10": ("p10_mean", float, 2)}
    shown = {title: how for title, how in shown.items() if how[0] in values}
    cells = [
        [row["caption"], *(number(read(values[name][i]), digits) for name, read, digits in shown.values())]
        for i, row in enumerate(rows)
    ]
    Table("", ["caption", *shown], cells, running=[0]).show()


def _table(label: str, figures: Mapping[str, Mapping[str, Interval]], published: Mapping[str, Any]) -> Table:
    """The estimators beside the published figures of a label."""
    names = list(next(iter(figures.values())))
    rows = [[name, *(compact_interval(of[c]) for c in names)] for name, of in figures.items()]
    if published:
        rows.append(["published, test", *(compact_number(published.get(c, (None,))[0]) for c in names)])
    return Table(f"{label}, validation", ["estimator", *names], rows)


def _draw(estimates: Mapping[str, np.ndarray], truth: np.ndarray, label: str, folder: Path) -> None:
    """What people found by each estimate."""
    from papers.drawing import write_drawing
    from sfumato.charts import FIRST, require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(estimates), 3.6), layout="constrained")
    for k, (name, values) in enumerate(estimates.items()):
        axes = figure.add_subplot(1, len(estimates), k + 1, xlabel=name, ylabel=f"{label}, people")
        axes.plot(values, truth, ".", color=FIRST, alpha=0.3, markersize=4, markeredgewidth=0)
    folder.mkdir(parents=True, exist_ok=True)
    write_drawing(figure, folder, "multiplicity")
