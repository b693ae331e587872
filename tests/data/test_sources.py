"""The registry of sources: a toy from outside, options of its own, and the keys of version 0.1."""

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from support.pictures import png
from support.raising import raises
from support.toy import make_toy

from sfumato.data.images import MemoryImage, Problems
from sfumato.data.pairs import make_pair_data
from sfumato.data.sources import SOURCES, DataConfig, register_source
from sfumato.errors import UserError
from sfumato.models.build import Assets, build_model, fresh_tokenizer
from sfumato.models.embed import load_splits, prepare_split
from sfumato.models.recipe import load_recipe, save_recipe


class ToyOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    n: int = Field(6, ge=2)
    colour: str = "red"


def read_toy(config, problems):
    """n squares of one colour; the last one is damaged."""
    options = ToyOptions(**config.options)
    files = [png(options.colour, (8 + k, 8))[: 20 if k == options.n - 1 else None] for k in range(options.n)]
    images = [MemoryImage(f"toy {k}", data) for k, data in enumerate(files)]
    captions = [[f"a {options.colour} square", f"number {k}"] for k in range(options.n)]
    return {"train": make_pair_data([f"toy-{k}" for k in range(options.n)], images, captions)}


@pytest.fixture
def toy():
    before = dict(SOURCES)
    register_source("toy", read_toy, options=ToyOptions)
    yield
    SOURCES.clear()
    SOURCES.update(before)


RECIPE = """
name = "outside"
[data]
source = "toy"
options = { n = 5, colour = "blue" }
[model]
dim = 8
image = { kind = "small", size = 16, width = 4 }
text = { kind = "small", vocabulary = 40, width = 8 }
"""


def test_a_recipe_names_a_source_from_outside(toy, tmp_path):
    (tmp_path / "outside.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "outside.toml", ["data.options.n=7"])
    problems = Problems()
    splits = load_splits(recipe.data, problems)
    assert splits["train"].texts[:2] == ("a blue square", "number 0") and len(splits["train"].image_ids) == 7
    model = build_model(recipe.model, Assets(fresh_tokenizer(recipe.model, splits["train"].texts)))
    prepared = prepare_split(model, splits["train"], problems, "train")
    assert prepared.data.image_ids == tuple(f"toy-{k}" for k in range(6)), "the damaged image is left out"
    assert [problem.location for problem in problems.items] == ["toy 6"]
    assert prepared.images.batch(np.arange(6)).values.shape == (6, 3, 16, 16)
    save_recipe(recipe, tmp_path / "saved.toml")
    assert load_recipe(tmp_path / "saved.toml") == recipe


def test_unknown_sources_and_options(toy, tmp_path):
    recipe = make_toy(tmp_path)
    told = r"unknown source 'emojy'; did you mean 'emoji'\? known: emoji, manifest, folder, "
    raises(UserError, told, load_recipe, recipe, ["data.source=emojy"])
    raises(ValueError, "there is a source 'folder' already; known: emoji, ", register_source, "folder", read_toy)
    for source, options, message in (
        ("folder", {"n": 1}, "data.source='folder' takes no options; leave out n "),
        ("toy", {"n": 1}, r"data\.options\.n: .*greater than or equal to 2"),
        ("toy", {"size": 3}, r"data\.options\.size: Extra"),
    ):
        raises(ValidationError, message, DataConfig, source=source, path="data", options=options)
    for key in ("noise_rate=0.1", "graded=true", "leave_out=0/2"):
        message = r"needs all pairs in memory, but data\.source='shards' is read as a stream"
        raises(UserError, message, load_recipe, recipe, ["data.source=shards", "data.path=a.tar", f"data.{key}"])


@pytest.mark.parametrize(("equal_texts", "n_texts", "matches"), [(None, 2, 5), ("merged", 2, 5), ("separate", 5, 5)])
def test_equal_captions_of_a_folder_are_one_text_unless_they_are_kept_separate(tmp_path, equal_texts, n_texts, matches):
    for name, caption in (("a", "a dog"), ("b", "A  dog"), ("c", "a dog\na cat"), ("d", "a cat")):
        Image.new("RGB", (8, 8), "red").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption)
    own = {} if equal_texts is None else {"equal_texts": equal_texts}
    config = DataConfig(source="folder", path=str(tmp_path), val_fraction=0, test_fraction=0, **own)
    (data,) = load_splits(config, Problems()).values()
    assert (len(data.texts), len(data.pairs)) == (n_texts, matches)
    assert data.relevance().transpose().counts.tolist() == ([3, 2] if n_texts == 2 else [1] * 5)
