"""What studies leave behind: a file for each, the images that they name, and a page."""

from pathlib import Path
from typing import Any

from sfumato.files import write_atomically, write_json
from sfumato.reports.analysis_views import analysis_views
from sfumato.reports.html_pages import render_page
from sfumato.reports.run_files import read_image, read_studies
from sfumato.studies.analyse import Analyses, same_model_and_data

PAGE = "analysis.html"


def write_analyses(analyses: Analyses, folder: Path, version: str) -> Path:
    """Write STUDY.json for each study, its images, and analysis.html with these and with earlier ones in the folder.

    Args:
        analyses: what was found.
        folder: where to write; made if it does not exist.
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
    values: dict[str, Any] = {
        "about": analyses.metadata,
        "notes": list(analyses.notes),
        "version": version,
        "views": analysis_views(found, lambda name: read_image(folder, name)),
    }
    write_atomically(folder / PAGE, render_page("analysis.html.j2", values))
    return folder / PAGE
