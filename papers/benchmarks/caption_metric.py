"""Fit the constants of the caption metric of papers/captions, and say how well it agrees with people.

    python -m papers.benchmarks.caption_metric FLICKR8K JUDGEMENTS [--out CAPTION_FITS_JSON] [--json FILE]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (n, 1280) and minilm_l6_v2_fp16.npy (5 n, 384). JUDGEMENTS
holds crowd.csv (image, caption_id, yes, no) and expert.csv (image, caption_id, three scores of 1 to 4) of Hodosh, Young
and Hockenmaier 2013. The candidates are captions of the test split.

The references of a pair are the five captions of its image without the candidate. The axes of content come from the
captions of the training split. The logits are fitted on the crowd's verdicts about one half of the candidates, by the
images that they were written for, with all references and with one, two and three drawn ones. That half's constants are
those of the package (--out; the axes lie beside it). The figures are cross-fitted: each half is judged by the constants
of the other. The experts' verdicts are in no fit.

Expert: Kendall's tau-c, each of the three judgements counts, pairs of an image and its own caption are left out. CF:
Kendall's tau-b with the fraction of yes. Intervals of 95 %: bootstrap over images. Calibration error: ten equally full
bins.
"""

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from torch.nn.functional import normalize

from papers.captions.constants import CaptionEvidence, CaptionFits, columns_of
from papers.captions.score import Pair, evidence_of, pair_logits
from sfumato import load
from sfumato.calibration.logits import LinearLogit, Rows, fit_linear_logit
from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.metrics.bootstrap import auroc, bootstrap
from sfumato.metrics.reliability import expected_calibration_error

N_AXES, RIDGE = 48, 0.3
"""Dimensions of content, and what is added to the variance within images, as a fraction of its mean."""

N_TEXTS = (None, 1, 2, 3)
"""Numbers of references of the fits; None is all."""

KINDS = ("texts", "image", "both")
N_RESAMPLES = 300


def read_split(folder: Path, name: str) -> tuple[list[dict[str, Any]], list[int]]:
    """All photographs, and the positions of those of a split."""
    images = json.loads((folder / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    return images, [i for i, image in enumerate(images) if image["split"] == name]


class Split:
    """The photographs of a split with their captions; the images are embedded by the model `small`."""

    def __init__(self, folder: Path, name: str) -> None:
        images, rows = read_split(folder, name)
        self.files = [images[i]["filename"] for i in rows]
        self.captions = [[sentence["raw"] for sentence in images[i]["sentences"]] for i in rows]
        self.model = load("small")
        features = np.load(folder / "efflite0_224_fp16.npy")[rows]
        store = RaggedStore(features, np.arange(len(rows)), np.ones(len(rows), np.int64))
        self.images = self.model.model.image.embed(store).tensors()


@dataclass(frozen=True, eq=False)
class Verdicts:
    """What people said of n pairs."""

    image: np.ndarray  # (n,) positions of the images
    candidate: np.ndarray  # (n, 2) positions of the images of the candidates, and their numbers
    said: np.ndarray  # (n, 2) numbers of yes and no, or (n, 3) scores

    @classmethod
    def read(cls, path: Path, place: dict[str, int], columns: tuple[str, ...]) -> "Verdicts":
        """Those of a table about images and candidates of the split."""
        every = [(row, row["caption_id"].split("#")) for row in csv.DictReader(path.open(encoding="utf-8"))]
        rows, names = zip(*[(row, name) for row, name in every if {row["image"], name[0]} <= set(place)], strict=True)
        return cls(
            np.array([place[row["image"]] for row in rows]),
            np.array([(place[name], int(number)) for name, number in names]),
            np.array([[int(row[column]) for column in columns] for row in rows]),
        )

    @property
    def own(self) -> np.ndarray:
        """(n,) whether the candidate was written for the image."""
        return np.asarray(self.image == self.candidate[:, 0])

    @property
    def yes(self) -> np.ndarray:
        """(n,) fraction of people who said yes."""
        return np.asarray(self.said[:, 0] / self.said.sum(1))

    def pairs(self, captions: list[list[str]], n_texts: int | None, seed: int = 0) -> list[Pair]:
        """The pairs with all references, or with some drawn ones."""
        draw, pairs = np.random.default_rng(seed), []
        for i, (j, number) in zip(self.image.tolist(), self.candidate.tolist(), strict=True):
            references = [text for k, text in enumerate(captions[i]) if (i, k) != (j, number)]
            if n_texts:
                references = [references[k] for k in draw.permutation(len(references))[:n_texts]]
            pairs.append(Pair(captions[j][number], tuple(references), None))
        return pairs

    def half(self, n_images: int) -> np.ndarray:
        """(n,) the half of the candidate, by the image that it was written for."""
        second = np.random.default_rng(0).permutation(n_images)[: n_images // 2]
        return np.isin(self.candidate[:, 0], second).astype(int)


def fit_axes(folder: Path) -> Tensor:
    """(385, N_AXES) linear discriminant analysis of the training captions, by image."""
    images, rows = read_split(folder, "train")
    found = torch.from_numpy(np.load(folder / "minilm_l6_v2_fp16.npy").astype(np.float32)).view(len(images), 5, -1)
    vectors = normalize(found[rows], dim=2).double()
    centre, width = vectors.mean((0, 1)), vectors.shape[2]
    inside = (vectors - vectors.mean(1, keepdim=True)).reshape(-1, width)
    between = vectors.mean(1) - centre
    within = inside.T @ inside / len(inside)
    value, basis = torch.linalg.eigh(within + RIDGE * within.diagonal().mean() * torch.eye(width).double())
    whitening = basis * value.rsqrt()
    axes = whitening @ torch.linalg.eigh(whitening.T @ (between.T @ between) @ whitening)[1][:, -N_AXES:]
    return torch.cat([axes, -(centre @ axes).unsqueeze(0)]).half()


def known(verdicts: Verdicts, data: Split, constants: CaptionFits) -> dict[int | None, CaptionEvidence]:
    """The evidence of the pairs with their images, by the number of references."""
    said = data.model.embed_texts([data.captions[j][number] for j, number in verdicts.candidate.tolist()]).tensors()
    image = pair_logits(said, data.images[torch.from_numpy(verdicts.image)])
    pairs = [pair for k in N_TEXTS for pair in verdicts.pairs(data.captions, k)]
    found = vars(evidence_of(pairs, image.repeat(len(N_TEXTS)), constants.content))
    parts = zip(*(values.chunk(len(N_TEXTS)) for values in found.values()), strict=True)
    return {k: CaptionEvidence(*columns) for k, columns in zip(N_TEXTS, parts, strict=True)}


def fitted(rows: list[Rows]) -> LinearLogit:
    """A logit with rounded numbers."""
    found = fit_linear_logit(rows)
    assert found is not None
    slope, bias, *lists = found
    return LinearLogit(round(slope, 4), round(bias, 4), *(tuple(round(v, 4) for v in values) for values in lists))


def fit(crowd: Verdicts, evidence: dict[int | None, CaptionEvidence], use: np.ndarray, axes: Tensor) -> CaptionFits:
    """The constants by the verdicts about some pairs."""
    usual = round(float(evidence[None].image[~crowd.own].mean()), 2)
    y, w = crowd.yes[use], crowd.said.sum(1)[use]
    features = [one.discounted(usual).features()[torch.from_numpy(use)] for one in evidence.values()]
    logits = {kind: fitted([(columns_of(x, kind).numpy(), y, w) for x in features]) for kind in KINDS}
    return CaptionFits(**logits, usual=usual, axes=axes.float())


def of_kind(evidence: CaptionEvidence, kind: str) -> CaptionEvidence:
    """The evidence without what a kind does not read."""
    nan = torch.full_like(evidence.mean, torch.nan)
    hidden = {"texts": {"image": nan}, "image": {"mean": nan}, "both": {}}[kind]
    return CaptionEvidence(**(vars(evidence) | hidden))


def tau(score: np.ndarray, said: np.ndarray, variant: str) -> float:
    """Kendall's tau; each column of the verdicts counts. score (n,), said (n,) or (n, c)."""
    columns = 1 if said.ndim == 1 else said.shape[1]
    return float(kendalltau(np.repeat(score, columns), said.ravel(), variant=variant).statistic)


def interval(score: np.ndarray, said: np.ndarray, image: np.ndarray, variant: str) -> list[float | None]:
    """Tau and its interval."""

    def statistic(counts: np.ndarray) -> np.ndarray:
        times = counts.astype(int)
        return np.array([tau(np.repeat(score, n), np.repeat(said, n, axis=0), variant) for n in times])

    found = bootstrap({"tau": statistic}, len(score), n_resamples=N_RESAMPLES, groups=image)["tau"]
    return [found.value, found.low, found.high]


def figures(
    crowd: Verdicts, expert: Verdicts, p: np.ndarray, q: np.ndarray, *, calibrated: bool = True
) -> dict[str, Any]:
    """Agreement of scores of the crowd's pairs (p) and of the experts' (q)."""
    other = ~expert.own
    found: dict[str, Any] = {
        "expert tau-c": interval(q[other], expert.said[other], expert.image[other], "c"),
        "crowd tau-b": interval(p, crowd.yes, crowd.image, "b"),
        "auroc": auroc(p, crowd.yes > 0.5),
    }
    if calibrated:
        found["error"] = expected_calibration_error(torch.from_numpy(p), torch.from_numpy(crowd.yes), n_bins=10)
    return found


def measured(
    halves: list[CaptionFits], data: Split, crowd: Verdicts, expert: Verdicts, evidence: dict[str, Any]
) -> dict[str, Any]:
    """The figures by what the metric is given, cross-fitted."""
    result = dict[str, Any]()
    for kind, n_texts in [(kind, None) for kind in KINDS] + [("texts", k) for k in N_TEXTS[1:]]:
        columns = []
        for name, verdicts in (("crowd", crowd), ("expert", expert)):
            both = [of.logit(of_kind(evidence[name][n_texts], kind)).sigmoid().numpy() for of in halves]
            columns.append(np.where(verdicts.half(len(data.files)) == 0, both[1], both[0]))
        p, q = columns
        result[kind if n_texts is None else f"texts, {n_texts}"] = figures(crowd, expert, p, q)
    for name in ("first", "mean", "words"):
        p, q = (getattr(evidence[side][None], name).double().numpy() for side in ("crowd", "expert"))
        result[f"baseline: {name}"] = figures(crowd, expert, p, q, calibrated=False)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("judgements", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    data, axes = Split(given.flickr8k, "test"), fit_axes(given.flickr8k)
    place = {name: i for i, name in enumerate(data.files)}
    crowd = Verdicts.read(given.judgements / "crowd.csv", place, ("yes", "no"))
    expert = Verdicts.read(given.judgements / "expert.csv", place, ("score_1", "score_2", "score_3"))
    nothing = LinearLogit(1.0, 0.0, (), (), ())
    plain = CaptionFits(nothing, nothing, nothing, 0.0, axes.float())
    evidence = {name: known(verdicts, data, plain) for name, verdicts in (("crowd", crowd), ("expert", expert))}
    half = crowd.half(len(data.files))
    halves = [fit(crowd, evidence["crowd"], half == h, axes) for h in (0, 1)]
    result = {"pairs": {"crowd": len(crowd.image), "expert": int((~expert.own).sum())}}
    result |= measured(halves, data, crowd, expert, evidence)
    for name, values in result.items():
        print(name, json.dumps(values))
    if given.out:
        given.out.write_text(json.dumps(halves[0].to_json()) + "\n", encoding="utf-8")
        np.save(given.out.with_name("caption_axes.npy"), axes.numpy())
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
