"""The choice between a recipe and the one that it prefers: better weights where they can be had, else small ones."""

from collections.abc import Sequence
from pathlib import Path

from sfumato.encoders.package_weights import where_weights_are
from sfumato.models.recipe import Recipe, find_recipe, load_recipe
from sfumato.models.run import RECIPE

_CHOOSES = ("model.", "loss.", "variance_stage.")
"""Overrides of these sections are for the recipe that was asked for."""


def preferred_recipe(recipe: Recipe, overrides: Sequence[str], folder: Path) -> tuple[Recipe, str]:
    """The recipe to train, and why."""
    if not recipe.prefer or any(override.strip().startswith(_CHOOSES) for override in overrides):
        return recipe, ""
    other = load_recipe(find_recipe(recipe.prefer), overrides)
    backbone = other.model.image.frozen_backbone
    if (saved := folder / RECIPE).is_file():
        if load_recipe(saved).name != other.name:
            return recipe, ""
    elif not (place := where_weights_are(backbone)):
        return recipe, (
            f"{backbone} is not in the hub's cache, and the hub cannot be reached: using"
            f" {recipe.model.image.base_model} and {recipe.model.text.base_model} instead. They are smaller and find"
            " less; train into another folder when there is a network"
        )
    elif place == "hub":
        return other, _reason(other, recipe, "downloaded once (0.6 GB)")
    return other, _reason(other, recipe, "in the hub's cache")


def _reason(chosen: Recipe, asked: Recipe, place: str) -> str:
    return (
        f"using recipe {chosen.name}: {chosen.model.image.frozen_backbone}, {place}. Its ranking is the model's own,"
        " and only probabilities are fitted. For the small models of the package:"
        f" model.image.backbone={asked.model.image.base_model}"
    )
