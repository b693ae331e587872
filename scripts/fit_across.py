"""Fit the constants for queries of other languages (src/sfumato/calibration/fits_across.json), and say how they hold.

python scripts/fit_across.py FLICKR8K JUDGEMENTS WORK

English queries go through e5 and the heads of make_languages.py as those of other languages do, and words say nothing.
Lists, halves and people's verdicts are those of benchmarks/fits_prior.py, whose captions the heads have not seen; the
photographs have one caption each. WORK keeps what e5 makes of these. Words that an item has weigh as in fits.json. The
constants of photographs without texts are those of left-out topics in fits.json with a factor and a shift, fitted here.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import fits_prior as prior
from make_languages import kept as e5_of

from sfumato.arrays import as_numpy
from sfumato.calibration import fits
from sfumato.calibration.fits import ACROSS, Correction, Evidence, FitsCalibration, FitsLogits
from sfumato.calibration.logits import LinearLogit, fit_logistic
from sfumato.distances import get_distance
from sfumato.search.candidates import REFERENCE_SIZE
from sfumato.search.languages import AsEnglish, as_english, pack
from sfumato.search.texts import ItemTexts

PACKAGED = FitsCalibration.packaged()
prior.DRAWS, prior.PRESENT, prior.ABSENT = 2, 80, 30
WORDS = [fits.PAIR_FEATURES.index(name) for name in ("words", "together")]


@cache
def through_e5(texts: tuple[str, ...], digest: str) -> AsEnglish:
    return as_english(texts, digest)


class Data(prior.Data):
    """A split whose queries go through e5."""

    def __init__(self, folder: Path, split: str, work: Path) -> None:
        super().__init__(folder, split, torch.empty(0))
        self.rows = e5_of(work / f"{split}.npy", [own[0] for own in self.split.captions]).numpy()
        self.nearness = list[np.ndarray]()

    def evidence(self, index: list[int], kept: tuple[int, ...], queries: list[str], vectors: Tensor) -> Evidence:
        found = through_e5(tuple(queries), self.split.model.model.digest)
        assert found.embeddings is not None
        self.nearness.append(FitsCalibration.nearness(found.sentences))
        distance = get_distance("csd").matrix(found.embeddings.tensors(), self.split.images[torch.tensor(index)])
        image = as_numpy(self.scorer.pair_logit(distance, REFERENCE_SIZE))
        means = torch.nn.functional.normalize(self.split.vectors[index][:, list(kept)].mean(1), dim=1).numpy()
        packed = dict(enumerate(pack(self.rows[index])))
        items = ItemTexts.of(means, [{"captions": self.split.captions[i][0]} for i in index], None, packed)
        prior_of = PACKAGED.query_prior(found.sentences)
        known = items.evidence(queries, found.sentences, image, prior_of, across=found)
        return replace(known, **dict.fromkeys(("words", "together", "missing"), np.zeros_like(image)))

    def with_nearness(self, lists: prior.Lists) -> prior.Lists:
        near, self.nearness = np.concatenate(self.nearness), []
        return replace(lists, near=near)


def fitted(lists: prior.Lists, own: Tensor | None, of: FitsLogits) -> FitsLogits:
    """The constants for queries of one length. of: those of English."""
    found = prior.fit(lists, own, of.hit_bare)
    pair = found.pair_with
    weights, low, high = (list(values) for values in (pair.weights, pair.low, pair.high))
    for i in WORDS:
        weights[i], low[i], high[i] = of.pair_with.weights[i], of.pair_with.low[i], of.pair_with.high[i]
    found = replace(found, pair_with=replace(pair, weights=tuple(weights), low=tuple(low), high=tuple(high)))
    return replace(found, hit_bare=bare(found, lists, own))


def bare(found: FitsLogits, lists: prior.Lists, own: Tensor | None) -> LinearLogit:
    """The constants of photographs without texts, by a factor and a shift on what lists without any texts say."""
    x, y, w = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for some in prior.present_and_absent(lists, own):
        gone, some = bool(some.absent.all()), some.without_texts(1.0)
        pair = found.of_pairs(some.evidence)
        listed = some.listed(torch.from_numpy(pair)).numpy()
        hits = found.of_hits(pair, some.evidence.has_texts, listed, some.near)
        place = np.argsort(-hits, axis=1)[:, : fits.N_NEAR]
        yes, weight = np.take_along_axis(some.yes.numpy(), place, 1), 1 / np.arange(1, place.shape[1] + 1)
        there = ~np.isnan(yes)
        weights = np.broadcast_to(weight, yes.shape)[there]
        x.append(np.take_along_axis(hits, place, 1)[there])
        y.append(yes[there])
        w.append(weights * (prior.ABSENT_HITS if gone else 1 - prior.ABSENT_HITS) / weights.sum())
    slope, shift = fit_logistic(np.concatenate(x)[:, None], np.concatenate(y), weight=np.concatenate(w))
    print("factor and shift without texts:", float(slope[0]), shift)
    corrected = Correction(float(slope[0]), shift, 0.0).of(found.hit_bare, fits.LIST_FEATURES.index("one over words"))
    rounded = {name: tuple(round(v, 4) for v in getattr(corrected, name)) for name in ("weights", "low", "high")}
    return replace(corrected, slope=round(corrected.slope, 4), intercept=round(corrected.intercept, 4), **rounded)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("judgements", type=Path)
    parser.add_argument("work", type=Path)
    given = parser.parse_args()
    val, test = (Data(given.flickr8k, split, given.work) for split in ("val", "test"))
    captions = [caption for data in (val, test) for of_one in data.split.captions for caption in of_one]
    one, logits, result = prior.TEXTS[0], list[FitsLogits](), dict[str, object]()
    for length, of in zip((1, 2), PACKAGED.lengths, strict=False):
        known = Counter(g for caption in captions for g in prior.grams(caption, length))
        sets = [data.with_nearness(data.words(length, known, one)) for data in (val, test)]
        logits.append(fitted(sets[0], None, of))
        result[f"{length} words"] = prior.tested(logits[-1], sets[1], None)
    judged, own = test.sentences(given.judgements / "crowd.csv", one)
    judged = test.with_nearness(judged)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(own)))
    a, b = order[: len(own) // 2], order[len(own) // 2 :]
    logits.append(fitted(judged.some(a), own[a], PACKAGED.lengths[2]))
    result[prior.SENTENCES] = prior.tested(logits[-1], judged.some(b), own[b])
    print(json.dumps(result, indent=1))
    path = Path(fits.__file__).with_name(ACROSS)
    path.write_text(json.dumps(replace(PACKAGED, lengths=tuple(logits)).to_json(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
