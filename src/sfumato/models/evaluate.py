"""Evaluation of any model on a split of any data, and the files of the figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.data.sources import DataConfig
from sfumato.evaluation.benchmarks import plan_ranks
from sfumato.evaluation.ground_truth import GroundTruth, ground_truth_from_data, ids_by_order
from sfumato.evaluation.protocols import EmbeddedSet, Evaluation, EvaluationOptions, evaluate_retrieval
from sfumato.files import write_json
from sfumato.models.embed import embed_split, load_split
from sfumato.models.model import Model
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.run import Run
from sfumato.progress import say


def embed_for_evaluation(
    model: Model,
    data: DataConfig,
    split: str,
    *,
    ground_truths: Sequence[GroundTruth] = (),
    process_group: ProcessGroup | None = None,
) -> EmbeddedSet:
    """Embed a split of any data; its ground truth is named after the split."""
    process_group = process_group or alone()
    if ground_truths:
        data = data.model_copy(update={"equal_texts": "separate"})
    prepared = load_split(model.model, data, split, process_group=process_group)
    own, kinds = ground_truth_from_data(prepared.data, name=split), prepared.data.text_kinds
    chosen = tuple(ground_truths) or (own,)
    if ground_truths and data.source == "scan":  # Its captions have no ids.
        named = ids_by_order(own, chosen[0])
        if named is not own and process_group.main:
            say(f"note: the captions of SCAN's files have no ids; they take those of {chosen[0].name}, in their order")
        own = named
    plan_ranks(chosen, own.image_ids, own.text_ids)
    images, texts = embed_split(model.model, prepared, process_group)
    return EmbeddedSet(images, texts, own.image_ids, own.text_ids, chosen, tuple(kinds) if kinds else None)


def evaluate_model(
    model: Model,
    data: DataConfig,
    split: str,
    distance: str | None = None,
    *,
    process_group: ProcessGroup | None = None,
    embedded: EmbeddedSet | None = None,
    options: EvaluationOptions | None = None,
) -> Evaluation:
    """Evaluate any model on a split of any data."""
    process_group, options = process_group or alone(), options or EvaluationOptions()
    chosen = options.sampled(model.ranking_distance(distance))
    embedded = embedded or embed_for_evaluation(model, data, split, process_group=process_group)
    (ground_truth,) = embedded.ground_truths
    return evaluate_retrieval(
        embedded.images,
        embedded.texts,
        ground_truth.i2t,
        distance=chosen,
        text_kinds=embedded.text_kinds,
        rank=process_group.rank_relevant,
        uncertainty=options.uncertainty,
    )


def write_figures(run: Run, name: str, figures: Mapping[str, Any]) -> Path:
    """Write figures of a run, such as those of an evaluation, into its folder."""
    path = run.folder / f"{name}.json"
    write_json(path, figures)
    return path


def evaluate_run(
    run: Run, split: str, distance: str | None = None, *, embedded: EmbeddedSet | None = None
) -> tuple[Evaluation, Path]:
    """Evaluate a run on a split of its data, and write the figures into its folder."""
    result = evaluate_model(run, run.recipe.data, split, distance, embedded=embedded)
    return result, write_figures(run, f"evaluation-{split}-{result.distance}", result.to_json())
