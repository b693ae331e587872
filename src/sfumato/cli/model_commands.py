"""The commands that make models and embeddings: demo, recipes, train, calibrate, adopt, export, regions."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sfumato.cli import common
from sfumato.cli.common import AsJson, Population, command, flag, print_result, word, writing
from sfumato.errors import UserError, as_typed, counted, first_process, say
from sfumato.files import CONFIG, read_json


@command()
def train(
    recipe: str = word(..., "Path of a recipe, or name of a recipe of the package.", "RECIPE"),
    overrides: list[str] | None = word(None, "Changes to the recipe, e.g. train.epochs=10.", "SECTION.KEY=VALUE"),
    out: Path | None = flag(None, "Folder of the run. Default: runs/NAME-OF-THE-RECIPE."),
    as_json: AsJson = False,
) -> None:
    """Train a model from a recipe.

    An interrupted run in the same folder is resumed; with more train.epochs, a finished one is extended.
    """
    from sfumato.imports import given_imports
    from sfumato.models.recipe import find_recipe, is_of_run, load_recipe
    from sfumato.training.loop import fit, preferred_recipe

    path = find_recipe(recipe)
    resolved = load_recipe(path, overrides or [], own=True)
    if given := given_imports():
        own = () if is_of_run(path) else resolved.imports
        resolved = resolved.model_copy(update={"imports": tuple(dict.fromkeys([*own, *given]))})
    folder = out or Path("runs") / resolved.name
    common.check_out_folder(folder)
    resolved, reason = preferred_recipe(resolved, overrides or [], folder)
    if reason:
        say(reason)
    with writing(folder):
        result = fit(resolved, folder)
    if not first_process():
        return
    best = result["best_score"]
    score = ""
    if best is not None:
        named = f"rsum {best * 100:.1f} of 600" if result["selected_by"] == "rsum" else f"map@r {best:.1%}"
        score = f", best epoch {result['best_epoch'] + 1} with a validation {named}"
    epochs = counted(result["epochs"], "epoch")
    line = f"trained {counted(result['parameters'], 'parameter')} for {epochs}{score}: {result['run']}"
    if not result["parameters"]:
        calibrated = "calibrated on validation pairs" if result["calibrated"] else "not calibrated: there are no pairs"
        line = f"nothing was trained: the model is used as it is; its probabilities are {calibrated}: {result['run']}"
    print_result(result, as_json, line)


@dataclass(frozen=True)
class JudgedLists:
    """The hits of another search engine, with what is known of them."""

    lists: Path | None = flag(
        None, "Instead: hits of another engine, a TREC run (QUERY Q0 ITEM RANK SCORE TAG).", "--run", metavar="FILE"
    )
    qrels: Path | None = flag(None, "With --run: which hits match, as TREC qrels (QUERY 0 ITEM GRADE).", metavar="FILE")
    out: Path | None = flag(None, "With --run: file of the calibrator, for sfumato score.", metavar="FILE")
    lower: bool = flag(False, "With --run: a smaller score is a better hit, as of distances.", "--lower-is-better")
    unjudged: Literal["no", "unknown"] = flag("no", "With --run: hits that qrels lack are no matches (no), or unknown.")

    @property
    def given(self) -> bool:
        """Whether any of them was given."""
        given = (self.lists, self.qrels, self.out)
        return any(value is not None for value in given) or self.lower or self.unjudged != "no"

    def fit(self, as_json: bool) -> None:
        """Fit a calibrator of lists, write it, and say what it is worth."""
        from sfumato.calibration.score_lists import ScoreCalibrator
        from sfumato.reports.calibration import print_fitted_lists
        from sfumato.workflows.judgements import fit_lists

        if self.lists is None or self.qrels is None or self.out is None:
            raise UserError("give --run FILE, --qrels FILE and --out FILE together")
        common.check_out_file(self.out)
        made = ScoreCalibrator(higher_is_better=not self.lower)
        found = fit_lists(self.lists, self.qrels, made, unjudged=self.unjudged)
        with writing(self.out):
            made.save(self.out)
        if as_json:
            return print(json.dumps({**asdict(found), "out": str(self.out)}))
        print_fitted_lists(found, self.lists)
        print(f"written to {self.out}; next: sfumato score --run OTHER --calibrator {self.out} --out FILE")


@command()
def calibrate(
    *,
    run: Path | None = word(None, "Folder of a run; with --judgements, of a collection.", "RUN"),
    judgements: Path | None = flag(
        None,
        "Refine the probabilities of a collection by people's verdicts instead, of sfumato serve or TREC qrels."
        " Give all verdicts: a refinement starts at the packaged constants.",
        metavar="FILE",
    ),
    split: str = flag("val", "Split of the run's data to fit on, not train. If all images train, val is wordings."),
    queries: Population = "planted",
    lists: JudgedLists,
    as_json: AsJson = False,
) -> None:
    """Calibrate again: other queries, verdicts, engine.

    Training and `sfumato adopt` calibrate already. This fits match probabilities, thresholds, abstention and conformal
    sets, and writes them to the run's calibration.json. A run with held-out wordings has calibration-training.json too,
    for indices of the training images; it is fitted again with the default split, and alone with --split wordings.
    """
    from sfumato.models.calibrate import calibrate_run, describe_calibration
    from sfumato.reports.calibration import print_calibration, print_refined
    from sfumato.search.folder import is_collection
    from sfumato.workflows.judgements import refine_index

    if lists.given:
        if run is not None or (judgements, split, queries) != (None, "val", "planted"):
            raise UserError("--run takes the hits of another engine; leave RUN and the options for runs out")
        return lists.fit(as_json)
    if run is None:
        raise UserError("give RUN, the folder of a run; or --run FILE --qrels FILE --out FILE for another engine")
    if judgements is not None:
        if (split, queries) != ("val", "planted"):
            raise UserError("--judgements refines a collection; leave --split and --queries out")
        refined = refine_index(run, judgements)
        return print(json.dumps(asdict(refined))) if as_json else print_refined(refined, run)
    if is_collection(run):
        raise UserError(f"{run} is a collection; refine its probabilities with --judgements FILE")
    result = describe_calibration(calibrate_run(run, split, population=queries, device="auto"))
    if as_json:
        return print(json.dumps(result))
    print_calibration(result)
    print(f"written to {run}; build indices of this run again to use it")


@command()
def score(
    run: Path = flag(..., "The hits of another search engine: a TREC run.", metavar="FILE"),
    calibrator: Path = flag(..., "What sfumato calibrate --run has written.", metavar="FILE"),
    out: Path = flag(
        ...,
        "File of the results: the run with the probabilities as its scores, or all figures of a query on each line if"
        " its name ends with .jsonl.",
        metavar="FILE",
    ),
    as_json: AsJson = False,
) -> None:
    """Give the hits of any search engine their probabilities. It needs no model and no index."""
    from sfumato.calibration.score_lists import ScoreCalibrator
    from sfumato.workflows.judgements import score_lists

    common.check_out_file(out)
    if out.exists() and any(one.exists() and out.samefile(one) for one in (run, calibrator)):
        raise UserError(f"--out {out} is one of the other files; give another name")
    with writing(out):
        queries, n, expected = score_lists(run, ScoreCalibrator.load(calibrator), out)
    result = {"out": str(out), "queries": queries, "n": n, "expected_matches": expected}
    line = f"{counted(n, 'hit')} of {counted(queries, 'query', 'queries')} scored, about {expected:,.0f} of them match"
    form = "JSON lines" if out.suffix == ".jsonl" else "a TREC run"
    print_result(result, as_json, f"{line}: {out}, {form}")


@command()
def demo(
    out: Path = flag(Path("runs/demo"), "Folder for the run, the index and the page."),
    overrides: list[str] | None = flag(None, "Change to emoji-demo; repeatable.", "--set", metavar="SECTION.KEY=VALUE"),
    as_json: AsJson = False,
) -> None:
    """Run all steps on the embedded emoji set.

    Trains, evaluates, indexes, searches, and writes a page.
    """
    from sfumato.demo import run_demo

    common.check_out_folder(out)
    result = run_demo(out, overrides or [])
    if as_json:
        print(json.dumps(result, ensure_ascii=False))


@command()
def recipes(name: str | None = word(None, "Name of a recipe to print.", "NAME")) -> None:
    """List the recipes of the package, or print one."""
    from sfumato.models.recipe import find_recipe, recipe_files, recipe_summary
    from sfumato.reports.tables import print_table

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    rows = [[key, recipe_summary(file)] for key, file in recipe_files().items()]
    print_table("", ["recipe", "what it is"], rows, running=(1,))


@command()
def export(
    run: Path = word(..., "Folder of a run.", "RUN"),
    out: Path = word(..., "Folder to write: new, or empty.", "OUT"),
    license: str = flag("", "Licence for the model card, as the hub writes it, e.g. apache-2.0. Default: unknown."),
    onnx: bool = flag(False, "Write ONNX graphs, compared with torch, to search without it (extra onnx).", "--onnx"),
    as_json: AsJson = False,
) -> None:
    """Export a run's model in the layout of the Hugging Face hub.

    Writes the weights, config.json and a model card with scores. `hf upload OWNER/NAME OUT` puts it on the hub.
    """
    from sfumato.workflows.export import export_run

    common.check_out_folder(out)
    with writing(out):
        written = export_run(run, out, license=license, graphs=onnx)
    difference = read_json(written / CONFIG).get("largest_difference")
    size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    line = f"exported {size / 1e6:.1f} MB: {written}"
    if difference is not None:
        line += f"; the graphs differ from torch by {difference:.1g} of the largest number at most"
    print_result({"out": str(written), "bytes": size, "largest_difference": difference}, as_json, line)


@dataclass(frozen=True)
class Frozen:
    """A frozen model with its data, or its embeddings."""

    model: str | None = word(
        None, "Name or folder of a CLIP or SigLIP, also as ONNX graphs, or open_clip:NAME/TAG; with --data.", "MODEL"
    )
    data: str | None = flag(
        None, "For MODEL: manifest, images with .txt files, folder of datasets, Karpathy or COCO JSON.", metavar="PATH"
    )
    images: str | None = flag(None, "Or image embeddings: .npy, .parquet, .safetensors[:NAME], folder.", metavar="FILE")
    texts: str | None = flag(None, "Embeddings of texts by the same model, as --images.", metavar="FILE")
    pairs: str | None = flag(
        None,
        "True pairs: columns image, text (rows or ids), perhaps split, caption. Default: row by row.",
        metavar="FILE",
    )


@command()
def adopt(
    *,
    frozen: Frozen,
    out: Path = flag(Path("runs/adopted"), "Folder of the adopted model: new, or empty."),
    method: str = flag(
        "auto", "What probabilities depend on: distance, nearest (items), reference (queries), or auto: the best."
    ),
    queries: Population = "planted",
    as_json: AsJson = False,
) -> None:
    """Give a frozen model calibrated probabilities.

    The model is named, or given by its embeddings. No network is trained and the ranking stays. The folder is a run:
    index, serve, evaluate, trust, audit and report take it. Search its index.
    """
    from sfumato.reports.calibration import print_adopted
    from sfumato.workflows.adopt import adopt as adopt_embeddings
    from sfumato.workflows.adopt import adopt_encoders

    common.check_out_folder(out)
    with writing(out):
        if frozen.model and frozen.data and frozen.images is frozen.texts is frozen.pairs is None:
            adopted = adopt_encoders(frozen.model, frozen.data, out, method=method, population=queries)
        elif frozen.model is frozen.data is None and frozen.images and frozen.texts:
            embeddings = frozen.images, frozen.texts, frozen.pairs
            adopted = adopt_embeddings(*embeddings, out, method=method, population=queries)
        else:
            raise UserError("give MODEL with --data, or --images and --texts with the embeddings of a model")
    if as_json:
        return print(json.dumps(adopted.to_json()))
    print_adopted(adopted)
    print(f"{out} is a run; next:")
    print("  " + as_typed("sfumato", "index", out, "--split", "all", "--out", f"{out}-index"))
    print("  " + as_typed("sfumato", "serve", f"{out}-index"))
