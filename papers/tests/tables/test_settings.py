"""The recipes of the papers' own data have the settings that the papers print, e.g. table B.1 of PCME++."""

import functools
import json

import pytest
import torch
from support.pictures import png, write_tar

from papers.tables.items import read_toml
from sfumato import GaussianEmbedding, csd_matrix
from sfumato.encoders.clip import ARCHITECTURES
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.training.loop import fit

CASES = [(recipe, of) for of in read_toml("settings.toml")["of"] for recipe in of["recipes"]]


@pytest.mark.parametrize(("name", "of"), CASES, ids=[name for name, _ in CASES])
def test_a_recipe_has_the_printed_settings(name, of, shared):
    recipe = load_recipe(find_recipe(name))
    own = {key: functools.reduce(getattr, key.split("."), recipe) for key, _, _ in of["settings"]}
    assert own == {key: tuple(value) if isinstance(value, list) else value for key, value, _ in of["settings"]}
    (paper,) = (shared / "papers").glob(f"{of['paper']}_*.txt")
    text = " ".join(paper.read_text(encoding="utf-8").split())
    assert [words for _, _, words in of["settings"] if words not in text] == []


def test_as_many_settings_are_compared_as_the_list_of_rows_says():
    counts = {name: 0 for name, _ in CASES}
    for name, of in CASES:
        counts[name] += len({key for key, _, _ in of["settings"]})
    assert [counts[f"coco-pcmepp-{size}"] for size in ("b32", "b16", "l14")] == [31] * 3
    assert counts["pretrain-pcmepp-b16"] == 18


def test_csd_breaks_the_triangle_inequality_that_is_printed():
    """Section 2.2 of PCME++ says that Eq. 1 satisfies it."""
    points = GaussianEmbedding.point(torch.tensor([[0.0], [1.0], [2.0]]))
    distance = csd_matrix(points, points)
    assert distance[0, 2] == 4 > distance[0, 1] + distance[1, 2]


@pytest.mark.slow
def test_the_recipe_of_pre_training_trains_on_shards(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "ViT-Ti/16", {"image": (24, 3, 3), "text": (24, 3, 3)})
    members = ((f"{k:03d}.{end}", data) for k in range(40) for end, data in (("png", png()), ("txt", b"a dog")))
    write_tar(tmp_path / "0.tar", members)
    tower = 'kind="clip",architecture="ViT-Ti/16",activation="gelu",variance_blocks=2'
    small = (
        f"data.path={tmp_path}", "data.samples_per_epoch=16", f"model.image={{{tower},size=16}}", "model.dim=6",
        f"model.text={{{tower},max_tokens=8}}", "train.epochs=2", "train.batch_size=8", "train.precision=float32",
    )  # fmt: skip
    fit(load_recipe(find_recipe("pretrain-pcmepp-b16"), small), tmp_path / "run")
    first, last = (json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert first["loss"] > last["loss"] > 0 and "infonce" in str(first)
