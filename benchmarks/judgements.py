"""How many verdicts of people refine the probabilities of target "fits", and whether they ever make them worse.

    python benchmarks/judgements.py FLICKR8K JUDGEMENTS [--draws 60] [--json FILE]

FLICKR8K and JUDGEMENTS are those of fits_prior.py. The queries are the half of the judged captions that the packaged
constants were not fitted on. In each draw a random half of these is judged and the other half tests. A verdict is that
of one person: yes with the fraction of people who said yes. Hits are sampled from the first ten by rank and
probability, as the service does. Hits that nobody judged are unknown, and left out.

"shifted": the prior with 1.5 added to all logits of hits, where verdicts must help. "calibration error" is that of
fits_prior.py, "change" its mean change by the verdicts with two standard errors over draws.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fits_prior import N_HITS, TEXTS, Data, Lists, quality, said
from measuring import command_parser, write_json

from sfumato.calibration.fits import FitsCalibration, FitsLogits, JudgedHits
from sfumato.evaluation.judgements import ShownHit, sample_hits
from sfumato.metrics.reliability import log_loss

NUMBERS = (0, 10, 50, 100, 500)
SHIFT = 1.5

FIRST = 1_000
"""First seed of the draws. The rules of the corrections were chosen on draws 0 to 139 of the same queries."""


def shifted(fits: FitsCalibration, by: float) -> FitsCalibration:
    """The calibration with a number added to all logits of hits."""

    def moved(of: FitsLogits) -> FitsLogits:
        hits = {name: getattr(of, name) for name in ("hit_with", "hit_without")}
        return replace(of, **{name: replace(one, intercept=one.intercept + by) for name, one in hits.items()})

    return replace(fits, lengths=tuple(moved(of) for of in fits.lengths))


def verdicts(fits: FitsCalibration, lists: Lists, n: int, seed: int) -> JudgedHits:
    """n verdicts on the first hits of the queries."""
    p, fraction, place, _ = said(fits.of(3), lists)
    shown = [ShownHit(str(q), str(h), h + 1, float(p[q, h])) for q, h in (~fraction.isnan()).nonzero().tolist()]
    sample = sample_hits(shown, n, seed=seed)
    q, h = (torch.tensor([int(getattr(hit, name)) for hit in sample], dtype=torch.long) for name in ("query", "id"))
    generator = torch.Generator().manual_seed(seed)
    return JudgedHits(
        q.numpy(),
        lists.evidence.n_words[q.numpy()],
        torch.logit(p[q, h]).numpy(),
        lists.evidence.has_texts[q.numpy(), place[q, h].numpy()],
        torch.bernoulli(fraction[q, h], generator=generator).numpy(),
        np.array([hit.weight for hit in sample]),
    )


def figures(fits: FitsCalibration, lists: Lists) -> dict[str, float]:
    """Calibration errors and log losses on other queries."""
    p, yes, _, _ = said(fits.of(3), lists)
    first, known = quality(p[:, 0], yes[:, 0]), ~yes.isnan()
    return {
        "error at hit 1": first["error"],
        f"error at hits 1 to {N_HITS}": quality(p, yes)["error"],
        "log loss at hit 1": log_loss(p[:, 0][known[:, 0]], yes[:, 0][known[:, 0]]),
        f"log loss at hits 1 to {N_HITS}": log_loss(p[known], yes[known]),
        "perfect at hit 1": first["perfect"],
    }


def measured(prior: FitsCalibration, lists: Lists, draws: int) -> dict[str, Any]:
    """By number of verdicts, means over the draws and the changes."""
    found: dict[int, list[dict[str, float]]] = {n: [] for n in NUMBERS}
    changed = dict.fromkeys(NUMBERS, 0)
    for seed in range(FIRST, FIRST + draws):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(lists.yes)))
        judged, others = lists.some(order[: len(order) // 2]), lists.some(order[len(order) // 2 :])
        for n in NUMBERS:
            fits = prior.refined(verdicts(prior, judged, n, seed), seed=seed) if n else prior
            changed[n] += fits != prior
            found[n].append(figures(fits, others))
    return {str(n): summary(found[n], found[0], changed[n] / draws) for n in NUMBERS}


def summary(found: list[dict[str, float]], before: list[dict[str, float]], changed: float) -> dict[str, Any]:
    """Means over draws, changes with two standard errors, and the fraction of draws with any change."""
    result: dict[str, Any] = {"changed": changed}
    for name in found[0]:
        values, first = (np.array([one[name] for one in of]) for of in (found, before))
        change = values - first
        twice = 2 * float(change.std(ddof=1)) / math.sqrt(len(change))
        result[name] = {"mean": float(values.mean()), "change": float(change.mean()), "two standard errors": twice}
    return result


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("judgements", type=Path)
    parser.add_argument("--draws", type=int, default=60)
    given = parser.parse_args()
    packaged = FitsCalibration.packaged()
    data = Data(given.flickr8k, "test", torch.tensor(packaged.prior, dtype=torch.float64))
    lists, _ = data.sentences(given.judgements / "crowd.csv", TEXTS[-1])
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(lists.yes)))
    lists = lists.some(order[len(order) // 2 :])  # The queries that fits_prior.py did not fit on.
    result: dict[str, Any] = {"queries": len(lists.yes), "draws": given.draws}
    for prior_name, prior in (("packaged", packaged), ("shifted", shifted(packaged, SHIFT))):
        for texts, fraction in (("with texts", 0.0), ("without texts", 1.0)):
            result[f"{prior_name}, {texts}"] = measured(prior, lists.without_texts(fraction), given.draws)
    print(json.dumps(result, indent=1))
    write_json(given.json, result)


if __name__ == "__main__":
    main()
