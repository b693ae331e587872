"""Recipes are complete, strict, and documented at their head."""

import pytest

from sfumato.errors import UserError
from sfumato.recipes import find_recipe, recipe_files, recipe_summary
from sfumato.training.build import build_loss
from sfumato.training.config import check_recipe, load_recipe, save_recipe


@pytest.mark.parametrize("name", recipe_files())
def test_every_recipe_loads_and_says_what_it_is(name, tmp_path):
    recipe = load_recipe(find_recipe(name))
    assert recipe.name == name
    assert len(recipe_summary(recipe_files()[name])) > 20
    build_loss(recipe)
    save_recipe(recipe, tmp_path / "r.toml")
    assert load_recipe(tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "unknown key 'train.epoch'; did you mean 'train.epochs'?"),
        ("loss.alfa=1", "unknown key 'loss.alfa'; did you mean 'loss.alpha'?"),
        ("trian.epochs=4", "unknown key 'trian'; did you mean 'train'?"),
        ("train.epochs=-1", "train.epochs: Input should be greater than 0 (got -1)"),
        ("train.batch_size=1", "train.batch_size"),
        ("loss.name=foo", "'pcmepp', 'prolip', 'infonce', 'triplet'"),
        ("model.variance=false", "loss.beta must be 0 when model.variance=false"),
        ("loss.distance=cds", "unknown distance 'cds'; did you mean 'csd'?"),
        ("train.epochs", "expected section.key=value"),
        ("train.epochs.more=3", "'epochs' is a value, not a section"),
        ("data.source=manifest", "data.path must name the manifest"),
        ("name='a b'", "name: String should match pattern"),
    ],
)
def test_a_wrong_override_is_named(override, message):
    with pytest.raises(UserError) as error:
        load_recipe(find_recipe("emoji-demo"), [override])
    assert message in str(error.value)


def test_every_mistake_is_listed():
    with pytest.raises(UserError) as error:
        check_recipe({"name": "x", "train": {"epochs": 0, "sead": 1}}, "here.toml")
    assert (
        "here.toml: " in str(error.value)
        and "train.epochs" in str(error.value)
        and "did you mean 'train.seed'" in str(error.value)
    )


def test_values_and_bare_words():
    recipe = load_recipe(
        find_recipe("emoji-demo"),
        ["optim.name=adamp", "loss.alpha=0.01", "data.kind_weights={name = 1.0}", "optim.betas=[0.9, 0.98]"],
    )
    assert recipe.optim.name == "adamp" and recipe.loss.alpha == 0.01
    assert recipe.data.kind_weights == {"name": 1.0} and recipe.optim.betas == (0.9, 0.98)


def test_another_loss_starts_its_section_afresh():
    recipe = load_recipe(find_recipe("emoji-pcmepp"), ["loss.name=triplet", "loss.margin=0.3"])
    assert recipe.loss.margin == 0.3 and not hasattr(recipe.loss, "alpha")


def test_the_order_of_overrides_does_not_matter():
    recipe = load_recipe(find_recipe("emoji-infonce"), ["loss.alpha=0.7", "model.variance=true", "loss.name=pcmepp"])
    assert recipe.loss.alpha == 0.7
    with pytest.raises(UserError, match="logit_bias"):
        load_recipe(find_recipe("emoji-demo"), ["loss.logit_bias=nan"])


def test_variance_free_distances_of_point_models():
    with pytest.raises(UserError, match="needs variances, but model.variance=false"):
        load_recipe(find_recipe("emoji-infonce"), ["loss.distance=kl"])


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(UserError, match="no recipe at"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(UserError, match="not a valid TOML file"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text('name = "x"\n[model.image]\nsize = 32\n')
    with pytest.raises(UserError, match="model.image: needs its 'kind'"):
        load_recipe(tmp_path / "bad.toml")
