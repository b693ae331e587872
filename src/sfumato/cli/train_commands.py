"""The commands that train (train, calibrate), and those that need no data (demo, recipes)."""

import json
from pathlib import Path
from typing import Annotated

from sfumato.cli.common import (
    AsJson,
    Device,
    Overrides,
    RecipeName,
    RunFolder,
    check_out_folder,
    command,
    flag,
    print_result,
    word,
    writing,
)


@command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, flag("Folder of the run. Default: runs/NAME-OF-THE-RECIPE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model from a recipe.

    An interrupted run in the same folder is resumed; with more train.epochs, a finished one is extended.
    """
    from sfumato.errors import counted
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.progress import first_process, say
    from sfumato.training.loop import fit
    from sfumato.training.setup import preferred_recipe

    resolved = load_recipe(find_recipe(recipe), overrides or [])
    folder = out or Path("runs") / resolved.name
    check_out_folder(folder)
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


@command()
def calibrate(
    run: RunFolder,
    split: Annotated[str, flag("Split of the run's data to fit on. It must not be the split of the training.")] = "val",
    method: Annotated[str, flag("How to fit: platt, or isotonic (needs the extra calibration).")] = "platt",
    queries: Annotated[
        str,
        flag(
            "Queries that the probabilities of hits are for: planted (they have a match in the gallery), or"
            " independent (some have none)."
        ),
    ] = "planted",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Calibrate again, by another method or for other queries.

    Training and `sfumato adopt` calibrate already. Fits match probabilities, thresholds, abstention and conformal sets,
    and writes them to the run's calibration.json. A run with held-out wordings has calibration-training.json too, for
    indices of the training images; it is fitted again with the default split, and alone with --split wordings.
    """
    from sfumato.models.calibrate import calibrate_run, describe_calibration
    from sfumato.models.run import choose_device
    from sfumato.reports.console import print_calibration

    fitted = calibrate_run(run, split, method=method, population=queries, device=choose_device(device))
    result = describe_calibration(fitted)
    if as_json:
        print(json.dumps(result))
        return
    print_calibration(result)
    print(f"written to {run}; build indices of this run again to use it")


@command()
def demo(
    out: Annotated[Path, flag("Folder for the run, the index and the page.")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None,
        flag("Change to the recipe emoji-demo; may be given several times.", "--set", metavar="SECTION.KEY=VALUE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run all steps on the embedded emoji set.

    Trains, evaluates, indexes, searches, and writes a page.
    """
    from sfumato.demo import run_demo

    check_out_folder(out)
    result = run_demo(out, overrides or [])
    if as_json:
        print(json.dumps(result, ensure_ascii=False))


@command()
def recipes(
    name: Annotated[str | None, word("Name of a recipe to print.", "NAME")] = None,
) -> None:
    """List the recipes of the package, or print one."""
    from sfumato.models.recipe import find_recipe, recipe_files, recipe_summary
    from sfumato.reports.tables import print_table

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    rows = [[key, recipe_summary(file)] for key, file in recipe_files().items()]
    print_table("", ["recipe", "what it is"], rows, running=(1,))
