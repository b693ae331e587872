"""Images whose file names are the captions: red_car.jpg shows a red car."""

from pathlib import Path

from sfumato.data.images import FileImage, Problems
from sfumato.data.manifest import splits_of_items
from sfumato.data.pairs import PairData, SourceItem


def read_mine(folder: Path, problems: Problems, val_fraction: float, test_fraction: float) -> dict[str, PairData]:
    """The splits of a folder; what cannot be used is left out and noted."""
    items = []
    for path in sorted(folder.glob("*.jpg")):
        if caption := path.stem.replace("_", " ").strip():
            items.append(SourceItem(path.name, FileImage(path), (("", caption),), location=str(path)))
        else:
            problems.add(str(path), "no caption in the name")
    return splits_of_items(items, folder, problems, val_fraction, test_fraction)
