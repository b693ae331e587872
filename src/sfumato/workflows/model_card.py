"""The model card of a run: its metadata for the hub, what its probabilities mean, its scores, its use and its limits.

Everything in it comes from the run folder; what is not known there, such as a licence, is said to be unknown.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sfumato import __version__
from sfumato.encoders.encoder_protocol import EncoderConfig
from sfumato.files import read_json
from sfumato.models.calibrate import describe_calibration
from sfumato.models.run import Run
from sfumato.models.sections import ModelConfig
from sfumato.workflows.adopted_folder import ADOPTED

_NAME = r"[\w.-]+(?:/[\w.-]+)?"
_HUB_NAME = re.compile(rf"(?:open_clip:|hf-hub:)?{_NAME}(?:\+{_NAME})*")
_BASE_MODEL = re.compile(r"(?:hf-hub:)?([\w.-]+/[\w.-]+)")

_WAYS = {"i2t": "image to text", "t2i": "text to image"}


def model_card(run: Run, *, hub_name: str = "", license: str = "", own_encoder: bool = False) -> str:
    """The model card of a run, with its name on the hub if it gets one; own_encoder: its frozen model is beside it."""
    recipe, model, evaluations = run.recipe, run.recipe.model, _evaluations(run.folder)
    kind = "a Gaussian with a diagonal covariance" if model.variance else "a point"
    sides = (model.image, model.text)
    found = "in this folder" if own_encoder else "loaded by its name"
    return "\n".join(
        [
            "---",
            *_metadata(run, evaluations, license),
            "---",
            "",
            f"# {recipe.name}",
            "",
            f"Image-text matching: every image and every text becomes {kind} in {model.dim} dimensions.",
            "",
            f"- Images: {_encoder(model.image)}; texts: {_encoder(model.text)}",
            *[f"- Frozen backbone, {found}: `{name}`" for name in _shown_once(side.frozen_backbone for side in sides)],
            *_training(run),
            f"- Licence: {_license(license, _base_models(model))}",
            "",
            "## How to use it",
            "",
            *_use(model, hub_name),
            "",
            "## What a probability means",
            "",
            *_probability(run),
            "",
            "## Scores",
            "",
            *_scores(evaluations),
            "",
            "## Intended use and limits",
            "",
            *_limits(run),
            "",
            f"Written by sfumato {__version__}.",
            "",
        ]
    )


def _training(run: Run) -> list[str]:
    if (run.folder / ADOPTED).is_file():
        return [
            f"- Frozen, not trained here; its probabilities were fitted on pairs of: {_data(run)}",
            f"- Distance: `{run.loss.distance.name}`",
        ]
    return [f"- Loss: {run.recipe.loss.name}, distance `{run.loss.distance.name}`", f"- Training data: {_data(run)}"]


def _metadata(run: Run, evaluations: Sequence[tuple[str, dict[str, Any]]], license: str) -> list[str]:
    """The lines of YAML; every value is written as JSON, which YAML contains."""
    model, bases = run.recipe.model, _base_models(run.recipe.model)
    plain = not (model.image.reads_regions or model.image.reads_embeddings or model.text.reads_embeddings)
    results = [_result(run, split, found) for split, found in evaluations]
    values = {
        "library_name": "sfumato",
        "license": license,
        "pipeline_tag": "zero-shot-image-classification" if plain else "",
        "tags": ["image-text-retrieval", "image-text-matching", "probabilistic-embeddings"],
        "base_model": bases,
    }
    lines = [f"{key}: {_yaml(value)}" for key, value in values.items() if value]
    index = ["model-index:", f"- name: {_yaml(run.recipe.name)}", "  results:", *(f"  - {_yaml(r)}" for r in results)]
    return lines + (index if results else [])


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _result(run: Run, split: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """One evaluation in the form of the hub's model-index; recalls are fractions."""
    return {
        "task": {"type": "image-text-retrieval", "name": "Image-text retrieval"},
        "dataset": {"type": run.recipe.data.source, "name": _data(run), "split": split},
        "metrics": [
            {
                "type": f"{way}_recall@{k}",
                "name": f"{_WAYS[way]} recall@{k} by {evaluation['distance']}",
                "value": round(evaluation[way][f"recall@{k}"], 4),
            }
            for way in _WAYS
            for k in (1, 5, 10)
        ],
    }


def _use(model: ModelConfig, hub_name: str) -> list[str]:
    """How to install, load and search; by the name on the hub, or else in this folder."""
    text, image = _example(model)
    name = hub_name or "."
    line = "" if hub_name else "  # this folder, or its name on the hub"
    pictures = not (model.image.reads_embeddings or model.text.reads_embeddings or model.image.reads_regions)
    return [
        f"`pip install {_package(model, pulls=bool(hub_name))}`, then{'' if hub_name else ', in this folder'}:",
        "",
        "```python",
        "from sfumato import load",
        "",
        f'model = load("{name}"){line}',
        f"print(model.probability([{text}], [{image}]))",
        "```",
        *(
            [
                "",
                "To search a folder of pictures:",
                "",
                "```bash",
                f"sfumato index {name} --images pictures --out index",
                'sfumato search index "a giraffe"',
                "```",
            ]
            if pictures
            else []
        ),
    ]


def _probability(run: Run) -> list[str]:
    """What the logits were fitted on, and how well they held on held-out queries, where that was measured."""
    formula = f"sigmoid({run.logit_bias:.4g} - {run.logit_scale:.4g} * distance)"
    if run.calibration is None:
        learnt = "as the loss learnt them, not calibrated"
        return [
            f"- Match probability: {formula}, {learnt}. Use the numbers to rank only, or fit them on pairs of your own"
            " (`sfumato adopt`, `sfumato calibrate`)."
        ]
    about, measured = run.calibration.metadata, _first_hits(run)
    isotonic = ", then isotonic regression" if run.calibration.knots is not None else ""
    pairs = f"{about['pairs']:,} pairs" if "pairs" in about else "pairs"
    split = f" of the split {about['split']}" if "split" in about else ""
    return [
        f"- Match probability: {formula}{isotonic}, fitted on held-out pairs: {pairs}{split}, of which"
        f" {run.calibration.match_fraction:.2%} match.",
        "- 0.7 means: of pairs like these with this probability, 70 % match. In a search the probability of a hit also"
        " takes the hits beside it and the size of the gallery into account.",
        *measured,
        *([] if measured else ["- The calibration error was not measured: there were too few held-out queries."]),
    ]


def _first_hits(run: Run) -> list[str]:
    """The probability of first hits against the fraction that match: of the adoption, else of the calibration."""
    lines, path = [], run.folder / ADOPTED
    adopted = read_json(path)["hits"].get("served", []) if path.is_file() else []
    found = {one["direction"]: one for one in adopted if one["hits"] == 1}
    where = "images that measure alone"
    if not found and run.calibration is not None:
        where = "halves of the queries that fitted the other half"
        for way, known in describe_calibration(run.calibration).items():
            if way in _WAYS and "first_hit" in known:
                found[way] = {**known["first_hit"], "n": known["n_queries"]}
    for way in _WAYS:
        if way in found:
            one = found[way]
            lines.append(
                f"- First hits of {one['n']:,} held-out queries, {_WAYS[way]}: mean probability"
                f" {one['mean_probability']:.1%}, {one['rate']:.1%} match, expected calibration error"
                f" {one['ece']:.1%} ({one['ece_by_chance']:.1%} by chance); on {where}."
            )
    return lines


def _limits(run: Run) -> list[str]:
    calibrated = (
        "Probabilities hold for images and texts like those of the calibration. On other data calibrate again:"
        " `sfumato adopt` with pairs of yours, or `sfumato calibrate --judgements` with verdicts."
        if run.calibration is not None
        else "Its probabilities are not calibrated, so no threshold on them has a known precision."
    )
    return [
        "- For ranking, filtering and searching images by texts, and texts by images.",
        f"- {calibrated}",
        "- Texts of other languages or kinds than the training data are guesses.",
        "- Whatever is one-sided in the training data, or in a pre-trained model, is so here. Do not use it to"
        " identify people, or to decide about them.",
    ]


def _license(license: str, bases: Sequence[str]) -> str:
    below = f"; the base model{'s have their' if len(bases) > 1 else ' has its'} own" if bases else ""
    return (license or "unknown; ask the author before you use the weights") + below


def _data(run: Run) -> str:
    """The source of the data and the name of its file, without the folders of this machine."""
    data = run.recipe.data
    return data.source + (f" ({Path(data.path).name})" if data.path else "")


def _base_models(model: ModelConfig) -> list[str]:
    """The pre-trained models that are named as on the hub."""
    found = (_BASE_MODEL.fullmatch(name) for name in _shown_once(side.base_model for side in (model.image, model.text)))
    return [one[1] for one in found if one]


def _example(model: ModelConfig) -> tuple[str, str]:
    """A text and an image for the example of a model card."""
    if model.text.reads_embeddings:
        return 'open("embedding-of-a-text.npy", "rb").read()', 'open("embedding-of-a-photo.npy", "rb").read()'
    photo = "regions-of-a-photo.npy" if model.image.reads_regions else "photo.jpg"
    return '"a giraffe", "two people on a bench"', f'open("{photo}", "rb").read()'


def _evaluations(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(split, evaluation) of `sfumato evaluate`, and what an adoption measured."""
    found = [(path, read_json(path)) for path in sorted(folder.glob("evaluation-*.json"))]
    named = [(path.stem.removeprefix("evaluation-").removesuffix(f"-{one['distance']}"), one) for path, one in found]
    adopted = read_json(folder / ADOPTED)["retrieval"] if (folder / ADOPTED).is_file() else None
    return named + ([("test", adopted)] if adopted and not any(split == "test" for split, _ in named) else [])


def _scores(evaluations: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    if not evaluations:
        return ["Not evaluated."]
    lines = [
        "In per cent; measured by `sfumato evaluate` or `sfumato adopt`. Recalls depend on the size of the gallery.",
        "",
        "| split | distance | images | texts | image to text R@1 | R@5 | R@10 | text to image R@1 | R@5 | R@10 | rsum"
        " |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for split, result in evaluations:
        recalls = [result[way][f"recall@{k}"] for way in _WAYS for k in (1, 5, 10)]
        shown = [f"{100 * value:.1f}" for value in (*recalls, result["rsum"])]
        lines.append(
            f"| {split} | {result['distance']} | {result['n_images']} | {result['n_texts']} | {' | '.join(shown)} |"
        )
    return lines


def _encoder(config: EncoderConfig) -> str:
    """A short description of the encoder of one side."""
    return f"{config.kind} ({without_folders(config.origin)})" if config.origin else config.kind


def _shown_once(names: Iterable[str]) -> list[str]:
    """The distinct non-empty names, without local folders."""
    return list(dict.fromkeys(without_folders(name) for name in names if name))


def _package(config: ModelConfig, *, pulls: bool) -> str:
    """The package to install for a model; pulls: with the client of the hub."""
    needed = config.image.extras | config.text.extras
    extras = sorted(needed | ({"backbones"} if pulls and "open-clip" not in needed else set()), reverse=True)
    return f"'sfumato[{','.join(extras)}]'" if extras else "sfumato"


def without_folders(name: str) -> str:
    """A hub name unchanged; for a local folder only its last component, because its path is private."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else Path(name).name
