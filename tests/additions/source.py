"""Images whose file names are the captions: red_car.jpg shows a red car."""

from pathlib import Path

from sfumato.data.captioned import CaptionedImage, splits_of_rows
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData


def read_mine(folder: Path, problems: Problems, val_fraction: float, test_fraction: float) -> dict[str, PairData]:
    """The splits of a folder; what cannot be used is left out and noted."""
    rows = []
    for path in sorted(folder.glob("*.jpg")):
        if caption := path.stem.replace("_", " ").strip():
            rows.append(CaptionedImage(str(path), path, path.name, [caption], ""))
        else:
            problems.add(str(path), "no caption in the name")
    return splits_of_rows(rows, folder, problems, val_fraction, test_fraction)
