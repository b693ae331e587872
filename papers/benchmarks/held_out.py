"""Does the total variance mean ambiguity, for wordings that no training saw? Five folds, teachers and baselines.

    python -m papers.benchmarks.held_out RUNS [--seeds 0 1 2] [--json FILE]

Every fifth of the wordings and a tenth of the concepts are held out of a training, and of its variance stage, once.
Runs and their scores are kept in the folder RUNS, so that the command resumes.
"""

import argparse
import copy
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from papers.benchmarks.ambiguity import FIGURES, baselines, measure_ambiguity
from papers.shown import markdown
from papers.uncertainty.estimators import ESTIMATORS
from sfumato.data.emoji import load_emoji
from sfumato.encoders.backbones import text_backbone
from sfumato.evaluation.estimators import Matching, estimate_uncertainty
from sfumato.evaluation.protocols import EmbeddedSplit
from sfumato.ids import DIRECTIONS
from sfumato.metrics.bootstrap import auroc, average_ranks
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.reports.tables import MISSING, Table
from sfumato.search.exact import rank_relevant
from sfumato.training.loop import fit
from sfumato.training.validation import teach_variances
from sfumato.workflows.evaluation import over_seeds

RECIPE, N_FOLDS = "emoji-demo", 5

TEACHERS = ("listed_matches", "expected_matches", "match_entropy")
GALLERY = ("expected_matches", "match_entropy", "top1_mismatch")


def run_of(folder: Path, seed: int, fold: int) -> Path:
    """Train the fold, or take it if it is there, and write the scores of its test split."""
    run, scores = folder / f"seed{seed}-fold{fold}", folder / f"seed{seed}-fold{fold}.npz"
    if scores.exists():
        return scores
    held_out = [f"held_out_wordings={fold}/{N_FOLDS}", f"held_out_concepts={fold}/10"]
    changes = [*(f"data.options.{option}" for option in held_out), f"train.seed={seed}", "variance_stage.epochs=0"]
    fit(load_recipe(RECIPE, changes), run)
    stage = load_recipe(RECIPE, []).variance_stage
    loaded = load_run(run)
    train, val, test = (load_split(loaded.model, loaded.recipe.data, name) for name in ("train", "val", "test"))
    weights = copy.deepcopy(loaded.model.state_dict())
    calibration = calibrate_split(embed_split(loaded.model, val), val.data, loaded.distance, split="val")
    found: dict[str, Any] = {"texts": np.array(test.data.texts), "images": np.array(test.data.image_ids)}
    found["seen"] = np.isin(found["texts"], train.data.texts)
    embedded = EmbeddedSplit(*embed_split(loaded.model, test), test.data.relevance())
    chosen = {name: ESTIMATORS[name] for name in GALLERY}
    for direction in DIRECTIONS:
        q = embedded.query(direction)
        matching = Matching(loaded.distance, calibration.logit_scale, calibration.logit_bias, direction)
        of_gallery = estimate_uncertainty(q.queries, q.gallery, matching, estimators=chosen)
        found |= {f"{direction}/gallery {name}": values for name, values in of_gallery.items()}
        ranks = rank_relevant(q.queries, q.gallery, q.relevance, matching.oriented_distance)
        metrics = per_query_metrics(ranks, q.relevance)
        found |= {f"{direction}/hit": metrics["recall@1"], f"{direction}/map": metrics["map@r"]}
    for teacher in TEACHERS:
        loaded.model.load_state_dict(weights)
        config = stage.model_copy(update={"teacher": teacher, "epochs": stage.epochs or 10})
        logits = calibration.logit_scale, calibration.logit_bias
        teach_variances(loaded.model, (train.images, train.texts), train.data, config, logits=logits, seed=seed)
        images, texts = embed_split(loaded.model, test)
        assert torch.equal(texts.mean, embedded.texts.mean)
        found |= {f"i2t/taught {teacher}": images.total_variance.numpy()}
        found |= {f"t2i/taught {teacher}": texts.total_variance.numpy()}
    backbone = text_backbone("minilm-l6-v2", max_tokens=32, pooled=True)
    known = [(part.data.texts, np.concatenate(backbone(list(part.data.texts)))) for part in (test, train)]
    trivial = baselines(*known[0], *known[1], train.data.relevance().transpose().counts)
    found |= {f"t2i/{name}": values for name, values in trivial.items()}
    np.savez(scores, **found)
    return scores


def pooled(files: list[Path], truth: Relevance, n_resamples: int) -> dict[str, Any]:
    """The figures of one seed, its folds pooled."""
    folds = [dict(np.load(file)) for file in files]
    assert all((each["texts"] == folds[0]["texts"]).all() for each in folds)
    names = [
        key.removeprefix("t2i/") for key in folds[0] if key.startswith("t2i/") and not key.endswith(("/hit", "/map"))
    ]
    result: dict[str, Any] = {"map@r": {}, "recall@1": {}, "wrong": {}}
    for wordings in ("seen", "unseen"):
        chosen = [(each, np.flatnonzero(each["seen"] == (wordings == "seen"))) for each in folds]
        scores = {name: np.concatenate([each[f"t2i/{name}"][rows] for each, rows in chosen]) for name in names}
        relevance = truth.select_queries(np.concatenate([rows for _, rows in chosen]))
        figures = measure_ambiguity(scores, relevance, n_resamples=n_resamples if wordings == "unseen" else 0)
        result[wordings] = {name: {f: vars(figures[name][f]) for f in FIGURES} for name in names}
    for direction in ("t2i", "i2t"):
        for metric, key in (("map@r", "map"), ("recall@1", "hit")):
            result[metric][direction] = fmean(float(np.nanmean(each[f"{direction}/{key}"])) for each in folds)
        for name in [key for key in folds[0] if key.startswith((f"{direction}/taught", f"{direction}/gallery"))]:
            errors = [(each[name], each[f"{direction}/hit"]) for each in folds]
            errors = [(u[~np.isnan(hit)], hit[~np.isnan(hit)]) for u, hit in errors]
            deciles = [vars(RecallByUncertainty.of(average_ranks(u), hit))["correlation"] for u, hit in errors]
            result["wrong"][name] = {
                "auroc": fmean(auroc(u, hit == 0) for u, hit in errors),
                "deciles": fmean(deciles),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    truth = load_emoji()["test"].relevance().transpose()
    found = []
    for seed in options.seeds:
        files = [run_of(options.runs, seed, fold) for fold in range(N_FOLDS)]
        found.append(pooled(files, truth, 200 if seed == options.seeds[0] else 0))
    print_tables(found)
    if options.json:
        options.json.write_text(json.dumps({"recipe": RECIPE, "seeds": found}, indent=1) + "\n")


def print_tables(found: list[dict[str, Any]]) -> None:
    """The tables of docs/results/ambiguity.md and estimators.md."""
    columns = [(wordings, figure) for wordings in ("seen", "unseen") for figure in FIGURES]
    headings = ["predictor of the number of matches", *(f"{w}: {f}" for w, f in columns)]
    rows = [[n, *(_mean([seed[w][n][f]["value"] for seed in found]) for w, f in columns)] for n in found[0]["unseen"]]
    print(markdown(Table("", headings, rows)))
    rows = [
        [name, *(_mean([seed["wrong"][name][f] for seed in found]) for f in ("auroc", "deciles"))]
        for name in found[0]["wrong"]
    ]
    print(f"\n{markdown(Table('', ['predictor of a wrong first hit', 'AUROC', 'deciles and recall@1'], rows))}")
    for metric in ("map@r", "recall@1"):
        print(metric, {d: _mean([seed[metric][d] for seed in found]) for d in ("t2i", "i2t")})


def _mean(values: list[float | None]) -> str:
    return MISSING if None in values else str(over_seeds([{"mean": value} for value in values])["mean"])


if __name__ == "__main__":
    main()
