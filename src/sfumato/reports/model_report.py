"""A report of a model on a split: what it needs is embedded, read from the run's folder, and made small enough for one page."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato import __version__
from sfumato.data.images import thumbnail
from sfumato.data.problems import Problems
from sfumato.data.sources import DataConfig
from sfumato.encoders.regions import uses_regions
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import MatchingLogits
from sfumato.models.embed import RetrievalModel
from sfumato.models.run import LOG, RECIPE, Run, weights_digest
from sfumato.models.splits import embed_split, load_split
from sfumato.reports.report import Report, ReportData, make_report
from sfumato.studies.analyse import FORMAT, NAMES


def report_model(retrieval_model: RetrievalModel, data: DataConfig, split: str, out: Path, *, name: str) -> Report:
    """Evaluate any model on a split of any data and write a page about it.

    Args:
        matcher: the model.
        data: where the split comes from.
        split: its name.
        out: the HTML file; its folder must exist.
        name: of the model, for the title.

    Returns:
        The page and its figures.
    """
    return _report(retrieval_model, data, split, out, name, run=None)


def report_run(run: Run, split: str, out: Path | None = None) -> tuple[Report, Path]:
    """Evaluate a run on a split of its own data and write a page about it.

    Beside what :func:`report_model` shows, the page has the recipe, the training curves, and what `sfumato evaluate`,
    `sfumato trust` and `sfumato analyse` have left in the run's folder for this split.

    Args:
        run, split: what to evaluate.
        out: the HTML file; report-SPLIT.html in the run's folder if None.

    Returns:
        (the page and its figures, where it is).
    """
    path = run.folder / f"report-{split}.html" if out is None else out
    return _report(run, run.recipe.data, split, path, run.recipe.name or run.folder.name, run=run), path


def _report(
    retrieval_model: RetrievalModel, data: DataConfig, split: str, out: Path, name: str, *, run: Run | None
) -> Report:
    if not out.parent.is_dir():
        raise FileNotFoundError(f"cannot write {out}: the folder {out.parent} does not exist; create it first")
    problems = Problems()
    prepared = load_split(retrieval_model.model, data, split, problems)
    pairs = prepared.data
    images, texts = (_on_host(e) for e in embed_split(retrieval_model.model, prepared))
    report = make_report(
        ReportData(
            model=name,
            split=split,
            images=images,
            texts=texts,
            relevance=pairs.relevance(),
            distance=retrieval_model.distance,
            logits=(retrieval_model.logit_scale, retrieval_model.logit_bias),
            calibrated=retrieval_model.calibrated,
            captions=pairs.texts,
            picture_names=pairs.image_ids,
            picture=lambda i: thumbnail(pairs.images[i]),
            learnt_logits=None if run is None else _learnt_logits(run),
            text_kinds=pairs.text_kinds,
            others=[] if run is None else _evaluations(run.folder, split, run.distance, images.n, texts.n),
            trust=None if run is None else read_object(run.folder / f"trust-{split}.json"),
            analyses={} if run is None else _analyses(run, split, images.n, texts.n),
            analysis_picture=lambda name: None if run is None else read_picture(run.folder / f"analysis-{split}", name),
            recipe="" if run is None else (run.folder / RECIPE).read_text(encoding="utf-8"),
            log=[] if run is None else _log(run.folder / LOG),
            notes=_notes(len(problems), uses_regions(retrieval_model.model)),
            version=__version__,
        )
    )
    write_atomically(out, report.html)
    return report


def _notes(left_out: int, features: bool) -> list[str]:
    told = [f"{left_out} items could not be used and were left out."] if left_out else []
    return told + (["The images are region features: there are no pictures to show."] if features else [])


def _on_host(embeddings: GaussianEmbedding) -> GaussianEmbedding:
    return GaussianEmbedding(embeddings.mean.cpu(), embeddings.log_var.cpu())


def _learnt_logits(run: Run) -> tuple[float, float] | None:
    """Scale and bias of the loss, where it learns both: without a bias there are scores of a softmax, no probabilities."""
    logits = getattr(run.loss, "logits", None)
    if not isinstance(logits, MatchingLogits) or not logits.logit_bias.requires_grad:
        return None
    return float(logits.logit_scale.detach()), float(logits.logit_bias.detach())


def _evaluations(folder: Path, split: str, own: str, n: int, m: int) -> list[dict[str, Any]]:
    """What was evaluated by other distances on as many images and texts, in the order of their names."""
    found = []
    for path in sorted(folder.glob("evaluation-*.json")):
        result = read_object(path)
        if (
            result is not None
            and result.get("distance") != own
            and path.name == f"evaluation-{split}-{result.get('distance')}.json"
            and (result.get("n_images"), result.get("n_texts")) == (n, m)
        ):
            found.append(result)
    return found


def _analyses(run: Run, split: str, n: int, m: int) -> dict[str, dict[str, Any]]:
    """What studies found with these weights on as many images and texts, by name."""
    found = {name: read_object(run.folder / f"analysis-{split}" / f"{name}.json") for name in NAMES}
    expected = FORMAT, split, n, m, weights_digest(run.model)
    keys = ("format", "split", "n_images", "n_texts", "weights")
    return {
        name: study
        for name, study in found.items()
        if study is not None and tuple(study.get(key) for key in keys) == expected
    }


def read_picture(folder: Path, name: str) -> bytes | None:
    """A picture beside the studies of a folder; None if it is not there."""
    try:
        return (folder / Path(name).name).read_bytes()
    except OSError:
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """An object from a file; None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _log(path: Path) -> Sequence[dict[str, Any]]:
    """The finite numbers of each whole line of a training log."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append({k: v for k, v in value.items() if not isinstance(v, float) or math.isfinite(v)})
    return lines
