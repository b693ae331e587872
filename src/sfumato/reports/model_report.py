"""A report of a model on a split: it embeds the split, reads the results in the run folder, and writes the page."""

from pathlib import Path
from typing import Any

from sfumato import __version__
from sfumato.data.images import Problems, thumbnail
from sfumato.data.sources import DataConfig
from sfumato.encoders.feature_rows import features_read
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty
from sfumato.matching import MatchingLogits
from sfumato.models.embed import embed_split, load_split
from sfumato.models.model import Model
from sfumato.models.run import LOG, RECIPE, Run, read_log, weights_digest
from sfumato.reports.page_files import read_evaluations, read_image, read_object, read_studies
from sfumato.reports.report import Report, make_report
from sfumato.reports.report_charts import ReportData
from sfumato.reports.study_pages import write_analyses
from sfumato.studies.analyse import FORMAT, NAMES, analyse_model


def report_model(
    retrieval_model: Model,
    data: DataConfig,
    split: str,
    out: Path,
    *,
    name: str,
    uncertainty: ScalarUncertainty = "total_variance",
) -> Report:
    """Evaluate any model on a split of any data and write a page about it."""
    return _report(retrieval_model, data, split, out, name, uncertainty, run=None)


def report_run(
    run: Run,
    split: str,
    out: Path | None = None,
    *,
    analyses: bool = False,
    uncertainty: ScalarUncertainty = "total_variance",
) -> tuple[Report, Path]:
    """Evaluate a run on a split of its own data and write a page about it.

    In addition to the content of :func:`report_model`, the page has the recipe, the training curves, and the results of
    `sfumato evaluate`, `sfumato trust` and `sfumato analyse` for this split in the run folder.

    Returns (the page and its figures, the file).
    """
    path, name = run.folder / f"report-{split}.html" if out is None else out, run.recipe.name or run.folder.name
    if analyses:
        folder = run.folder / f"analysis-{split}"
        found = analyse_model(run, run.recipe.data, split, name=name, earlier=read_studies(folder))
        if found.studies:
            write_analyses(found, folder, __version__)
    return _report(run, run.recipe.data, split, path, name, uncertainty, run=run), path


def _report(
    retrieval_model: Model,
    data: DataConfig,
    split: str,
    out: Path,
    name: str,
    uncertainty: ScalarUncertainty,
    *,
    run: Run | None,
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
            calibration=retrieval_model.calibration,
            captions=pairs.texts,
            image_names=pairs.image_ids,
            thumbnail=lambda i: thumbnail(pairs.images[i]),
            uncertainty=uncertainty,
            text_kinds=pairs.text_kinds,
            learnt_logits=None if run is None else _learnt_logits(run),
            others=[] if run is None else read_evaluations(run.folder, split, run.distance, images.n, texts.n),
            trust=None if run is None else read_object(run.folder / f"trust-{split}.json"),
            analyses={} if run is None else _analyses(run, split, images.n, texts.n),
            analysis_image=lambda name: None if run is None else read_image(run.folder / f"analysis-{split}", name),
            recipe="" if run is None else (run.folder / RECIPE).read_text(encoding="utf-8"),
            log=[] if run is None else read_log(run.folder / LOG),
            notes=_notes(len(problems), features_read(retrieval_model.model.image)),
            version=__version__,
        )
    )
    write_atomically(out, report.html)
    return report


def _notes(left_out: int, features: str) -> list[str]:
    notes = [f"{left_out} items could not be used and were left out."] if left_out else []
    return notes + ([f"The images are {features}: there are no image files to show."] if features else [])


def _on_host(embeddings: GaussianEmbedding) -> GaussianEmbedding:
    return GaussianEmbedding(embeddings.mean.cpu(), embeddings.log_var.cpu())


def _learnt_logits(run: Run) -> tuple[float, float] | None:
    """Scale and bias of the loss if it learns both; without a bias its scores are not probabilities."""
    logits = getattr(run.loss, "logits", None)
    learns_both = isinstance(logits, MatchingLogits) and logits.logit_bias.requires_grad
    return run.loss.match_logits() if learns_both else None


def _analyses(run: Run, split: str, n: int, m: int) -> dict[str, dict[str, Any]]:
    """The results of studies with the same weights and the same numbers of images and texts, by name."""
    found = {name: read_object(run.folder / f"analysis-{split}" / f"{name}.json") for name in NAMES}
    expected = FORMAT, split, n, m, weights_digest(run.model)
    keys = ("format", "split", "n_images", "n_texts", "weights")
    return {
        name: study
        for name, study in found.items()
        if study is not None and tuple(study.get(key) for key in keys) == expected
    }
