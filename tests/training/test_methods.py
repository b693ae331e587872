"""Every method learns a small world with its heads and its loss; test_published_recipes.py trains the recipes."""

import pytest
import torch

from sfumato.encoders.heads import GaussianHead, HeadOptions, TokenFeatures
from sfumato.models.build import build_loss
from sfumato.models.recipe import find_recipe, load_recipe

SPHERICAL = "model.init_total_variance=16", "loss.distance=kl", "model.covariance=spherical-one"
METHODS = {
    "pcmepp": ("emoji-pcmepp",), "infonce": ("emoji-infonce",), "vse++": ("emoji-vsepp",),
    "probabilistic vse++ by kl, spherical": ("emoji-probabilistic-vsepp", *SPHERICAL),
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
