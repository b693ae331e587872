"""Which model and which data a command works on: resolved once from MODEL, --data RECIPE, overrides and --split."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import UserError

if TYPE_CHECKING:
    import torch

    from sfumato.data.sources import DataConfig
    from sfumato.models.embed import RetrievalModel
    from sfumato.models.run import Run


@dataclass(frozen=True, eq=False)
class ModelOnData:
    """A model and a split of data.

    Attributes:
        model: the loaded model.
        data: where the split comes from.
        split: name of the split.
        name: of the model, for titles.
        run: the model as a run; None for exported and published models.
        own_data: whether the data are those of the run's own recipe, without --data.
    """

    model: "RetrievalModel"
    data: "DataConfig"
    split: str
    name: str
    run: "Run | None"
    own_data: bool

    @property
    def own_run(self) -> "Run | None":
        """The run, if it is evaluated on its own data; results are then written into its folder."""
        return self.run if self.own_data else None

    @property
    def same_data(self) -> bool:
        """Whether the data are those that the run was trained on, by whatever recipe they are named."""
        own = None if self.run is None else self.run.recipe.data
        return own is not None and (self.data.source, self.data.path) == (own.source, own.path)

    def folder(self, out: Path | None, name: str) -> Path:
        """Where results go.

        Args:
            out: the folder that was asked for; None for the default.
            name: of the default, in the run's folder or, with --data, in the current one.

        Returns:
            The folder.
        """
        return out or (self.own_run.folder if self.own_run is not None else Path()) / name


def is_run(model: str | Path) -> bool:
    """Whether a name is the folder of a run.

    Args:
        model: a folder, or a name on the hub.

    Returns:
        The answer.
    """
    from sfumato.models.run import RECIPE

    return (Path(model) / RECIPE).is_file()


def open_model_on_data(
    model: str,
    data: str | None,
    overrides: Sequence[str] | None,
    split: str,
    device: "str | torch.device",
    *,
    purpose: str = "use",
) -> ModelOnData:
    """Load a model and find its data.

    Args:
        model: folder of a run, folder of an exported or published model, or name of a model on the hub.
        data: recipe (path or name) whose data to use; None for the data of the run.
        overrides: changes to that recipe, each "section.key=value".
        split: name of the split.
        device: "auto", "cpu", ..., or a device.
        purpose: what the data are for, as the end of a sentence; for the error message.

    Returns:
        The model on the split.

    Raises:
        UserError: there are overrides without a recipe, or a model that is no run comes without data.
    """
    from sfumato.models.build import choose_device
    from sfumato.models.export import load_model
    from sfumato.models.recipe import find_recipe, load_recipe
    from sfumato.models.run import load_run

    if overrides and data is None:
        raise UserError(f"{overrides[0]!r} changes a recipe; name it with --data RECIPE")
    config = None if data is None else load_recipe(find_recipe(data), list(overrides or [])).data
    if config is None and not is_run(model):
        raise _no_run(model, purpose)
    chosen = choose_device(device) if isinstance(device, str) else device
    if not is_run(model):
        assert config is not None
        return ModelOnData(load_model(model, device=chosen), config, split, Path(model).name, None, own_data=False)
    run = load_run(model, device=chosen)
    if config is not None:
        return ModelOnData(run, config, split, Path(model).name, run, own_data=False)
    return ModelOnData(run, run.recipe.data, split, run.recipe.name or run.folder.name, run, own_data=True)


def _no_run(model: str, purpose: str) -> UserError:
    from sfumato.models.run import RECIPE

    if not Path(model).exists():
        return UserError(
            f"there is no folder {model}; a model on the hub needs data to {purpose}: --data RECIPE data.path=..."
        )
    return UserError(
        f"{model} is not a run folder (no {RECIPE} in it); another model needs data to {purpose}:"
        " --data RECIPE data.path=..."
    )
