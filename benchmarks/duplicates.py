"""Which near-duplicates `sfumato search` folds: made ones, and different photographs that it must not fold.

python benchmarks/duplicates.py FLICKR8K [--split test]

FLICKR8K as for own_folder.py. The items are the 1,000 photographs of the split, as copies of 128 pixels by the model
`small`; the near-duplicates are made of the first 300.
"""

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from own_folder import small_copies
from PIL import Image

from sfumato import load
from sfumato.search.gallery import SAME


def jpeg(image: Image.Image, quality: int = 85) -> bytes:
    """The bytes of an image."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def crop(image: Image.Image, fraction: float) -> Image.Image:
    """The middle of an image."""
    x, y = (round(side * (1 - fraction) / 2) for side in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "same file": jpeg,
    "10 % brighter": lambda image: jpeg(image.point(lambda value: min(255, int(value * 1.1)))),
    "95 % of each side": lambda image: jpeg(crop(image, 0.95)),
    "90 % of each side": lambda image: jpeg(crop(image, 0.9)),
    "JPEG quality 50": lambda image: jpeg(image, 50),
    "three quarters of the size": lambda image: jpeg(image.resize((image.width * 3 // 4, image.height * 3 // 4))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--split", default="test")
    given = parser.parse_args()
    images = json.loads((given.flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    copies, model = small_copies(given.flickr8k / "images_128.tar"), load("small")
    files = [copies[image["filename"]] for image in images if image["split"] == given.split]
    items = model.embed_images(files).tensors().mean
    limit = SAME * float(2 * (items - items.mean(0)).square().sum(1).mean())
    between = torch.cdist(items, items).square().fill_diagonal_(torch.inf)
    print(
        f"limit {limit:.4f}: {int((between <= limit).sum()) // 2} of {len(files) * (len(files) - 1) // 2} pairs of",
        end=" ",
    )
    print(f"different photographs are folded; the nearest is at {float(between.min()):.4f}")
    opened = [Image.open(io.BytesIO(file)).convert("RGB") for file in files[:300]]
    for name, change in CHANGES.items():
        changed = model.embed_images([change(image) for image in opened]).tensors().mean
        near = (changed - items[:300]).square().sum(1) <= limit
        print(f"{name}: {float(near.double().mean()):.3f} are folded")


if __name__ == "__main__":
    main()
