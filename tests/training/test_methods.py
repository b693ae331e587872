"""Every method learns a small world with its heads and its loss; runs of what no table of the papers trains."""

import json

import pytest
import torch
from support.tiny_models import tiny_architecture
from support.toy import make_toy

from sfumato.encoders.encoder_protocol import TokenFeatures
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.models.build import build_loss
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit

METHODS = {
    "pcmepp": ("emoji-pcmepp",), "infonce": ("emoji-infonce",), "vse++": ("emoji-vsepp",),
    "probabilistic vse++ by kl, spherical": (
        "emoji-probabilistic-vsepp", "model.init_total_variance=16", "loss.distance=kl",
        "model.covariance=spherical-one",
    ),
    "pcmepp with infonce": ("emoji-pcmepp", "loss.infonce_weight=1"),
    "pcme": ("emoji-pcme", "loss.uniformity_weight=0.01", "loss.n_samples=2"), "pvse": ("emoji-pvse",),
    "daa": ("emoji-vseinf", "data.graded=true", "loss.name=daa", "loss.sum_epochs=2"),
    "prolip": ("emoji-pcmepp", "loss.name=prolip", "loss.inclusion_weight=1e-7"),
}  # fmt: skip


def small_world(n, seed):
    """Images and texts of n hidden things of 6 numbers: 3 tokens of 12 channels each, off the origin, with noise."""
    generator = torch.Generator().manual_seed(seed)
    things = torch.randn(n, 1, 6, generator=generator)
    fixed = torch.Generator().manual_seed(0)
    sides = []
    for _ in ("image", "text"):
        channels, offset = torch.randn(6, 12, generator=fixed), torch.randn(12, generator=fixed)
        noise = 0.3 * torch.randn(n, 3, 12, generator=generator)
        sides.append(TokenFeatures(things @ channels + offset + noise))
    return sides


@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_a_small_world(method):
    """Recall@1 among 200 unseen things, where chance is 0.005, with the heads and the loss of its recipe."""
    name, *changes = METHODS[method]
    recipe = load_recipe(find_recipe(name), ["model.dim=16", *changes])
    torch.manual_seed(0)
    of_recipe = ("mlp", "variance", "init_total_variance", "covariance", "variance_bounds", "embeddings")
    options = {key: getattr(recipe.model, key) for key in (*of_recipe, "local_attention")}
    heads = [GaussianHead(12, 16, HeadOptions(pooling="average", **options)) for _ in ("image", "text")]
    loss = build_loss(recipe)
    optimiser = torch.optim.Adam([p for part in (*heads, loss) for p in part.parameters()], lr=2e-2)
    for step in range(60):
        image, text = (head(side) for head, side in zip(heads, small_world(32, 1 + step), strict=True))
        optimiser.zero_grad()
        loss(image, text, torch.eye(32), epoch=step // 12).total.backward()
        optimiser.step()
    with torch.no_grad():
        distance = loss.distance.matrix(*(head(side) for head, side in zip(heads, small_world(200, 0), strict=True)))
    own = torch.arange(200)
    assert min((distance.argmin(dim) == own).float().mean() for dim in (0, 1)) > 0.6


# test_published_recipes.py trains every recipe of the papers.
RUNS = {
    "daa": ["data.graded=true", "loss.name=daa", "loss.sum_epochs=2", "model.variance=false"],
    "clip towers with unc": [
        *(f'model.{side}={{ kind = "clip", architecture = "ViT-Ti/16", variance_token = true, {own} }}'
          for side, own in (("image", "size = 16"), ("text", "max_tokens = 8"))),
        *("model.pooling=token", "optim.name=adamp", "optim.layer_decay=0.7", "optim.freeze_image_epochs=1"),
        *("optim.warmup_epochs=0", "augment.text_tokens=0.2", "augment.mixed_share=0.25"),
        *("augment.label_smoothing=1e-4", "train.swa_epochs=1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("method", RUNS)
def test_a_run_of_a_method_of_no_table_learns(method, tmp_path, monkeypatch):
    tiny_architecture(monkeypatch)
    recipe = load_recipe(make_toy(tmp_path), [*RUNS[method], "optim.lr=5e-3", "train.epochs=3"])
    fit(recipe, tmp_path / "run")
    first, *_, last = (json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert last["loss"] < first["loss"] and last["val/t2i/recall@10"] > 0 and last["gradient_norm"] > 0
    assert load_run(tmp_path / "run").model.embed_texts(["giraffe"]).d == 16
