"""The commands that need no data of the user's own: demo, toy, recipes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, app


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run, the index and the page.")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change to the recipe emoji-demo; may be given several times."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run all steps on the embedded emoji set.

    Trains, evaluates, indexes, searches, and writes a page.
    """
    from sfumato.demo import run_demo

    result = run_demo(out, overrides or [])
    if as_json:
        print(json.dumps(result, ensure_ascii=False))


@app.command()
def toy(
    seed: Annotated[int, typer.Option(help="Seed of the samples and the batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the image and the animation.")] = Path("runs/toy"),
    updates: Annotated[int, typer.Option(min=1, help="Number of mini-batches that each method is trained on.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Repeat the 2-D toy study of the PCME++ paper.

    Does each method give uncertain samples larger variances than certain ones?
    """
    from sfumato.reports.console_studies import print_toy
    from sfumato.studies.toy import run_toy

    result = run_toy(out, seed=seed, updates=updates)
    if as_json:
        print(json.dumps(result))
        return
    print_toy(result, f"mean variance of uncertain over certain samples, seed {seed}, {updates} updates")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a recipe to print.")] = None,
) -> None:
    """List the recipes of the package, or print one."""
    from sfumato.models.recipe import find_recipe, recipe_files, recipe_summary

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    files = recipe_files()
    width = max(len(n) for n in files)
    for key, file in files.items():
        print(f"{key:<{width}}  {recipe_summary(file)}")
