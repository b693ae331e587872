"""Fit the constants of target "fits" (src/sfumato/calibration/fits.json), and say how well they hold.

    python benchmarks/fits_prior.py FLICKR8K JUDGEMENTS [--out FITS_JSON] [--json FILE]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (n, 1280) and minilm_l6_v2_fp16.npy (5 n, 384). JUDGEMENTS
holds crowd.csv: image, caption_id, yes, no (Hodosh, Young and Hockenmaier 2013).

Sentences: the judged captions #2 of the 1,000 test photographs, which have their other four captions as texts. One half
fits, the other half tests. A pair is right by the fraction of people who said yes; what nobody judged is unknown.
Words, and pairs of adjacent words: three draws of 400 photographs of the validation split (fit) and of the test split
(test), each photograph with one, two and four captions; a photograph is right if one of its five captions mentions
them, two words close together.

Every list is shown with all texts, without any, and with texts for a half and for nine tenths of the photographs.
Absent queries: words that no photograph of a draw has; of a sentence all photographs are left out to which anybody said
yes, and its own.
"""

import csv
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser
from own_folder import Split
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from sfumato.arrays import Array, as_numpy, sigmoid
from sfumato.calibration.calibrator import Scorer
from sfumato.calibration.fits import N_NEAR, Evidence, FitsCalibration, FitsLogits, list_features
from sfumato.calibration.logits import LinearLogit, Rows, fit_linear_logit
from sfumato.distances import get_distance
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.metrics.bootstrap import risk_coverage_statistics
from sfumato.search.answer import LINE, fits_verdict
from sfumato.search.candidates import REFERENCE_SIZE
from sfumato.search.texts import FUNCTION_WORDS, ItemTexts, is_close, says, word_stems

DRAWS, N_HITS = 3, 10
TEXTS = (0,), (0, 1), (0, 1, 3, 4)
"""Captions that are a photograph's texts. The constants of sentences are fitted with four, those of words with all."""

PARTS = (0.0, 1.0, 0.5, 0.1)
"""Fractions of the photographs that have no texts."""

USUAL = 0.5
"""People ask for usual words more often: words are drawn by this power of the number of captions that have them."""

PRESENT, ABSENT, LEAST = 150, 60, 2
"""Numbers of words of a draw that photographs show and that none shows, and photographs that show a word at least."""

SENTENCES = "sentences"
ABSENT_HITS, ABSENT_LISTS = 0.05, 0.15
"""Weight of the lists of absent queries in the fits of hits, and of "nothing"."""


@dataclass(frozen=True, eq=False)
class Lists:
    """Queries against photographs."""

    evidence: Evidence
    yes: Tensor  # (q, n) fraction of people who say yes, nan where unknown
    absent: Tensor  # (q,) whether nothing fits
    near: np.ndarray  # (q,) nearness

    def some(self, queries: Tensor) -> "Lists":
        """Those of some queries."""
        known = {name: values[queries.numpy()] for name, values in vars(self.evidence).items()}
        return Lists(Evidence(**known), self.yes[queries], self.absent[queries], self.near[queries.numpy()])

    def without_texts(self, fraction: float) -> "Lists":
        """The same with a fraction of the photographs without texts."""
        n = self.yes.shape[1]
        bare = np.zeros(n, bool)
        bare[np.random.default_rng(0).permutation(n)[: round(fraction * n)]] = True
        known = self.evidence
        changed = {name: np.where(bare, 0, getattr(known, name)) for name in ("words", "together", "missing")}
        return replace(self, evidence=replace(known, agreement=np.where(bare, np.nan, known.agreement), **changed))

    def listed(self, pair: Tensor) -> Tensor:
        """What the lists say, by the logits of their pairs."""
        near = pair.topk(N_NEAR, dim=1).values.numpy()
        return torch.from_numpy(list_features(near, self.evidence.n_words, self.evidence.prior))


class Data:
    """A split with what the lists need."""

    def __init__(self, folder: Path, split: str, prior: Tensor) -> None:
        self.split, self.prior = Split(folder, split), prior
        calibration = self.split.model.calibration
        assert calibration is not None
        self.scorer = Scorer(calibration.logit_scale, calibration.logit_bias, calibration)

    def evidence(self, index: list[int], kept: tuple[int, ...], queries: list[str], vectors: Tensor) -> Evidence:
        """Of queries and some photographs, which have some of their captions."""
        means = normalize(self.split.vectors[index][:, list(kept)].mean(1), dim=1)
        items = ItemTexts.of(
            means.numpy(), [{"captions": "\n".join(self.split.captions[i][c] for c in kept)} for i in index]
        )
        distance = get_distance("csd").matrix(
            self.split.model.embed_texts(queries).tensors(), self.split.images[torch.tensor(index)]
        )
        prior = vectors.double() @ self.prior[:-1] + self.prior[-1]
        return items.evidence(
            queries, vectors.numpy(), as_numpy(self.scorer.pair_logit(distance, REFERENCE_SIZE)), prior.numpy()
        )

    def sentences(self, path: Path, kept: tuple[int, ...]) -> tuple[Lists, Tensor]:
        """The judged captions #2, and (q,) their own photographs."""
        place, everything = {name: i for i, name in enumerate(self.split.files)}, list(range(len(self.split.files)))
        pairs = [pair for pair in csv.DictReader(path.open(encoding="utf-8")) if pair["image"] in place]
        asked = sorted({p["caption_id"].split("#")[0] for p in pairs if p["caption_id"].endswith("#2")} & set(place))
        row, yes = {name: q for q, name in enumerate(asked)}, torch.full((len(asked), len(everything)), torch.nan)
        for pair in pairs:
            name, number = pair["caption_id"].split("#")
            if number == "2" and name in row:
                n_yes = int(pair["yes"])
                yes[row[name], place[pair["image"]]] = n_yes / (n_yes + int(pair["no"]))
        own = torch.tensor([place[name] for name in asked])
        queries = [self.split.captions[i][2] for i in own.tolist()]
        known = self.evidence(everything, kept, queries, vectors := self.split.vectors[own, 2])
        absent = torch.zeros(len(asked), dtype=torch.bool)
        return Lists(known, yes.double(), absent, FitsCalibration.nearness(vectors)), own

    def words(self, length: int, known_words: Counter[str], kept: tuple[int, ...]) -> Lists:
        """Words that photographs mention and words that none does, of three draws."""
        found = []
        for seed in range(DRAWS):
            draw = random.Random(seed).sample(range(len(self.split.files)), 400)
            stems = [set[str]().union(*self.split.stems[i]) for i in draw]
            there, none = dict[str, list[bool]](), dict[str, list[bool]]()
            for query in shuffled(known_words, seed):
                wanted = word_stems(query)
                here = [
                    says(own, wanted) and any(is_close(wanted, caption) for caption in self.split.captions[i])
                    for i, own in zip(draw, stems, strict=True)
                ]
                if sum(here) >= LEAST and len(there) < PRESENT:
                    there[query] = here
                elif not any(says(own, wanted) for own in stems) and len(none) < ABSENT:
                    none[query] = here
            asked = there | none
            vectors = torch.from_numpy(sentence_vectors(list(asked)))
            known = self.evidence(draw, kept, list(asked), vectors)
            yes = torch.tensor(list(asked.values())).double()
            found.append(Lists(known, yes, ~yes.any(1), FitsCalibration.nearness(vectors)))
        return joined(found)


def joined(some: list[Lists]) -> Lists:
    """Lists of equally many photographs as one."""
    columns = [vars(one.evidence) for one in some]
    together = Evidence(**{name: np.concatenate([one[name] for one in columns]) for name in columns[0]})
    yes, absent = (torch.cat([getattr(one, name) for one in some]) for name in ("yes", "absent"))
    return Lists(together, yes, absent, np.concatenate([one.near for one in some]))


def shuffled(words: Counter[str], seed: int) -> list[str]:
    """All words in a random order, usual ones earlier: drawn without replacement by the root of their numbers."""
    drawn = random.Random(seed)
    keys = {word: drawn.random() ** (1 / n**USUAL) for word, n in sorted(words.items())}
    return sorted(keys, key=keys.__getitem__, reverse=True)


def grams(caption: str, length: int) -> set[str]:
    """The words of three letters and more of a caption, or pairs of adjacent ones, that are no function words."""
    words = re.findall("[a-z]+", caption.lower())
    groups = [words[i : i + length] for i in range(len(words) - length + 1)]
    return {" ".join(g) for g in groups if all(len(word) > 2 and word not in FUNCTION_WORDS for word in g)}


def absent(lists: Lists, own: Tensor) -> Lists:
    """The lists without their own photographs and those to which anybody said yes."""
    fits = (lists.yes > 0) | (torch.arange(lists.yes.shape[1]) == own.unsqueeze(1))
    evidence, fit = lists.evidence, fits.numpy()
    known = replace(
        evidence,
        image=np.where(fit, -60, evidence.image),
        agreement=np.where(fit & evidence.has_texts, -1.0, evidence.agreement),
        words=np.where(fit, 0, evidence.words),
        together=np.where(fit, 0, evidence.together),
    )
    return replace(
        lists, evidence=known, yes=lists.yes.masked_fill(fits, torch.nan), absent=torch.ones_like(lists.absent)
    )


def query_prior(folder: Path) -> tuple[Tensor, float]:
    """(385,) ridge regression from a query's sentence embedding to the log frequency of its mentions in the training
    split, and its cross-fitted Spearman correlation."""
    images = json.loads((folder / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    captions = [[one["raw"] for one in image["sentences"]] for image in images if image["split"] == "train"]
    count = Counter(g for own in captions for g in {g for c in own for n in (1, 2) for g in grams(c, n)})
    asked = sorted(g for g, n in count.items() if n > 1)
    asked = [g for g in asked if " " not in g] + random.Random(0).sample([g for g in asked if " " in g], 4000)
    y = torch.tensor([count[g] / len(captions) for g in asked], dtype=torch.float64).log()
    x = torch.from_numpy(np.c_[sentence_vectors(asked), np.ones(len(asked))]).double()

    def fit(x: Tensor, y: Tensor) -> Array:
        ridge = torch.diag(torch.cat([torch.full((x.shape[1] - 1,), 1.0), torch.zeros(1)])).double()
        return torch.linalg.solve(x.T @ x + ridge, x.T @ y)

    fold = torch.from_numpy(np.random.default_rng(0).integers(0, 5, len(y)))
    guess = torch.empty_like(y)
    for f in range(5):
        guess[fold == f] = x[fold == f] @ fit(x[fold != f], y[fold != f])
    return fit(x, y), float(spearmanr(guess, y).statistic)


def fitted(rows: list[Rows]) -> LinearLogit:
    """A logit with rounded numbers."""
    found = fit_linear_logit(rows)
    assert found is not None
    slope, bias, *lists = found
    return LinearLogit(round(slope, 4), round(bias, 4), *(tuple(round(v, 4) for v in values) for values in lists))


def present_and_absent(lists: Lists, own: Tensor | None) -> list[Lists]:
    """The lists of queries that something fits, and of others. own: the photographs of sentences."""
    if own is not None:
        return [lists, absent(lists, own)]
    return [lists.some(~lists.absent), lists.some(lists.absent)]


def fit(both: Lists, own: Tensor | None, bare: LinearLogit) -> FitsLogits:
    """The constants of one kind of queries. bare: those of photographs without texts, by left_out_topics.py."""
    if own is not None:  # Too few stand together in a text to say what that means, and all texts have four captions.
        none = np.zeros_like(both.evidence.words)
        both = replace(both, evidence=replace(both.evidence, together=none, few=none))
    columns = both.evidence.image, both.evidence.features(), both.yes.numpy()
    image, features, judged = (values[~np.isnan(columns[2])] for values in columns)
    pairs = [fitted([(np.column_stack([image, some]), judged, np.ones_like(judged))])
             for some in (features, features[:, -2:])]  # fmt: skip
    found = FitsLogits(pairs[0], pairs[1], *[pairs[0]] * 4)  # The last four follow.
    with_texts, without, nothing = list[Rows](), list[Rows](), list[Rows]()
    for some in present_and_absent(both, own):
        gone = bool(some.absent.all())
        for lists in map(some.without_texts, PARTS):
            pair = torch.from_numpy(found.of_pairs(lists.evidence))
            listed = lists.listed(pair)
            k = N_NEAR if own is not None else pair.shape[1]  # Of words everything is known.
            top, place = pair.topk(k, dim=1)
            x = torch.cat([top.unsqueeze(2), listed.unsqueeze(1).expand(-1, k, -1)], 2)
            y, has = lists.yes.gather(1, place), torch.from_numpy(lists.evidence.has_texts).gather(1, place)
            there, w = ~y.isnan(), (1 / torch.arange(1, k + 1).double()).expand_as(y)
            w = w * (ABSENT_HITS if gone else 1 - ABSENT_HITS) / w[there].sum()
            for rows, use in ((with_texts, there & has), (without, there & ~has)):
                rows.append((x[use].numpy(), y[use].numpy(), w[use].numpy()))
            of_lists = np.full(len(listed), (ABSENT_LISTS if gone else 1 - ABSENT_LISTS) / len(listed))
            nothing.append((torch.cat([-listed[:, :1], listed[:, 1:]], 1).numpy(), lists.absent.numpy(), of_lists))
    return FitsLogits(pairs[0], pairs[1], fitted(with_texts), fitted(without), bare, fitted(nothing))


def said(found: FitsLogits, lists: Lists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities of the best N_HITS of each list, what people said, their places, and that nothing fits."""
    pair = found.of_pairs(lists.evidence)
    listed = lists.listed(torch.from_numpy(pair)).numpy()
    hits, nothing = found.of_hits(pair, lists.evidence.has_texts, listed, lists.near), found.of_nothing(listed)
    p, place = torch.from_numpy(sigmoid(hits)).topk(N_HITS, dim=1)
    return p, lists.yes.gather(1, place), place, torch.from_numpy(sigmoid(nothing)).minimum(1 - p[:, 0])


def quality(probability: Tensor, match: Tensor) -> dict[str, float]:
    """Of known hits: mean, rate, calibration error in ten equally full bins, that of perfect probabilities, and how
    they order hits that more than half of the people accept. nAUC is that of MTEB's curve of abstention for the
    fraction of accepted hits, the prediction rejection ratio."""
    known = ~match.isnan()
    p, y = probability[known].double(), match[known].double()
    bins = torch.tensor_split(p.argsort(), 10)

    def error(y: Tensor) -> float:
        return sum(float((p[b].mean() - y[b].mean()).abs()) * len(b) for b in bins if len(b)) / len(y)

    generator = torch.Generator().manual_seed(0)
    perfect = [error(torch.bernoulli(p, generator=generator)) for _ in range(50)]
    wrong, counts = (y <= 0.5).double().numpy(), np.ones((1, len(y)))
    risk = risk_coverage_statistics(-p.numpy(), wrong)
    positive, order = y > 0.5, p.argsort().argsort().double()
    n, rest = int(positive.sum()), int((~positive).sum())
    return {
        "n": len(y), "judged": float(known.double().mean()), "said": float(p.mean()), "right": float(y.mean()),
        "error": error(y), "perfect": sum(perfect) / len(perfect), "E-AURC": float(risk["e_aurc"](counts)[0]),
        "nAUC": float(risk["prr"](counts)[0]),
        "auroc": (float(order[positive].sum()) - n * (n - 1) / 2) / (n * rest) if n and rest else 1.0,
    }  # fmt: skip


def of_nothing(probability: Tensor, nothing: Tensor) -> float:
    """How often it is said that nothing fits. probability (q, k), nothing (q,)."""
    rows = zip(probability.tolist(), nothing.tolist(), strict=True)
    return sum(fits_verdict(p, sum(p), none).kind == "nothing" for p, none in rows) / len(nothing)


def tested(found: FitsLogits, both: Lists, own: Tensor | None) -> dict[str, Any]:
    """How well it holds for other queries, by the fraction of photographs with texts."""
    result: dict[str, Any] = {}
    here, gone = present_and_absent(both, own)
    for part in PARTS:
        p, y, place, nothing = said(found, here.without_texts(part))
        q, _, _, none = said(found, gone.without_texts(part))
        result[f"{1 - part:.0%} with texts"] = values = {
            "hit 1": quality(p[:, 0], y[:, 0]),
            "hits 1 to 10": quality(p, y),
            "nothing said wrongly": of_nothing(p, nothing),
            "absent, hit 1 said": float(q[:, 0].mean()),
            "absent, at least one half": float((q[:, 0] >= LINE).double().mean()),
            "absent, nothing said": of_nothing(q, none),
        }
        if own is not None:
            values["listed first"] = float((place[:, 0] == own).double().mean())
            for few, most in ((1, 5), (6, 7), (8, 99)):
                of = torch.from_numpy((here.evidence.n_words >= few) & (here.evidence.n_words <= most))
                values[f"hit 1, {few} to {most} words"] = quality(p[of, 0], y[of, 0])
    return result


def others(data: Data, lists: Lists, own: Tensor) -> dict[str, dict[str, float]]:
    """The first hits of searches that cost a user less; "said" is the score, a probability of bayesian-bm25 alone."""
    import bm25s
    from bayesian_bm25.scorer import BayesianBM25Scorer

    kept = [0, 1, 3, 4]
    cosines = torch.einsum("qd,ncd->qnc", data.split.vectors[own, 2], data.split.vectors[:, kept])
    engine = bm25s.BM25()
    captions = [[stem for c in kept for stem in word_stems(one[c])] for one in data.split.captions]
    engine.index(captions, show_progress=False)
    queries = [word_stems(data.split.captions[i][2]) for i in own.tolist()]
    words = torch.from_numpy(np.stack([engine.get_scores(query) for query in queries]))
    bayesian = BayesianBM25Scorer(base_rate="auto")
    bayesian.index(captions, show_progress=False)
    probability = torch.from_numpy(np.stack([bayesian.get_probabilities(query) for query in queries]))
    minilm = cosines.amax(2) + cosines.mean(2)
    ranks = [(-score).argsort(1).argsort(1).double() for score in (minilm, words)]
    fused = 1 / (60 + ranks[0]) + 1 / (60 + ranks[1])
    scores = {
        "MiniLM on captions": minilm, "BM25": words, "rank fusion": fused, "bayesian-bm25": probability,
        "image": torch.from_numpy(lists.evidence.image), "listed": listed_probability(data, own),
    }  # fmt: skip
    found = {}
    for name, score in scores.items():
        value, first = score.double().max(1)
        yes = lists.yes.gather(1, first.unsqueeze(1))[:, 0]
        is_probability = name in ("bayesian-bm25", "listed")
        found[name] = quality(value if is_probability else value.argsort().argsort() / len(value), yes)
        found[name]["listed first"] = float((first == own).double().mean())
        if not is_probability:
            for key in ("said", "error", "perfect"):
                del found[name][key]
    return found


def listed_probability(data: Data, own: Tensor) -> Array:
    """(q, n) probabilities of target "listed", as a gallery without texts says them."""
    queries = data.split.model.embed_texts([data.split.captions[i][2] for i in own.tolist()]).tensors()
    distance = get_distance("csd").matrix(queries, data.split.images)
    context = data.scorer.context(distance, queries, lambda column: data.split.images[column])
    return data.scorer.match_probability(distance, len(data.split.images.mean), context)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("judgements", type=Path)
    parser.add_argument("--out", type=Path, help="where the constants go")
    given = parser.parse_args()
    prior, spearman = query_prior(given.flickr8k)
    val, test = (Data(given.flickr8k, split, prior) for split in ("val", "test"))
    judged = [test.sentences(given.judgements / "crowd.csv", kept) for kept in TEXTS]
    own = judged[0][1]
    captions = [caption for data in (val, test) for of_one in data.split.captions for caption in of_one]
    known_words = {
        name: Counter(g for caption in captions for g in grams(caption, n))
        for n, name in ((1, "words"), (2, "two words"))
    }
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(own)))
    a, b = order[: len(own) // 2], order[len(own) // 2 :]
    sets, tests = (
        {
            **{w: [data.words(n, known_words[w], kept) for kept in TEXTS] for n, w in enumerate(known_words, 1)},
            SENTENCES: [lists.some(half) for lists, _ in judged],
        }
        for half, data in ((a, val), (b, test))
    )
    logits = {
        name: fit(lists[-1], own[a], packaged.hit_bare)
        if name == SENTENCES
        else fit(joined(lists), None, packaged.hit_bare)
        for (name, lists), packaged in zip(sets.items(), FitsCalibration.packaged().lengths, strict=True)
    }
    found = FitsCalibration(tuple(logits.values()), tuple(round(v, 4) for v in prior.tolist()))
    result: dict[str, Any] = {"prior, Spearman": spearman}
    for name, by_number in tests.items():
        for kept, lists in zip(TEXTS, by_number, strict=True):
            found_by = tested(logits[name], lists, own[b] if name == SENTENCES else None)
            result[name if len(kept) == 4 else f"{name}, {len(kept)} captions"] = found_by
    result["others"] = others(test, tests[SENTENCES][-1], own[b])
    print(json.dumps(result, indent=1))
    for path, values in ((given.json, result), (given.out, found.to_json())):
        if path:
            path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
