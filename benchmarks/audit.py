"""How well an audit finds wrong pairs that were put in and true pairs that were hidden, by several scores.

    python benchmarks/audit.py injected RUN [RUN ...] [--split test] [--rates 0.05 0.2 0.5]
    python benchmarks/audit.py trained RUN [--parts PART-0 PART-1]
    python benchmarks/audit.py hidden RUN [RUN ...] [--split test] [--share 0.5]
    python benchmarks/audit.py captions FOLDER    # testall_caps.txt, coco_test_ids.npy, the lists of eccv_caption

`injected` shuffles pairs of a split that the runs have not seen. `trained` asks a run that was trained on noisy pairs
(data.noise_rate) about these pairs, or runs that each left a part of them out (data.leave_out=0/2 and 1/2) about that
part. `hidden` takes listed pairs away and asks for them among all unlisted ones. `captions` needs no pictures and no
run: each of COCO's 5,000 test images is the Gaussian of its five captions' MiniLM features, and what people found to
match beyond the list, CxC and ECCV Caption, is asked for among all captions. Intervals: 95 %, bootstrap over images.
--json FILE keeps all figures.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser, write_json

from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.splits import images_of_part, parse_part, shuffle_pairs
from sfumato.distances import get_distance
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.frozen import cached_features
from sfumato.encoders.heads import AveragePool
from sfumato.evaluation.benchmark_ground_truths import eccv_caption
from sfumato.evaluation.pair_scores import NEIGHBOURS, ListedScores, audit_pairs, wrong_fraction, wrong_probability
from sfumato.files import cache_folder
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval, Statistic, auroc, auroc_statistic, bootstrap, mean_statistic
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.models.embed import embed_split, load_split, load_splits
from sfumato.models.run import Run, load_run
from sfumato.workflows.audit import prepare_listed

ASKED = 1_000
"""Most images whose missing matches are asked for among all captions."""

DENSE = 20_000_000
"""Most pairs of which all distances are held, for the scores that the package does not compute."""


def average_precision_statistic(score: np.ndarray, positive: np.ndarray) -> Statistic:
    """Mean precision at the places of the positives, ties in the order given, to be resampled."""
    order = np.argsort(-score, kind="stable")
    y = positive[order].astype(float)

    def statistic(counts: np.ndarray) -> np.ndarray:
        drawn = counts[:, order]
        right = np.cumsum(drawn * y, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            precision = np.nan_to_num(right / np.cumsum(drawn, axis=1))
            return np.asarray((precision * drawn * y).sum(1) / right[:, -1])

    return statistic


def precision_at(score: np.ndarray, positive: np.ndarray, k: int) -> float:
    """Share of positives among the k highest."""
    return float(positive[np.argsort(-score, kind="stable")[:k]].mean())


def dense_scores(distance: np.ndarray, listed: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    """(n, m) scores, high where a pair is farther than it should be, that compare with unlisted items in other ways."""
    rest = np.where(listed, np.inf, distance)
    result = {}
    k = [min(NEIGHBOURS, size) for size in rest.shape]
    of_image = np.partition(rest, k[1] - 1, axis=1)[:, : k[1]].mean(1, keepdims=True)
    of_text = np.partition(rest, k[0] - 1, axis=0)[: k[0]].mean(0, keepdims=True)
    result["excess"] = distance - (of_image + of_text) / 2
    logits = torch.from_numpy(-scale * rest)
    result["softmax, both directions"] = (
        scale * distance + (torch.logsumexp(logits, 1)[:, None] + torch.logsumexp(logits, 0)[None]).numpy() / 2
    )
    return result


def pair_scores(
    images: GaussianEmbedding, texts: GaussianEmbedding, ground_truth: Relevance, run: Run
) -> tuple[ListedScores, dict[str, np.ndarray]]:
    """The package's scores of the listed pairs, and others, all high for suspects."""
    listed, _ = audit_pairs(images, texts, ground_truth, distance=run.distance)
    image, text = torch.from_numpy(listed.image), torch.from_numpy(listed.text)
    d = listed.distance
    result = {
        "distance": d,
        "distance of means": get_distance("squared_l2").row(images[image], texts[text]).double().numpy(),
        "rank, mean of logarithms": np.log1p(listed.text_rank) + np.log1p(listed.image_rank),
        "margin": d - (listed.better_text_distance + listed.better_image_distance) / 2,
        "excess": listed.excess,
    }
    if images.n * texts.n <= DENSE:
        dense = get_distance(run.distance).matrix(images, texts).double().numpy()
        for name, matrix in dense_scores(dense, ground_truth.to_dense(), run.logit_scale).items():
            result.setdefault(name, matrix[listed.image, listed.text])
    return listed, result


def judged(
    scores: Mapping[str, np.ndarray], wrong: np.ndarray, image: np.ndarray, resamples: int
) -> dict[str, dict[str, Any]]:
    """AUROC, average precision and precision at as many as are wrong, of each score."""
    statistics: dict[str, Statistic] = {}
    for name, score in scores.items():
        statistics[f"{name}/auroc"] = auroc_statistic(score, wrong)
        statistics[f"{name}/ap"] = average_precision_statistic(score, wrong)
    found = bootstrap(statistics, len(wrong), n_resamples=resamples, groups=image)
    return {
        name: {kind: as_list(found[f"{name}/{kind}"]) for kind in ("auroc", "ap")}
        | {"precision": precision_at(score, wrong, int(wrong.sum()))}
        for name, score in scores.items()
    }


def as_list(interval: Interval) -> list[float | None]:
    return [interval.value, interval.low, interval.high]


def estimates(log_odds: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """The estimated share of wrong pairs and how well its probabilities are calibrated."""
    share = wrong_fraction(log_odds)
    error = expected_calibration_error(wrong_probability(log_odds, share), wrong, binning="width")
    return {"wrong": float(wrong.mean()), "estimated": share, "ece": float(error)}


def log_odds(run: Run, distance: np.ndarray) -> np.ndarray:
    assert run.calibration is not None
    return np.asarray(run.calibration.logit(distance, match_fraction=0.5))


def is_wrong(clean: PairData, image: np.ndarray, text: np.ndarray) -> np.ndarray:
    """(p,) bool, whether pairs are not among those of the clean data."""
    m = len(clean.text_ids)
    return ~np.isin(image * m + text, clean.pairs[:, 0] * m + clean.pairs[:, 1])


def injected(folder: Path, split: str, rates: Sequence[float], resamples: int) -> dict[str, Any]:
    """Wrong pairs in a split that the run has not seen."""
    run = load_run(folder)
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    result = {}
    for rate in rates:
        noisy, _ = shuffle_pairs(prepared.data, rate, seed=run.recipe.train.seed)
        listed, scores = pair_scores(images, texts, noisy.relevance(), run)
        wrong = is_wrong(prepared.data, listed.image, listed.text)
        result[str(rate)] = {
            "share": estimates(log_odds(run, listed.distance), wrong),
            "scores": judged(scores, wrong, listed.image, resamples),
        }
    return result


def trained(folder: Path, parts: Sequence[Path], resamples: int) -> dict[str, Any]:
    """The noisy pairs that a run was trained on, asked of itself, or of runs that left a part out about that part."""
    config = load_run(folder).recipe.data
    clean = load_splits(config, Problems())["train"]
    every: dict[str, list[np.ndarray]] = {}
    facts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for path in parts or [folder]:
        run = load_run(path)
        prepared = prepare_listed(run, config, "train")[0]
        data, images, texts = prepared.data, *embed_split(run.model, prepared)
        chosen = np.arange(images.n)
        if parts:
            chosen = images_of_part(data, *parse_part(run.recipe.data.leave_out))
        kept = np.unique(data.pairs[np.isin(data.pairs[:, 0], chosen), 1])
        ground_truth = data.relevance().select_queries(chosen).select_gallery(kept)
        listed, scores = pair_scores(images[torch.from_numpy(chosen)], texts[torch.from_numpy(kept)], ground_truth, run)
        for name, score in scores.items():
            every.setdefault(name, []).append(score if name.startswith("rank") else run.logit_scale * score)
        image, text = chosen[listed.image], kept[listed.text]
        facts.append((is_wrong(clean, image, text), image, log_odds(run, listed.distance)))
    wrong, image, odds = (np.concatenate(column) for column in zip(*facts, strict=True))
    joined = {name: np.concatenate(values) for name, values in every.items() if len(values) == len(facts)}
    return {"share": estimates(odds, wrong), "scores": judged(joined, wrong, image, resamples)}


def hidden(folder: Path, split: str, share: float, resamples: int) -> dict[str, Any]:
    """True pairs that are taken off the list, among all unlisted pairs."""
    run = load_run(folder)
    prepared = load_split(run.model, run.recipe.data, split)
    images, texts = embed_split(run.model, prepared)
    pairs = prepared.data.pairs
    gone = np.sort(np.random.default_rng(run.recipe.train.seed).permutation(len(pairs))[: round(share * len(pairs))])
    left = np.delete(pairs, gone, axis=0)
    ground_truth = Relevance.from_pairs(left[:, 0], left[:, 1], n_queries=images.n, n_gallery=texts.n)
    listed, true = ground_truth.to_dense(), prepared.data.relevance().to_dense()
    distance = get_distance(run.distance).matrix(images, texts).double().numpy()
    scores = {"distance": distance, "distance of means": get_distance("squared_l2").matrix(images, texts).numpy()}
    scores |= dense_scores(distance, listed, run.logit_scale)
    y, image = true[~listed], np.nonzero(~listed)[0]
    result: dict[str, Any] = {"hidden": len(gone), "unlisted": len(y), "scores": {}}
    for name, matrix in scores.items():
        score = -matrix[~listed].astype(float)
        n = resamples if name == "distance" else 0
        ap = bootstrap({"ap": average_precision_statistic(score, y)}, len(y), n_resamples=n, groups=image)["ap"]
        at = {str(k): precision_at(score, y, k) for k in (100, 1000)}
        result["scores"][name] = {"auroc": auroc(score, y), "ap": as_list(ap), "precision": at}
    # What the command lists: the closest few of each item, each wording once.
    _, found = audit_pairs(images, texts, ground_truth, distance=run.distance, wording=prepared.data.texts)
    hit = true[found.image, found.text]
    assert run.calibration is not None
    p = run.calibration.of("t2i").probability(torch.from_numpy(found.distance), n_gallery=images.n)
    result["candidates"] = {
        "n": len(found),
        "of the hidden": float(hit.sum() / len(gone)),
        "precision": {str(k): float(hit[:k].mean()) for k in (100, 1000)},
        "ece": float(expected_calibration_error(p, torch.from_numpy(hit.astype(float)), binning="width")),
        "expected over true": float(p.sum() / hit.sum()),
    }
    return result


def captions(folder: Path, resamples: int) -> dict[str, Any]:
    """Matches that COCO does not list, known from CxC and ECCV Caption, by images made of their own captions."""
    ground_truths = eccv_caption(folder)
    listed = ground_truths["coco_5k"].i2t
    lines = (folder / "testall_caps.txt").read_text(encoding="utf-8").splitlines()
    texts = GaussianEmbedding.point(sentence_features(lines))
    own = torch.from_numpy(listed.indices).view(listed.n_queries, -1)
    of_captions = texts.mean[own]  # (n, 5, d)
    images = GaussianEmbedding(of_captions.mean(1), of_captions.var(1).log())
    distances = {
        "distance": get_distance("csd").matrix(images, texts).numpy(),
        "distance of means": get_distance("squared_l2").matrix(images, texts).numpy(),
    }
    each = [get_distance("squared_l2").matrix(texts[own[:, k]], texts).numpy() for k in range(own.shape[1])]
    distances |= {"nearest of its captions": np.minimum.reduce(each), "its first caption alone": each[0]}
    del each
    result: dict[str, Any] = {}
    for name in ("cxc", "eccv"):
        missing = ground_truths[name].i2t.to_dense() & ~listed.to_dense()
        asked = np.flatnonzero(missing.any(1))
        asked = np.sort(np.random.default_rng(0).permutation(asked)[:ASKED])
        open_pairs = ~listed.to_dense()[asked]
        y = missing[asked][open_pairs]
        result[name] = {"images": len(asked), "missing": int(y.sum()), "of unlisted": float(y.mean()), "scores": {}}
        for what, distance in distances.items():
            score = -distance[asked][open_pairs]
            per_image = [
                average_precision(-distance[i, open_], missing[i, open_])
                for i, open_ in zip(asked, open_pairs, strict=True)
            ]
            interval = bootstrap({"map": mean_statistic(np.array(per_image))}, len(asked), n_resamples=resamples)["map"]
            result[name]["scores"][what] = {
                "auroc": auroc(score, y),
                "ap": average_precision(score, y),
                "ap of an image": as_list(interval),
                "precision": {str(k): precision_at(score, y, k) for k in (100, 1000)},
            }
    _, found = audit_pairs(images, texts, listed, wording=lines)
    known = ground_truths["cxc"].i2t.to_dense() | ground_truths["eccv"].i2t.to_dense()
    hit = known[found.image, found.text]
    result["candidates"] = {
        "n": len(found),
        "of the missing": float(hit.sum() / (known & ~listed.to_dense()).sum()),
        "precision": {str(k): float(hit[:k].mean()) for k in (100, 1000)},
    }
    return result


def sentence_features(lines: Sequence[str]) -> torch.Tensor:
    """(n, 384) unit means of MiniLM's token features."""
    store, _ = cached_features(text_backbone("minilm-l6-v2"), [partial(str, line) for line in lines], cache_folder())
    batches = (store.batch(rows).to("cpu") for rows in np.array_split(np.arange(len(lines)), len(lines) // 250 + 1))
    pooled = torch.cat([AveragePool()(batch.values, batch.mask) for batch in batches])
    return torch.nn.functional.normalize(pooled, dim=-1)


def average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    """Mean precision at the places of the positives, ties in the order given."""
    right = np.cumsum(positive[np.argsort(-score, kind="stable")])
    places = np.flatnonzero(np.diff(right, prepend=0))
    return float((np.arange(1, len(places) + 1) / (places + 1)).mean())


def main() -> None:
    """See the module."""
    parser = command_parser(__doc__)
    parser.add_argument("what", choices=("injected", "trained", "hidden", "captions"))
    parser.add_argument("runs", type=Path, nargs="+", help="of captions: the folder of COCO's texts")
    parser.add_argument("--split", default="test")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.2, 0.5])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--parts", type=Path, nargs="+", default=[])
    parser.add_argument("--resamples", type=int, default=200)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for run in options.runs:
        if options.what == "injected":
            result[str(run)] = injected(run, options.split, options.rates, options.resamples)
        elif options.what == "trained":
            result[str(run)] = trained(run, options.parts, options.resamples)
        elif options.what == "captions":
            result[str(run)] = captions(run, options.resamples)
        else:
            result[str(run)] = hidden(run, options.split, options.share, options.resamples)
        print(run)
        show(result[str(run)])
    write_json(options.json, result)


def show(values: Mapping[str, Any], indent: str = "  ") -> None:
    """Nested figures, one line for each that holds none."""
    for name, value in values.items():
        if isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name}: " + ", ".join(f"{k} {figure(v)}" for k, v in value.items()))
        else:
            print(f"{indent}{name}: {figure(value)}")


def figure(value: Any) -> str:
    if isinstance(value, list):
        middle, low, high = value
        return f"{middle:.4f}" + ("" if low is None else f" [{low:.4f}, {high:.4f}]")
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
