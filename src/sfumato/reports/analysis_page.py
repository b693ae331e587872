"""What studies leave behind: a file for each, the pictures that they name, and a page to look at."""

from pathlib import Path
from typing import Any

import jinja2

from sfumato.files import write_atomically, write_json
from sfumato.reports.analysis_views import analysis_views
from sfumato.reports.model_report import read_object, read_picture
from sfumato.studies.analyse import STUDIES, Analyses, same_model_and_data

PAGE = "analysis.html"


def write_analyses(analyses: Analyses, folder: Path, version: str) -> Path:
    """Write STUDY.json for each study, its pictures, and analysis.html with these and with what an earlier call left here.

    Args:
        analyses: what was found.
        folder: where to write; made if it is not there.
        version: of the program, for the page.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in analyses.images.items():
        write_atomically(folder / name, content)
    for name in analyses.studies:
        write_json(folder / f"{name}.json", analyses.to_json(name))
    earlier = {
        name: study
        for name, study in read_studies(folder).items()
        if name not in analyses.studies and same_model_and_data(study, analyses.metadata)
    }
    found = {name: analyses.to_json(name) for name in analyses.studies} | earlier
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("analysis.html.j2").render(
        about=analyses.metadata,
        notes=list(analyses.notes),
        version=version,
        views=analysis_views(found, lambda name: read_picture(folder, name)),
    )
    write_atomically(folder / PAGE, page)
    return folder / PAGE


def read_studies(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier calls left in a folder, by name, of whatever model and split."""
    found = {name: read_object(folder / f"{name}.json") for name in STUDIES}
    return {name: study for name, study in found.items() if study is not None}
