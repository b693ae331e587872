"""Recipes are complete, strict, and documented at their head."""

import functools
import re
import shlex
import tomllib
from itertools import takewhile

import pytest
import torch
from support.raising import raises

from papers.tables.items import paper_items
from sfumato import Recipe, find_recipe, load_recipe
from sfumato.errors import UserError
from sfumato.models.build import Assets, build_loss, build_model, fresh_tokenizer
from sfumato.models.recipe import check_recipe, recipe_files, recipe_summary, save_recipe


def header(name):
    lines = recipe_files()[name].read_text(encoding="utf-8").splitlines()
    return list(takewhile(lambda line: line.startswith("#"), lines))


def override_lines(name):
    """Lines of overrides in a header: a comment sign, three spaces, key=value ..."""
    return [line[4:] for line in header(name) if re.match(r"#   \S", line)]


def test_every_recipe_loads_and_says_what_it_is_and_what_repeats_what_was_published(tmp_path):
    sections = "|".join(Recipe.model_fields)
    for name, path in recipe_files().items():
        recipe = load_recipe(find_recipe(name))
        assert recipe.name == name
        assert len(recipe_summary(path)) > 20, name
        build_loss(recipe)
        save_recipe(recipe, tmp_path / "r.toml")
        assert load_recipe(tmp_path / "r.toml") == recipe, name
        assert not [line for line in override_lines(name) if load_recipe(path, shlex.split(line)) == recipe], name
        assert not [line for line in header(name) if re.match(rf"#(?!   \S)\s*({sections})\.\w", line)], name
    starts = ("# $ ", "# Paper: ", "# Data: ", "# Hardware: ", "# Rows of the papers' tables")
    published = [name for name in recipe_files() if name.startswith(("coco-", "pretrain-"))]
    told = {name: "\n".join(["", *header(name)]) for name in published}
    assert published and {(name, s) for name, text in told.items() for s in starts if f"\n{s}" not in text} == set()


def test_values_bare_words_and_sections_of_another_loss_and_every_mistake_in_files_too(tmp_path):
    wrong = {"name": "x", "train": {"epochs": 0, "sead": 1}}
    error = raises(UserError, "here.toml: ", check_recipe, wrong, "here.toml")
    assert all(words in str(error.value) for words in ("train.epochs", "did you mean 'train.seed'"))
    raises(UserError, "no recipe at", load_recipe, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    raises(UserError, "not a valid TOML file", load_recipe, tmp_path / "bad.toml")
    for value in ("[" * 5000, "9" * 5000):  # For which Python itself has errors of other types.
        (tmp_path / "bad.toml").write_text(f"name = {value}")
        raises(UserError, "not a valid TOML file", load_recipe, tmp_path / "bad.toml")
        with pytest.raises(UserError, match="override .*the value cannot be read"):
            load_recipe(find_recipe("emoji-pcmepp"), [f"train.epochs={value}"])
    keys = ["optim.name=adamp", "loss.alpha=0.01", "data.kind_weights={name = 1.0}", "optim.betas=[0.9, 0.98]"]
    recipe = load_recipe(find_recipe("emoji-demo"), keys)
    assert recipe.optim.name == "adamp" and recipe.loss.alpha == 0.01
    assert recipe.data.kind_weights == {"name": 1.0} and recipe.optim.betas == (0.9, 0.98)
    recipe = load_recipe(find_recipe("emoji-pcmepp"), ["loss.name=triplet", "loss.margin=0.3"])
    assert recipe.loss.margin == 0.3 and not hasattr(recipe.loss, "alpha")
    recipe = load_recipe(find_recipe("emoji-infonce"), ["loss.alpha=0.7", "model.variance=true", "loss.name=pcmepp"])
    assert recipe.loss.alpha == 0.7


def test_wrong_overrides_and_those_without_effect_are_named():
    wrong = [
        ("train.epoch=3", "unknown key 'train.epoch'; did you mean 'train.epochs'?"),
        ("loss.alfa=1", "unknown key 'loss.alfa'; did you mean 'loss.alpha'?"),
        ("trian.epochs=4", "unknown key 'trian'; did you mean 'train'?"),
        ("train.epochs=-1", "train.epochs: Input should be greater than 0 (got -1)"),
        ("train.batch_size=1", "train.batch_size"),
        ("loss.name=foo", "loss.name: unknown 'foo'; known: daa, infonce, pcme, pcmepp"),
        ("model.variance=false", "loss.beta must be 0 when model.variance=false"),
        ("loss.distance=csd", "loss.distance='csd' ranks by them; use squared_l2"),
        ("model.variance_bounds=[0.1, 10]", "must lie between model.variance_bounds, 0.1 and 10 each; e.g. "),
        ("model.mlp_width=64", "model.mlp_width needs model.mlp or model.variance_mlp"),
        ("model.local_attention_of=mean", "model.local_attention_of='mean' needs model.local_attention=true"),
        ("model.variance_sigmoid=true", "model.variance_sigmoid needs local attention of the log variance"),
        ("model.embeddings=2", "model.embeddings above 1 is for points; set model.variance=false"),
        ("loss.distance=nearest_of_2", "model.embeddings=1 does not fit loss.distance='nearest_of_2'"),
        ("optim.layer_decay=0.7", "optim.layer_decay needs the blocks of a clip encoder"),
        ("loss.distance=cds", "unknown distance 'cds'; did you mean 'csd'?"),
        ("train.epochs", "expected section.key=value"), ("train.epochs.more=3", "'epochs' is a value, not a section"),
        ("data.source=manifest", "data.path must name the manifest"),
        ("name='a b'", "name: String should match pattern"), ("loss.logit_bias=nan", "loss.logit_bias"),
    ]  # fmt: skip
    for override, message in wrong:
        raises(UserError, re.escape(message), load_recipe, find_recipe("emoji-demo"), [override])
    refused = {
        "emoji-infonce loss.distance=kl": "needs model.variance=true",
        "emoji-vsepp model.covariance=spherical-one": "model.covariance and model.variance_bounds are for variances",
        "emoji-pcmepp model.covariance=spherical-one model.variance_norm=true": "leave it out with spherical-one",
        "emoji-ambiguity model.variance=false": "points have no variance to fit",
        "emoji-demo train.swa_epochs=1 train.ema_decay=0.9": "either train.swa_epochs or train.ema_decay, not both",
        "emoji-demo train.epochs=3 train.ema_decay=0 train.swa_epochs=4": "swa_epochs=4 is more than train.epochs=3",
        "coco-pcmepp-b32 model.image.activation=gelu": "is only for random weights; leave it out with model.image.weig",
        "coco-pcmepp-b32 model.text.tokenizer=mine": "model.text.tokenizer is only for random weights",
        "coco-pcmepp-b32 model.image.variance_token=true model.image.variance_blocks=2": "replaces the variance blocks",
        "coco-pcmepp-b32 model.pooling=token": "augment.image_tokens drops what model.pooling='token' ignores",
        "coco-pcmepp-b32 augment.mixup_alpha=0 augment.cutmix_alpha=0": "augment.mixed_share needs augment.mixup_alpha",
    }
    for line, message in refused.items():
        name, *overrides = line.split()
        raises(UserError, message, load_recipe, find_recipe(name), overrides)


N, D = 128, 1024  # Batch and dimensions of the published runs.


def test_weights_limits_and_epsilon_are_those_published_times_the_factor_of_the_loss():
    published = [
        ("coco-pcme", 1 / N**2, {"beta": 1e-5 * D / N}),
        ("cub-pcme", 1 / 150**2, {"beta": 1e-3 * 512 / 150, "uniformity_weight": 10 / 150**2}),
        ("coco-pcme-b32", 1 / N**2, {"beta": 1e-4 / N**2}), ("coco-triplet-b32", 2 / N, {"margin": 2 * 0.2}),
        ("coco-triplet-b32 loss.name=daa data.graded=true loss.asp_weight=0.390625", 2 / N, {"asp_weight": 25 * 2 / N}),
        ("coco-vsepp", 2 / N, {"margin": 2 * 0.2}), ("coco-vsrn", 2 / N, {"margin": 2 * 0.2}),
        ("coco-probabilistic-vsepp", 1 / N, {"margin": 0.2}), ("coco-probabilistic-vsrn", 1 / N, {"margin": 0.1}),
        ("coco-pvse", 2, {"margin": 2 * 0.1, "mmd_weight": 2 * 0.01, "diversity_weight": 2 * 0.1}),
        ("coco-pcmepp-b32", 1, {"beta": 1e-4}),
        ("flickr8k-pvse", None, {"mmd_weight": 2 * 0.01, "diversity_weight": 2 * 0.1}),
        ("emoji-pvse", None, {"mmd_weight": 2 * 0.01, "diversity_weight": 2 * 0.1}),
        ("flickr8k-daa", None, {"asp_weight": 10 * 2 / N}),
    ]  # fmt: skip
    for line, factor, weights in published:
        name, *overrides = line.split()
        recipe = load_recipe(find_recipe(name), overrides)
        assert {key: getattr(recipe.loss, key) for key in weights} == pytest.approx(weights, rel=1e-6), line
        if factor is not None:
            limits = (recipe.optim.clip_norm, recipe.optim.eps)
            assert limits == pytest.approx((2 * factor, 1e-8 * factor), rel=1e-6, abs=0), line


def released_factor(recipe):
    """Our loss over the released one; docs/concepts/losses.md derives it."""
    n, name = recipe.train.batch_size, recipe.loss.name
    if name in ("pcmepp", "infonce"):
        return 1
    if name == "pcme":
        return 1 / n**2
    squared = 2 if recipe.loss.distance.startswith(("squared_l2", "nearest_of")) else 1
    if name == "pvse" or recipe.name == "cub-pcme":  # A mean over anchors, or over all pairs.
        return squared * (n if recipe.loss.mining == "sum" else 1)
    return squared / n


def test_what_stands_beside_a_loss_is_converted_by_the_batch_and_the_dimensions_of_the_run():
    close, items = functools.partial(pytest.approx, rel=1e-5, abs=0), paper_items().values()
    runs = {f"{run} {more}".strip() for one in items for run in one.runs.values() for more in one.variants or ("",)}
    for run in sorted(run for run in runs if run.startswith(("coco-", "cub-"))):
        name, *overrides = shlex.split(run)
        recipe = load_recipe(find_recipe(name), overrides)
        loss, n, d, c = recipe.loss, recipe.train.batch_size, recipe.model.dim, released_factor(recipe)
        assert (recipe.optim.clip_norm, recipe.optim.eps) == close((2 * c, 1e-8 * c)), run
        if loss.name == "pcme" and name != "coco-pcme-b32":
            bottleneck, uniformity = (1e-3, 10) if name == "cub-pcme" else (1e-5, 0)
            assert loss.beta in (0, close(bottleneck * d / n)), run
            assert loss.uniformity_weight in (0, close(uniformity * c)), run
        if loss.name == "pvse" and recipe.model.embeddings > 1:
            assert (loss.mmd_weight, loss.diversity_weight) == close((0.01 * c, 0.1 * c)), run
        if name == "cub-pcme":
            assert n == (9 if "classes" in recipe.data.options else 100 if "fold" in recipe.data.options else 150), run


@pytest.mark.parametrize("name", ["vsepp", "vsrn"])
def test_a_probabilistic_recipe_differs_from_its_point_model_in_what_its_header_says(name):
    paths = [recipe_files()[f"coco-{kind}{name}"] for kind in ("", "probabilistic-")]
    both = [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]
    for recipe in both:
        del recipe["name"]
    image = dict(both[1]["model"]["image"])
    image.pop("variance_layers", None)
    assert both[0]["model"]["image"] == image
    flat = [{(a, b): v for a, section in recipe.items() for b, v in section.items()} for recipe in both]
    differing = {".".join(key) for key in flat[0] | flat[1] if flat[0].get(key) != flat[1].get(key)} - {"model.image"}
    of_model = {f"model.{key}" for key in ("text", "variance", "covariance", "variance_bounds", "init_total_variance")}
    assert differing == of_model | {"loss.distance", "loss.margin", "optim.eps", "optim.clip_norm"}


def n_parameters(name, *overrides):
    """Without those of the image network and the words, whose number does not depend on the row."""
    config = load_recipe(find_recipe(name), overrides).model
    last_map = {"hidden_sizes": [64, 512], "depths": [1, 1], "layer_type": "basic"}
    described = {"image": {"backbone": last_map, "pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}}
    with torch.device("meta"):
        model = build_model(config, Assets(fresh_tokenizer(config, ["a dog runs", "the cat sleeps"] * 5), described))
    left_out = ("text.encoder.words", "image.encoder" if name.endswith("vsepp") else "text.encoder.words")
    return sum(p.numel() for key, p in model.named_parameters() if not key.startswith(left_out))


@pytest.mark.parametrize(("method", "millions"), [("VSE++", (5.6, 11.3, 19.7)), ("VSRN", (119, 239, 465))])
def test_the_point_row_of_equal_capacity_has_as_many_parameters_as_the_probabilistic_model(method, millions):
    """The papers' second row has twice the dimensions; the header's override has the number itself, within 0.1 %."""
    name = method.lower().replace("++", "pp")
    doubled = next(run for row, run in paper_items()["PVSE++ 1"].runs.items() if f"{method} (second row)" in row)
    sizes = r"model.dim=\d+ model.text.hidden=\d+"
    lines = {line for line in override_lines(f"coco-{name}") if re.fullmatch(sizes, line)}
    (equal,) = lines - {doubled.partition(" ")[2]}
    probabilistic = n_parameters(f"coco-probabilistic-{name}")
    assert n_parameters(f"coco-{name}", *equal.split()) == pytest.approx(probabilistic, rel=1e-3)
    found = (n_parameters(f"coco-{name}"), probabilistic, n_parameters(*doubled.split()))
    assert [round(n / 1e6, 1 if n < 1e8 else None) for n in found] == list(millions)


def test_a_run_that_states_keys_of_a_former_version_opens_if_they_had_the_value_of_now(tmp_path):
    path = tmp_path / "recipe.toml"
    (tmp_path / "model.safetensors").touch()
    save_recipe(load_recipe(find_recipe("emoji-pcmepp")), path)
    now, text = load_recipe(path), path.read_text()
    former = text.replace("[data]\n", '[data]\nheld_out_style = "fluent3d"\n')
    former = former.replace("[model]\n", "[model]\nnormalize = true\n")
    former = former.replace("[loss]\n", "[loss]\nmatch_weight = 2.0\n")
    path.write_text(former)
    assert load_recipe(path) == now
    path.write_text(former.replace("match_weight = 2.0", "seed = 0"))
    raises(UserError, "unknown key 'loss.seed'", load_recipe, path)
    path.write_text(text.replace("[data]\n", '[data]\nheld_out_style = "noto"\n'))
    raises(UserError, "data.held_out_style='noto': this key is gone, .* always 'fluent3d' now", load_recipe, path)


@pytest.mark.parametrize(("kind", "width"), [("small", 64), ("resnet", None)])
def test_a_key_that_is_gone_of_one_kind_of_encoder_stays_a_key_of_another(tmp_path, kind, width):
    path = tmp_path / "recipe.toml"
    (tmp_path / "model.safetensors").touch()
    path.write_text(f'name = "x"\n[model.image]\nkind = "{kind}"\nwidth = 64\n')
    assert getattr(load_recipe(path).model.image, "width", None) == width
