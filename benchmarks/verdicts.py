"""How often the verdicts of searches are true: "many matches" and "one clear match", by the search that a user meets.

    python benchmarks/verdicts.py RUN [RUN ...] [--splits val test]

Each run is calibrated on val. Every text of a split searches among its images. Figures are means over the runs.
"""

import argparse
from statistics import fmean

import numpy as np

from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run
from sfumato.search.answer import verdict
from sfumato.workflows.index import GalleryPart, build_index

MANY = 10
"""True matches from which a text has many."""


def of_run(folder: str, split: str) -> dict[str, float]:
    """Recall and precision of the verdicts of a run on the texts of a split."""
    run = load_run(folder)
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    ids = list(prepared.data.image_ids)
    index = build_index(run, GalleryPart(images, ids))
    matches = prepared.data.relevance().transpose()
    of_text = [set(matches.indices[a:b].tolist()) for a, b in zip(matches.indptr[:-1], matches.indptr[1:], strict=True)]
    kinds, right = [], []
    position = {i: k for k, i in enumerate(ids)}
    for found, expected, true in zip(index.search(texts, k=1), index.expected_matches(texts), of_text, strict=True):
        kinds.append(verdict(expected, found.best_probability).kind)
        right.append(position[found[0].id] in true)
    kind, hit, n_true = np.array(kinds), np.array(right), np.array([len(each) for each in of_text])
    many, clear = kind == "many", kind == "clear"
    single = hit & (n_true == 1)
    return {
        "many: recall": float(many[n_true >= MANY].mean()),
        "many: precision": float((n_true[many] >= MANY).mean()),
        "many: five or more": float((n_true[many] >= MANY // 2).mean()),
        "clear: recall": float(clear[single].mean()),
        "clear: precision": float(single[clear].mean()),
        "clear: right": float(hit[clear].mean()),
        "said clear": float(clear.mean()),
        "said many": float(many.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--splits", nargs="*", default=["val", "test"])
    options = parser.parse_args()
    found = {split: [of_run(run, split) for run in options.runs] for split in options.splits}
    print(f"| figure | {' | '.join(found)} |")
    print(f"| --- | {' | '.join('---:' for _ in found)} |")
    for key in next(iter(found.values()))[0]:
        print(f"| {key} | {' | '.join(f'{fmean(run[key] for run in runs):.1%}' for runs in found.values())} |")


if __name__ == "__main__":
    main()
