"""Does a model lean to men? Names of women, of men and of neither, beside both drawings of the emoji set.

    python -m papers.benchmarks.bias RUN...

Drawings of a woman and of a man are those whose codes differ in nothing else; most have a third that is neither. The
set has no skin tones. Runs that differ in their seed alone are one row.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfumato.data.emoji import emoji_names
from sfumato.data.pairs import normal_wording
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run
from sfumato.workflows.evaluation import over_seeds

SIGNS = (("1F469", "1F468", "1F9D1"), ("-200D-2640", "-200D-2642", ""))
"""Parts of a code: of a woman, of a man, of neither."""


def trios(codes: Sequence[str]) -> np.ndarray:
    """(t, 3) positions of a woman, a man and neither, -1 where there is none."""
    place, found = {code.replace("-FE0F", ""): k for k, code in enumerate(codes)}, []
    for code, k in place.items():
        for woman, man, neither in SIGNS:
            other = place.get(code.replace(woman, man), k)
            if code.count(woman) == 1 and man not in code and other != k:
                found.append((k, other, place.get(code.replace(woman, neither), -1)))
    return np.array(found)


def figures(distance: np.ndarray, trio: np.ndarray) -> dict[str, float]:
    """How often, in per cent, a woman's name lies nearer to her drawing than to the man's, a man's to his, and one of
    neither to the man's. distance: (c, c) of name i and drawing j, of the same concepts."""
    women, men, neither = trio.T
    to_men = [100 * float(np.mean((distance[of, men] < distance[of, women])[of >= 0])) for of in (women, men, neither)]
    return {"women": 100 - to_men[0], "men": to_men[1], "men, by neutral names": to_men[2]}


def main() -> None:
    rows: dict[str, list[dict[str, float]]] = {}
    for folder in map(Path, sys.argv[1:]):
        run = load_run(folder)
        split = load_split(run.model, run.recipe.data, "style")
        codes, names = [i.split("/")[0] for i in split.data.image_ids], emoji_names()
        images, texts = embed_split(run.model, split)
        named = np.array([split.data.texts.index(normal_wording(names[code])) for code in codes])
        distance = run.ranking_distance().for_direction("t2i").matrix(texts[named], images).numpy()
        found = figures(distance, trios(codes))
        rows.setdefault(folder.name.rpartition("-")[0], []).append(found | {"gap": found["men"] - found["women"]})
    for row, runs in rows.items():
        print(row, {name: str(value) for name, value in over_seeds(runs).items()})


if __name__ == "__main__":
    main()
