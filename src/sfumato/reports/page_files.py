"""The files of a run folder that pages show."""

import json
from pathlib import Path
from typing import Any

from sfumato.studies.analyse import STUDIES


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
