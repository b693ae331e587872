"""ScoreCalibrator on the lists of several engines, beside what people do instead.

    python benchmarks/score_lists.py FLICKR8K COCO5K [--json FILE] [--priors FILE]

FLICKR8K as for own_folder.py, COCO5K as for coco_texts.py with eccv_caption_to_image.json. Each list has at most 100
hits with a score above 0. The queries of a set are split in halves three times: one fits, the other measures.

    flickr8k   1,000 test photographs by four captions (BM25, MiniLM, both by reciprocal ranks) or by the image (small);
               a query is the fifth caption, and right is its own photograph
    coco       5,000 photographs by their captions; queries and what is right are those of ECCV Caption
    emoji      1,911 emoji by name and a random half of their tags; a query is a tag, and right is every emoji with it

`disturbed` multiplies and shifts all scores of a query by random numbers. `30 labelled` fits on 30 queries, from the
prior. `prior` was fitted on the validation photographs of Flickr8k; --priors writes it.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import torch
from bayesian_bm25.probability import BayesianProbabilityTransform
from bayesian_bm25.vector_probability import VectorProbabilityTransform
from measuring import command_parser, write_json
from own_folder import Split
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.data.emoji import _concepts
from sfumato.distances import csd_matrix
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.metrics.bootstrap import auroc
from sfumato.metrics.reliability import expected_calibration_error, log_loss, simulated_calibration_errors

DEPTH, SEEDS, FEW, RRF = 100, 3, 30, 60
KINDS = {"bm25": "bm25", "minilm": "cosine", "image": "cosine", "fusion": "fusion"}


@dataclass(eq=False)
class Lists:
    """Hits of several queries, as columns."""

    score: np.ndarray
    match: np.ndarray
    query: np.ndarray

    def of(self, queries: np.ndarray) -> "Lists":
        inside = np.isin(self.query, queries)
        return Lists(self.score[inside], self.match[inside], self.query[inside])

    @property
    def rank(self) -> np.ndarray:
        """From 1, by falling score."""
        order = np.lexsort((-self.score, self.query))
        first = np.searchsorted(self.query[order], self.query[order])
        found = np.empty(len(order), int)
        found[order] = np.arange(len(order)) - first + 1
        return found

    def disturbed(self) -> "Lists":
        random = np.random.default_rng(5)
        n = int(self.query.max()) + 1
        scale, shift = np.exp(random.normal(0, 1, n)), random.normal(0, 5, n)
        return Lists(self.score * scale[self.query] + shift[self.query], self.match, self.query)


Ranked = list[list[tuple[int, float]]]


def lists(ranked: Ranked, truth: list[set[int]]) -> Lists:
    rows = [(s, i in truth[q], q) for q, hits in enumerate(ranked) for i, s in hits[:DEPTH]]
    score, match, query = (np.array(column) for column in zip(*rows, strict=True))
    return Lists(score.astype(float), match.astype(float), query)


def by_bm25(items: list[str], queries: list[str]) -> Ranked:
    engine = bm25s.BM25()
    engine.index(bm25s.tokenize(items, stopwords="en", show_progress=False), show_progress=False)
    found = engine.retrieve(bm25s.tokenize(queries, stopwords="en", show_progress=False), k=DEPTH, show_progress=False)
    rows = zip(found.documents.tolist(), found.scores.tolist(), strict=True)
    return [[(i, s) for i, s in zip(*row, strict=True) if s > 0] for row in rows]


def by_score(score: torch.Tensor) -> Ranked:
    values, items = score.topk(DEPTH, dim=1)
    return [list(zip(*row, strict=True)) for row in zip(items.tolist(), values.tolist(), strict=True)]


def fused(*engines: Ranked) -> Ranked:
    found = []
    for parts in zip(*engines, strict=True):
        total: dict[int, float] = defaultdict(float)
        for hits in parts:
            for rank, (i, _) in enumerate(hits, 1):
                total[i] += 1 / (RRF + rank)
        found.append(sorted(total.items(), key=lambda one: (-one[1], one[0])))
    return found


def flickr8k(folder: Path, split: str) -> dict[str, Lists]:
    data = Split(folder, split)
    queries, truth = [own[4] for own in data.captions], [{i} for i in range(len(data.captions))]
    items = torch.nn.functional.normalize(data.vectors[:, :4].mean(1), dim=1)
    words = by_bm25([" ".join(own[:4]) for own in data.captions], queries)
    meaning = by_score(data.vectors[:, 4] @ items.T)
    image = by_score(-csd_matrix(data.model.embed_texts(queries).tensors(), data.images))
    ranked = {"bm25": words, "minilm": meaning, "fusion": fused(words, meaning), "image": image}
    return {f"flickr8k {name}": lists(one, truth) for name, one in ranked.items()}


def coco(folder: Path) -> dict[str, Lists]:
    texts = (folder / "testall_caps.txt").read_text("utf-8").splitlines()
    images = [int(line) for line in (folder / "testall_ids.txt").read_text("utf-8").splitlines()]
    place = {int(i): k for k, i in enumerate(np.load(folder / "coco_test_ids.npy"))}
    right = {place[int(c)]: own for c, own in json.loads((folder / "eccv_caption_to_image.json").read_text()).items()}
    column = {image: j for j, image in enumerate(dict.fromkeys(images))}
    own = defaultdict(list)
    for k, image in enumerate(images):
        if k not in right:
            own[image].append(k)
    vectors = torch.from_numpy(sentence_vectors(texts))
    items = torch.stack([vectors[own[image]].mean(0) for image in column])
    items = torch.nn.functional.normalize(items.nan_to_num(), dim=1)
    truth = [{column[int(i)] for i in found} for found in right.values()]
    words = by_bm25([" ".join(texts[k] for k in own[image]) for image in column], [texts[k] for k in right])
    meaning = by_score(vectors[list(right)] @ items.T)
    return {"coco bm25": lists(words, truth), "coco minilm": lists(meaning, truth)}


def emoji() -> dict[str, Lists]:
    random, concepts = np.random.default_rng(0), _concepts()
    tags = [one["tags"] for one in concepts]
    shown = [[tag for tag in own if random.random() < 0.5] for own in tags]
    queries = sorted({tag for own in tags for tag in own})
    queries = [queries[i] for i in np.sort(random.permutation(len(queries))[:1000])]
    items = [f"{one['label']}, {', '.join(own)}" for one, own in zip(concepts, shown, strict=True)]
    truth = [{i for i, own in enumerate(tags) if query in own} for query in queries]
    words = by_bm25(items, queries)
    meaning = by_score(torch.from_numpy(sentence_vectors(queries) @ sentence_vectors(items).T))
    return {"emoji bm25": lists(words, truth), "emoji minilm": lists(meaning, truth)}


def ours(prior: str | None = None, **options: Any) -> Any:
    def predict(fit: Lists, ask: Lists, few: bool = False) -> np.ndarray:
        made = ScoreCalibrator(prior=prior, **options)
        if fit.match.any():
            made.fit(fit.score, fit.match, groups=fit.query)
        return made.predict_proba(ask.score, groups=ask.query)[:, 1]

    return predict


def sigmoid(fit: Lists, ask: Lists) -> np.ndarray:
    made = LogisticRegression(C=1e3).fit(fit.score[:, None], fit.match)
    return np.asarray(made.predict_proba(ask.score[:, None])[:, 1])


def isotonic(fit: Lists, ask: Lists) -> np.ndarray:
    made = IsotonicRegression(out_of_bounds="clip").fit(fit.score, fit.match)
    return np.asarray(made.predict(ask.score)).clip(1e-6, 1 - 1e-6)


def isotonic_of_first(fit: Lists, ask: Lists) -> np.ndarray:
    first = fit.rank == 1
    return isotonic(Lists(fit.score[first], fit.match[first], fit.query[first]), ask)


def min_max(fit: Lists, ask: Lists) -> np.ndarray:
    n = int(ask.query.max()) + 1
    low, high = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(low, ask.query, ask.score)
    np.maximum.at(high, ask.query, ask.score)
    span = np.maximum(high - low, 1e-12)[ask.query]
    return np.asarray(np.clip((ask.score - low[ask.query]) / span, 1e-6, 1 - 1e-6))


def bayesian(kind: str) -> Any:
    """The package bayesian-bm25: its fitted likelihood for BM25, else its label-free density ratio of distances."""

    def predict(fit: Lists, ask: Lists) -> np.ndarray:
        if kind == "bm25":
            made = BayesianProbabilityTransform()
            made.fit(fit.score, fit.match, mode="prior_free", max_iterations=3000)
            return np.asarray(made.likelihood(ask.score)).clip(1e-6, 1 - 1e-6)
        background = VectorProbabilityTransform.fit_background(-fit.score, base_rate=float(fit.match.mean()))
        found = np.empty(len(ask.score))
        for q in np.unique(ask.query):
            inside = ask.query == q
            found[inside] = background.calibrate(-ask.score[inside])
        return np.clip(np.nan_to_num(found, nan=0.5), 1e-6, 1 - 1e-6)

    return predict


def figures(p: np.ndarray, ask: Lists, most: int) -> dict[str, float]:
    inside = ask.rank <= most
    q, y = torch.from_numpy(p[inside]).double(), torch.from_numpy(ask.match[inside]).double()
    by_chance = float(simulated_calibration_errors(q, q).mean())
    return {
        "said": float(q.mean()), "right": float(y.mean()), "error": expected_calibration_error(q, y),
        "perfect": by_chance, "log loss": log_loss(q, y), "auroc": auroc(q.numpy(), y.bool().numpy()),
    }  # fmt: skip


def measured(name: str, data: Lists) -> dict[str, Any]:
    kind = KINDS[name.split()[1]]
    ways = {
        "ScoreCalibrator": ours(), "30 labelled": ours(kind), "prior": ours(kind), "min-max": min_max,
        "sigmoid": sigmoid, "isotonic": isotonic, "isotonic of hit 1": isotonic_of_first,
        "bayesian-bm25": bayesian(kind),
    }  # fmt: skip
    result: dict[str, Any] = {}
    for seed in range(SEEDS):
        queries = np.random.default_rng(seed).permutation(np.unique(data.query))
        half, ask = queries[: len(queries) // 2], data.of(queries[len(queries) // 2 :])
        for way, predict in ways.items():
            chosen = {"30 labelled": half[:FEW], "prior": half[:0]}.get(way, half)
            p = predict(data.of(chosen), ask)
            result.setdefault(way, []).append({str(k): figures(p, ask, k) for k in (1, 10)})
    return {
        way: {k: {key: float(np.mean([one[k][key] for one in runs])) for key in runs[0][k]} for k in ("1", "10")}
        for way, runs in result.items()
    }


def write_priors(folder: Path, path: Path) -> None:
    found = flickr8k(folder, "val")
    kinds = {"bm25": "flickr8k bm25", "cosine": "flickr8k minilm", "fusion": "flickr8k fusion"}
    made = {}
    for kind, name in kinds.items():
        one = found[name]
        made[kind] = ScoreCalibrator(comparable=False).fit(one.score, one.match, groups=one.query).formula_.to_json()
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("coco5k", type=Path)
    parser.add_argument("--priors", type=Path)
    given = parser.parse_args()
    if given.priors:
        return write_priors(given.flickr8k, given.priors)
    result = {}
    for name, data in {**flickr8k(given.flickr8k, "test"), **coco(given.coco5k), **emoji()}.items():
        for kind, lists_of in {"": data, ", disturbed": data.disturbed()}.items():
            result[name + kind] = found = measured(name, lists_of)
            print(name + kind)
            for way, both in found.items():
                one, ten = both["1"], both["10"]
                print(
                    f"  {way:18} hit 1: said {one['said']:.3f} right {one['right']:.3f} error {one['error']:.3f}"
                    f" (perfect {one['perfect']:.3f}) AUROC {one['auroc']:.3f} log loss {one['log loss']:.3f}"
                    f"   1 to 10: error {ten['error']:.3f} ({ten['perfect']:.3f}) log loss {ten['log loss']:.3f}",
                    flush=True,
                )
    write_json(given.json, result)


if __name__ == "__main__":
    main()
