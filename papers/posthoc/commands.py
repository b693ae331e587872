"""`python -m papers referee`: uncertainties of a frozen model compared."""

import json
from dataclasses import dataclass
from pathlib import Path

from papers.commands import Bootstrap, Seed, app
from sfumato.cli.common import AsJson, check_out_folder, command, flag, is_run, parse_names, word
from sfumato.errors import UserError


@dataclass(frozen=True)
class RefereeFlags:
    """What is compared, and on how much."""

    methods: str = flag("all", "Methods and baselines, with commas, or all. A wrong name lists them.")
    add: list[Path] | None = flag(None, "CSV file with uncertainties of your own estimators; may be repeated.")
    epochs: int = flag(0, "Epochs of the methods that train a network; 0: their default.", min=0)
    absent: int = flag(200, "Most queries whose matches are taken out of the gallery.", min=0)
    corrupted: int = flag(100, "Number of queries of either side to corrupt in each way; 0 for none.", min=0)
    bootstrap: Bootstrap = 200
    seed: Seed = 0


@command(app)
def referee(
    *,
    runs: list[Path] = word(..., "Folders of runs; each is a frozen model, and methods see its means.", "RUN"),
    given: RefereeFlags,
    split: str = flag("test", "Splits to measure, separated by commas; not train or val."),
    out: Path | None = flag(None, "Folder for RUN-seedN.json and .md. Default: referee-SPLIT in each run."),
    as_json: AsJson = False,
) -> None:
    """Compare post-hoc uncertainties of a frozen model.

    Fits every method on the training pairs, calibrates it on validation, and measures it on the test split: will the
    first hit be wrong, how likely is it right, does nothing match, how many match? Prints a
    table for each direction, the smallest log loss of the first hit first; then whether damaged images and texts are
    noticed. Finished methods are not computed again. --add measures your own estimators, from a number for each query.
    """
    from papers.posthoc.added import read_added
    from papers.posthoc.frozen_model import freeze
    from papers.posthoc.referee import RefereeOptions, adapter_epochs, referee_model, wanted_methods
    from papers.posthoc.referee_tables import print_referee, referee_tables
    from sfumato.errors import say
    from sfumato.files import write_atomically
    from sfumato.models.run import choose_device, load_run

    methods, added = wanted_methods(parse_names(given.methods)), read_added(given.add or [])
    chosen = (*methods, *(method.name for method in added))
    options = RefereeOptions(methods, adapter_epochs(given.epochs), given.bootstrap, given.absent, given.seed)
    reports = []
    for run in runs:
        if not is_run(run):
            raise UserError(f"{run} is not a run folder; the referee fits methods on the training split of a run")
        folder = out or run / f"referee-{split.replace(',', '-')}"
        check_out_folder(folder)
        loaded = load_run(run, device=choose_device())
        name = run.resolve().name
        tests = tuple(parse_names(split))
        model = freeze(loaded, loaded.recipe.data, tests, name=name, n_corrupted=given.corrupted, seed=given.seed)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-seed{given.seed}.json"
        report = referee_model(model, options, path=path, say=say, added=added)
        reports.append(report | {"out": str(path)})
        tables = path.with_suffix(".md")
        write_atomically(tables, f"{referee_tables([report], chosen)}\n")
        if not as_json:
            print_referee(report, chosen)
            print(f"all figures: {tables} and {path}")
    if as_json:
        print(json.dumps(reports, ensure_ascii=False))
