"""Region features: made from images, in both layouts; and what is refused."""

import numpy as np
from support.raising import raises
from support.toy import make_toy

from papers.data.regions import write_regions
from sfumato.data.image_decoding import decode_image
from sfumato.data.images import Problems
from sfumato.data.layouts import read_scan
from sfumato.errors import UserError
from sfumato.models.embed import load_splits
from sfumato.models.recipe import find_recipe, load_recipe


def test_regions_are_made_from_pictures(tmp_path, monkeypatch):
    """With a backbone of our own, in both layouts; the features are those of the pictures."""

    class Corners:
        channels, fingerprint = 3, "corners of a picture"

        def __call__(self, items):
            return [(decode_image(i, 8)[:, ::7, ::7].reshape(3, 4).T / 255).astype(np.float16) for i in items]

    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    config = load_recipe(make_toy(tmp_path)).data
    shapes, problems = write_regions(config, tmp_path / "scan", Corners())
    assert not len(problems) and {name: shape[1:] for name, shape in shapes.items()} == dict.fromkeys(shapes, (4, 3))
    splits = read_scan(tmp_path / "scan", Problems())
    assert all(len(data.image_ids) == shapes[name][0] for name, data in splits.items()) and set(splits) == set(shapes)
    config = config.model_copy(update={"equal_texts": "separate"})
    for name, data in load_splits(config, Problems()).items():
        assert data.image_ids == splits[name].image_ids and data.texts == splits[name].texts
        mine = Corners()([image.read_bytes() for image in data.images])
        stored = np.load(tmp_path / "scan" / f"{'dev' if name == 'val' else name}_ims.npy")
        assert np.array_equal(stored, np.stack(mine))
    write_regions(config, tmp_path / "manifest", Corners(), layout="manifest", splits=["val"])
    written = {"source": "manifest", "path": str(tmp_path / "manifest" / "manifest.jsonl")}
    found, val = load_splits(config.model_copy(update=written), Problems()), splits["val"]
    assert list(found) == ["val"]
    assert (found["val"].image_ids, found["val"].texts) == (val.image_ids, val.texts)


class Grey:
    """A backbone of our own: the mean of a picture, one region of one channel."""

    channels, fingerprint = 1, "the mean of a picture"

    def __call__(self, items):
        return [np.array([[decode_image(i, 8).mean() / 255]], np.float16) for i in items]


def test_what_no_layout_can_say_is_refused(tmp_path):
    config = load_recipe(find_recipe("emoji-pcmepp")).data
    for layout in ("scan", "manifest"):
        message = "has texts of several images and kinds of texts and groups of images,.*frozen"
        raises(UserError, message, write_regions, config, tmp_path / "out", Grey(), layout=layout)
    assert not (tmp_path / "out").exists()
