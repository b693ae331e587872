"""`python -m papers analyse` and `zeroshot`: the studies of the papers on any model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from papers.commands import Bootstrap, Seed, app
from sfumato.cli.common import AsJson, OnData, check_out_folder, command, flag, is_run, parse_names
from sfumato.errors import UserError

if TYPE_CHECKING:
    from papers.studies.analyse import AnalysisOptions

_OUT = "Folder to write. Default: analysis-SPLIT in the run's folder, with --data here."


@command(app)
def analyse(
    on: OnData,
    only: str | None = flag(
        None,
        "Studies, separated by commas: corruption,sets,words,map,zeroshot; by default those that model and data allow,"
        " without zeroshot, which is also a command of its own.",
    ),
    uncertainty: str = flag("total_variance", "corruption, words: estimator; a wrong one lists them."),
    corrupted: int = flag(200, "corruption: number of items to corrupt in each way.", min=1),
    pairs: int = flag(100, "sets: number of pairs of images to mix, and to erase in part.", min=3),
    bins: int = flag(10, "words: number of bins of uncertainty.", min=1),
    corpus: str = flag("bin", "words: captions that a word is compared with: those of its bin, or of the whole split."),
    method: str = flag("pca", "map: pca, or tsne (needs the extra analysis)."),
    items: int = flag(200, "map: largest number of images, and of texts.", min=2),
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Path | None = flag(None, _OUT),
    as_json: AsJson = False,
) -> None:
    """Repeat studies of the papers on any model, with a page.

    corruption: does uncertainty rise when images are erased or blurred and words dropped? sets: do mixtures of two
    images lie between them, and do erased images become less certain? words: which go with low and with high
    uncertainty? map: images and texts as ellipses in a plane. Earlier results of the same studies in the folder are
    replaced.
    """
    from papers.studies.analyse import AnalysisOptions, known_studies

    options = AnalysisOptions(
        uncertainty=uncertainty, n_corrupted=corrupted, n_pairs=pairs, n_bins=bins, corpus=corpus, method=method,
        n_mapped=items, n_resamples=bootstrap, seed=seed,
    )  # fmt: skip
    _analyse(on, known_studies(parse_names(only)) if only else None, options, out, as_json)


@command(app)
def zeroshot(
    on: OnData,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    out: Path | None = flag(None, _OUT),
    as_json: AsJson = False,
) -> None:
    """Classify images by prompts of class names, and measure the gain of keeping only the most certain prompts.

    Settings stand beside the model, as zeroshot.emoji=group or zeroshot.images=FOLDER; a wrong one lists them.
    """
    from papers.studies.analyse import AnalysisOptions

    _analyse(on, ("zeroshot",), AnalysisOptions(n_resamples=bootstrap, seed=seed), out, as_json)


def _analyse(
    on: OnData, studies: tuple[str, ...] | None, options: "AnalysisOptions", out: Path | None, as_json: bool
) -> None:
    """Make, write and print studies."""
    from papers.studies.analyse import analyse_model
    from papers.studies.pages import print_analyses, write_analyses
    from papers.studies.zeroshot import ZeroShotOptions
    from sfumato import __version__
    from sfumato.charts import require_matplotlib
    from sfumato.models.run import choose_device, load_model

    require_matplotlib()
    settings = [override for override in on.overrides or [] if override.startswith("zeroshot.")]
    options = replace(options, zeroshot=ZeroShotOptions.read(settings))
    if settings and "zeroshot" not in (studies or ()):
        raise UserError(f"{settings[0]} is for the command zeroshot")
    if studies == ("zeroshot",) and on.data is None and not is_run(on.model):
        model, data, split, name = load_model(on.model, device=choose_device()), None, "", Path(on.model).name
        folder = out or Path("analysis-zeroshot")
    else:
        opened = replace(on, overrides=[one for one in on.overrides or [] if one not in settings]).open("analyse")
        model, data, split, name = opened.model, opened.data, opened.split, opened.name
        folder = opened.folder(out, f"analysis-{split}")
    check_out_folder(folder)
    found = analyse_model(model, data, split, studies=studies, options=options, name=name)
    page = write_analyses(found, folder, __version__)
    if as_json:
        return print(json.dumps(found.to_json() | {"out": str(folder)}, ensure_ascii=False))
    print_analyses(found.to_json())
    print(f"page: {page}")
