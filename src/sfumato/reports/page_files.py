"""HTML pages from templates, and the files of a run folder that pages show."""

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from sfumato.studies.analyse import STUDIES


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; all texts are escaped."""
    return _environment().get_template(template).render(values)


def data_url(content: bytes) -> str:
    """The bytes of an image file as a URL that a page can hold."""
    kind = "png" if content[:4] == b"\x89PNG" else "webp" if content[:4] == b"RIFF" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_image(folder: Path, name: str) -> bytes | None:
    """Read an image beside the studies of a folder."""
    try:
        return (folder / Path(name).name).read_bytes()
    except OSError:
        return None


def read_studies(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of earlier calls of `sfumato analyse` in a folder."""
    found = {name: read_object(folder / f"{name}.json") for name in STUDIES}
    return {name: study for name, study in found.items() if study is not None}


def read_evaluations(folder: Path, split: str, own: str, n: int, m: int) -> list[dict[str, Any]]:
    """Read the results of `sfumato evaluate` on a split with other distances."""
    found = []
    for path in sorted(folder.glob("evaluation-*.json")):
        result = read_object(path)
        if (
            result is not None
            and result.get("distance") != own
            and path.name == f"evaluation-{split}-{result.get('distance')}.json"
            and (result.get("n_images"), result.get("n_texts")) == (n, m)
        ):
            found.append(result)
    return found
