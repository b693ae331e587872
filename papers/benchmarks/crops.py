"""Compose scenes of emoji with boxes and phrases, in the layout of Visual Genome, for Table 4 of PVSE++.

    python -m papers.benchmarks.crops SCENES [--scenes 400]
    python -m papers table "PVSE++ 4" crops.model=RUN crops.regions=SCENES/region_descriptions.json crops.images=SCENES

A scene is a white square of 512 pixels with 12 to 20 different emoji of one style, each 28 to 260 pixels wide, at the
places, of 200 random ones, where they cover least of what is there already. Phrases are their names. In a scene crop A
holds mostly one thing, and crop C two or more.
"""

import argparse
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.data.emoji import emoji_names, load_emoji

SIDE = 512
SMALLEST, LARGEST = 28, 260
TRIES = 200


def compose(
    random: np.random.Generator, pictures: list[tuple[str, bytes]]
) -> tuple[Image.Image, list[dict[str, object]]]:
    """A scene and its regions; pictures are (phrase, file) in the order in which they are put down, largest first."""
    scene, regions = Image.new("RGB", (SIDE, SIDE), "white"), []
    covered = np.zeros((SIDE, SIDE), bool)
    sizes = np.sort(np.exp(random.uniform(np.log(SMALLEST), np.log(LARGEST), len(pictures))))[::-1].astype(int)
    for (phrase, file), size in zip(pictures, sizes.tolist(), strict=True):
        places = random.integers(0, SIDE - size + 1, (TRIES, 2)).tolist()
        x, y = min(places, key=lambda p: covered[p[1] : p[1] + size, p[0] : p[0] + size].mean())
        with Image.open(io.BytesIO(file)) as opened:
            drawn = opened.convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
        ink = np.asarray(drawn).min(2) < 250  # The pictures are on white, which shall not hide what is below.
        scene.paste(drawn, (x, y), Image.fromarray((255 * ink).astype(np.uint8)))
        covered[y : y + size, x : x + size] = True
        regions.append({"x": x, "y": y, "width": size, "height": size, "phrase": phrase})
    return scene, regions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the scenes")
    parser.add_argument("--scenes", type=int, default=400)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data, names = load_emoji(held_out_style="fluent3d")["style"], emoji_names()
    random = np.random.default_rng(0)
    entries, regions = [], 0
    for number in range(options.scenes):
        chosen = random.permutation(len(data.images))[: random.integers(12, 21)].tolist()
        pictures = [(names[data.image_ids[i].split("/")[0]], data.images[i].read_bytes()) for i in chosen]
        scene, boxes = compose(random, pictures)
        scene.save(options.out / f"{number}.png")
        entry = [box | {"region_id": regions + k, "image_id": number} for k, box in enumerate(boxes)]
        entries.append({"id": number, "regions": entry})
        regions += len(boxes)
    path = options.out / "region_descriptions.json"
    path.write_text(json.dumps(entries))
    print(json.dumps({"scenes": options.scenes, "regions": regions, "out": str(path)}))


if __name__ == "__main__":
    main()
