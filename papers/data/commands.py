"""`python -m papers regions`: region features for VSRN and its kin."""

from pathlib import Path

from papers.commands import app
from sfumato.cli.common import AsJson, check_out_folder, command, flag, parse_names, print_result, problems_suffix, word
from sfumato.errors import as_typed


@command(app)
def regions(
    data: str = word(..., "Recipe (path or name) that names the images.", "RECIPE"),
    overrides: list[str] | None = word(None, "Changes to the recipe, e.g. data.path=my.jsonl.", "SECTION.KEY=VALUE"),
    out: Path = flag(Path("regions"), "Folder to write: new, or empty."),
    backbone: str = flag("efficientnet-lite0", "Frozen model: efficientnet-lite0, a name on the hub, or a folder."),
    size: int | None = flag(None, "Side of the images, in pixels. Default: the backbone's own."),
    grid: int | None = flag(None, "Average a convolutional map to GRID x GRID regions. Default: all its cells."),
    layout: str = flag("scan", "scan: one file per split. manifest: one file per image, for any number of captions."),
    splits: str | None = flag(None, "Splits of the data, separated by commas, e.g. train,val. Default: all."),
    as_json: AsJson = False,
) -> None:
    """Write images as region features of a frozen backbone.

    A model with model.image.kind=regions is trained from them.
    """
    from papers.data.regions import MANIFEST, write_regions
    from sfumato.encoders.backbones import image_backbone
    from sfumato.models.recipe import find_recipe, load_recipe

    config = load_recipe(find_recipe(data), overrides or []).data
    check_out_folder(out)
    chosen = None if splits is None else parse_names(splits)
    model = image_backbone(backbone, size=size, grid=grid)
    shapes, problems = write_regions(config, out, model, layout=layout, splits=chosen)
    result = {"out": str(out), "splits": shapes, "problems": len(problems)}
    line = "\n".join(f"{name}: {n} x {r} x {c}" for name, (n, r, c) in shapes.items())
    channels = next(iter(shapes.values()))[2]
    path = out / MANIFEST if layout == "manifest" else out
    keys = f"data.source={layout}", f"data.path={path}", "model.image.kind=regions", f"model.image.channels={channels}"
    command = as_typed("sfumato", "train", "RECIPE", *keys)
    print_result(result, as_json, f"{line}\nto train from them: {command}" + problems_suffix(problems))
