"""Writes docs/examples/score_lists.csv, the lists of hits of the guide about thresholds.

    pip install bm25s
    python scripts/example_lists.py [FILE]

280 tags of emoji are searched among all emoji by name and a random half of their tags. A tag is right for at most 12
emoji. A list has the 15 best hits by BM25 with a score above 0 and the 12 best by MiniLM, each with both scores. For
two of eight tags all right emoji are left out.
"""

import csv
import sys
from pathlib import Path

import bm25s
import numpy as np

from sfumato.data.emoji import _concepts
from sfumato.encoders.package_weights import sentence_vectors

N_SAMPLED, N_TAGS, MOST, BY_WORDS, BY_MEANING = 300, 280, 12, 15, 12


def main(file: Path) -> None:
    random, concepts = np.random.default_rng(0), _concepts()
    tags = [one["tags"] for one in concepts]
    shown = [[tag for tag in own if random.random() < 0.5] for own in tags]
    queries = sorted({tag for own in tags for tag in own})
    queries = [queries[i] for i in np.sort(random.permutation(len(queries))[:N_SAMPLED])]
    items = [f"{one['label']}, {', '.join(own)}" for one, own in zip(concepts, shown, strict=True)]
    right = [{i for i, own in enumerate(tags) if query in own} for query in queries]
    engine = bm25s.BM25()
    engine.index(bm25s.tokenize(items, stopwords="en", show_progress=False), show_progress=False)
    meaning = sentence_vectors(queries) @ sentence_vectors(items).T
    sampled = [i for i in np.random.default_rng(1).permutation(N_SAMPLED) if len(right[i]) <= MOST][:N_TAGS]
    with file.open("w", encoding="utf-8", newline="") as opened:
        table = csv.writer(opened, lineterminator="\n")
        table.writerow(["query", "item", "bm25", "cosine", "match"])
        for k, i in enumerate(sampled):
            words = bm25s.tokenize([queries[i]], stopwords="en", show_progress=False, return_ids=False)[0]
            score = engine.get_scores(words) if words else np.zeros(len(items))
            gone = right[i] if k // 2 % 4 == 3 else set()
            left = np.array([j for j in range(len(items)) if j not in gone])
            best = {j for j in left[np.argsort(-score[left], kind="stable")[:BY_WORDS]] if score[j] > 0}
            best |= set(left[np.argsort(-meaning[i, left])[:BY_MEANING]])
            for j in sorted(best, key=lambda j: -meaning[i, j]):
                name, found = concepts[j]["label"], int(j in right[i])
                table.writerow([queries[i], name, f"{score[j]:.2f}", f"{meaning[i, j]:.3f}", found])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/examples/score_lists.csv"))
