"""What needs no data of one's own: the demo, the toy study, recipes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli.common import AsJson, app


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the run, the index and the page")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value for the recipe, several times")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The whole way on the embedded emoji set: train, evaluate, index, search, and a page to look at."""
    from sfumato.demo import run_demo

    result = run_demo(out, overrides or [])
    if as_json:
        print(json.dumps(result, ensure_ascii=False))


@app.command()
def toy(
    seed: Annotated[int, typer.Option(help="of the samples and the batches")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the picture and the animation")] = Path("runs/toy"),
    updates: Annotated[int, typer.Option(min=1, help="mini-batches that each method learns from")] = 500,
    as_json: AsJson = False,
) -> None:
    """The 2-D study of the PCME++ paper: variances of uncertain over certain samples, a picture and an animation."""
    from sfumato.studies.toy import run_toy

    result = run_toy(out, seed=seed, updates=updates)
    if as_json:
        print(json.dumps(result))
        return
    print(f"mean variance of uncertain over certain samples, seed {seed}, {updates} updates")
    print(f"{'method':<18}{'certain':>9}{'uncertain':>11}{'ratio':>8}{'published':>11}")
    for method in result["ratio"]:
        values = (result[key][method] for key in ("certain", "uncertain", "ratio", "published_ratio"))
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        print(f"{method:<18}{cells[0]:>9}{cells[1]:>11}{cells[2]:>8}{cells[3]:>11}")
    print(f"picture: {result['picture']}\nanimation: {result['animation']}")


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="print this recipe")] = None) -> None:
    """List the recipes that come with the package, or print one."""
    from sfumato.models.recipe import find_recipe, recipe_files, recipe_summary

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    files = recipe_files()
    width = max(len(n) for n in files)
    for key, file in files.items():
        print(f"{key:<{width}}  {recipe_summary(file)}")
