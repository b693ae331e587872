"""The folder of a training: who may train in it, and which recipe."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import filelock

from sfumato.errors import UserError, as_typed
from sfumato.imports import given_imports
from sfumato.models.build import build_loss
from sfumato.models.process_group import ProcessGroup, join_process_group
from sfumato.models.recipe import (
    BOOKKEEPING,
    Recipe,
    absolute_recipe,
    differing_keys,
    load_recipe,
    save_recipe,
)
from sfumato.models.run import ENCODERS, LAST, MODEL, NOISE, RECIPE, TOKENIZER, choose_device

LOCK = ".lock"
"""Name of the file that a training process locks in its run folder."""

_NAMED = 3
"""Largest number of differing keys in a message."""


@contextmanager
def opened(recipe: Recipe, folder: Path) -> Iterator[tuple[Recipe, Path, ProcessGroup]]:
    """Join the processes that train in a folder, and lock it against others; the recipe has absolute paths."""
    recipe = with_present_imports(absolute_recipe(recipe))
    build_loss(recipe)  # An unknown one is refused before anything is written.
    folder.mkdir(parents=True, exist_ok=True)
    with (
        join_process_group(partial(choose_device, recipe.train.device), recipe.train.timeout_minutes) as group,
        _locked(folder) if group.main else nullcontext(),
    ):
        yield recipe, folder, group


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise UserError(
            f"another process is training in {folder}; wait for it, or give another folder with --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


def claim_folder(folder: Path, recipe: Recipe) -> int | None:
    """Check that a folder may be trained in, and save the recipe there; return the epochs of a run that is extended.

    Before the first checkpoint, files of an earlier start are replaced, so a run that failed because of a wrong path
    can start again.
    """
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)  # The leftover file of a killed writer.
    started = (folder / LAST).exists() or (folder / MODEL).exists()
    if not (folder / RECIPE).exists():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; give an empty or new folder with --out")
    elif started:
        saved = absolute_recipe(load_recipe(folder / RECIPE)).model_copy(update={"imports": recipe.imports})
        if saved == recipe:
            return None
        _check_extends(folder, saved, recipe)
        save_recipe(recipe, folder / RECIPE)
        return saved.train.epochs if saved.train.epochs < recipe.train.epochs else None
    for name in (TOKENIZER, ENCODERS, NOISE):
        (folder / name).unlink(missing_ok=True)
    save_recipe(recipe, folder / RECIPE)
    return None


def with_present_imports(recipe: Recipe) -> Recipe:
    """The recipe with files that --import names now, in place of those that are no longer where they were."""
    gone = [name for name in recipe.imports if name.endswith(".py") and not Path(name).is_file()]
    if gone and not given_imports():
        raise UserError(f"imports: there is no file {gone[0]}; name it as it is now: --import FILE")
    kept = [name for name in recipe.imports if name not in gone]
    return recipe.model_copy(update={"imports": tuple(dict.fromkeys([*kept, *(given_imports() if gone else ())]))})


def _check_extends(folder: Path, saved: Recipe, recipe: Recipe) -> None:
    """Refuse to train a recipe in the folder of a run, unless it only has more epochs or other bookkeeping."""
    differing = {key: values for key, values in differing_keys(saved, recipe).items() if key not in BOOKKEEPING}
    if not differing:
        return
    if list(differing) != ["train.epochs"]:
        named = [f"{key} is {ours!r} there and {new!r} here" for key, (ours, new) in differing.items()]
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        raise UserError(
            f"{folder} holds a run of another recipe: {'; '.join(named[:_NAMED])}{more}. Give another folder with"
            f" --out, or delete that one: {as_typed('rm', '-r', folder)}"
        )
    before, now = saved.train.epochs, recipe.train.epochs
    reason = (
        f"train.epochs is {before} there and {now} here, and a run can only be extended"
        if now < before
        else f"its weights are averaged over the last epochs (train.swa_epochs={saved.train.swa_epochs}), which the"
        " further ones would be missing from"
        if saved.train.swa_epochs
        else f"{LAST} is missing, which holds the state of its training"
        if not (folder / LAST).exists()
        else None
    )
    if reason:
        raise UserError(
            f"the run in {folder} cannot go on: {reason}. Give another folder with --out,"
            f" or delete that one: {as_typed('rm', '-r', folder)}"
        )
