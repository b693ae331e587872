"""Thirty-four images of a colour each with five captions, and overrides for models that learn them within a second."""

import json

import numpy as np
from PIL import Image

WORDS = ("red", "green", "blue", "circle", "square", "dog", "on", "the", "grass")

SMALL = (
    'model.image={kind="small",size=16,width=2}', 'model.text={kind="small",vocabulary=80,width=4,max_tokens=8}',
    "model.hidden=0", "train.epochs=1", "train.batch_size=16", "train.evaluate_every=1", "train.threads=1",
)  # fmt: skip


def make_pictures(folder, coco=False):
    """dataset_flickr8k.json or dataset_coco.json with images, ten to train; a manifest; a text file an image."""
    random, name = np.random.default_rng(0), "coco" if coco else "flickr8k"
    (folder / "images").mkdir(parents=True)
    entries, rows = [], ["image,captions"]
    for k in range(34):
        file = f"COCO_val2014_{k + 1:012d}.jpg" if coco else f"{k}.png"
        colour = random.integers(0, 255, 3, dtype=np.uint8)
        Image.fromarray(np.broadcast_to(colour, (20, 20, 3)).copy()).save(folder / "images" / file)
        part = "train" if k < 10 else "val" if k < 14 else "test"
        texts = [" ".join(random.choice(WORDS, 5)) for _ in range(5)]
        rows += [f"images/{file},{text}" for text in texts]
        (folder / "images" / file).with_suffix(".txt").write_text("\n".join(texts), encoding="utf-8")
        sentences = [{"sentid": 5 * k + i, "raw": text} for i, text in enumerate(texts)]
        entries.append({"filename": file, "split": part, "sentences": sentences})
    (folder / f"dataset_{name}.json").write_text(json.dumps({"images": entries, "dataset": name}), encoding="utf-8")
    (folder / "pictures.csv").write_text("\n".join(rows), encoding="utf-8")
    return folder
