"""Export of trained models to a folder in the layout of the Hugging Face hub, and loading of such a folder.

model.safetensors   the weights that embedding needs     config.json   section model of the recipe, distance and logits
tokenizer.json      its words or subword tokens          README.md     a model card
calibration.json    what was fitted on held-out pairs    encoder/      its frozen model, where no name finds it

A push makes one commit on the hub, or on the service that HF_ENDPOINT names.
"""

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes

from sfumato import __version__
from sfumato.encoders.package_weights import hub_problem, hub_reachable
from sfumato.errors import UserError, need
from sfumato.files import is_unused, new_folder, write_atomically, write_json
from sfumato.models.pretrained import CALIBRATION, CONFIG, ENCODER, ENCODER_FILES, HUB_FILES, TOKENIZER, WEIGHTS
from sfumato.models.run import Run, load_assets, load_run
from sfumato.models.sections import ModelConfig
from sfumato.workflows.model_card import model_card, without_folders

CARD = "README.md"


@dataclass(frozen=True)
class Pushed:
    """A model on the hub."""

    name: str  # OWNER/NAME
    address: str
    commit: str
    changed: bool  # whether a commit was made; none is if the hub holds the same files already
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def export_run(run_folder: str | Path, out_folder: str | Path, *, license: str = "") -> Path:
    """Write a run's model as a folder that can be published or uploaded to a hub.

    A frozen backbone is in it if it comes from a folder; others are loaded by their name. It is written completely or
    not at all.
    """
    out = _unused(out_folder)
    run = load_run(run_folder)
    with new_folder(out) as temporary:
        _write(run, temporary, license=license)
    return out


def publish_run(
    run_folder: str | Path,
    name: str,
    out_folder: str | Path | None = None,
    *,
    private: bool = False,
    force: bool = False,
    license: str = "",
) -> Pushed:
    """Export a run and push it to the hub, under OWNER/NAME or a NAME of one's own; see :func:`push_model`.

    A folder is kept if one is given. It appears when the push has succeeded, so the same call can be made again.
    """
    out = None if out_folder is None else _unused(out_folder)
    name = full_name(name)  # Before the run is loaded: it checks the token, too.
    run = load_run(run_folder)
    with tempfile.TemporaryDirectory() as scratch, new_folder(out or Path(scratch) / "model") as temporary:
        _write(run, temporary, hub_name=name, license=license)
        return push_model(temporary, name, private=private, force=force)


def _unused(folder: str | Path) -> Path:
    if not is_unused(Path(folder)):
        raise UserError(f"{folder} exists already; give a new or empty folder, or remove it")
    return Path(folder)


def _write(run: Run, folder: Path, *, hub_name: str = "", license: str = "") -> None:
    """Write the files of a run's model into an empty folder."""
    assets, own = load_assets(run.folder, run.recipe), _local_encoder(run.recipe.model)
    config = {
        "sfumato": __version__,
        "name": run.recipe.name,
        "model": _without_local_paths(run.recipe.model, own),
        "encoders": dict(assets.encoders),
        "distance": run.loss.distance.name,
        "logit_scale": run.logit_scale,
        "logit_bias": run.logit_bias,
        "calibrated": run.calibrated,
        **({} if run.sampled_logits is None else {"sampled_logits": list(run.sampled_logits)}),
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in run.model.state_dict().items()}
    write_atomically(folder / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
    if assets.tokenizer is not None:
        write_atomically(folder / TOKENIZER, (run.folder / TOKENIZER).read_bytes())
    if run.calibration is not None:
        run.calibration.save(folder / CALIBRATION)
    if own is not None:
        _copy_encoder(own, folder / ENCODER)
    write_atomically(folder / CARD, model_card(run, hub_name=hub_name, license=license, own_encoder=own is not None))
    write_json(folder / CONFIG, config)
    folder.chmod(run.folder.stat().st_mode & 0o777)


def _copy_encoder(source: Path, target: Path) -> None:
    """Copy what the frozen model is loaded from, and nothing else that lies in its folder."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in ENCODER_FILES):
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))


def _local_encoder(config: ModelConfig) -> Path | None:
    """The folder of the frozen model of both sides, if it comes from one."""
    names = {config.image.frozen_backbone, config.text.frozen_backbone}
    folder = Path(names.pop())
    return folder if not names and folder.is_absolute() and folder.is_dir() else None


def _without_local_paths(config: ModelConfig, own: Path | None) -> dict[str, Any]:
    """Section ``model`` as JSON, without local folders of pre-trained weights: the weights are in the model."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for side, section in (("image", config.image), ("text", config.text)):
        for key in section.path_fields:
            if found := values[side].get(key):
                values[side][key] = ENCODER if own and Path(found) == own else without_folders(found)
    return values


def full_name(name: str) -> str:
    """OWNER/NAME of a name on the hub; a NAME alone gets the owner of the token."""
    hub = _hub()
    try:
        hub.utils.validate_repo_id(name)
    except ValueError as error:
        raise UserError(f"a name on the hub has the form OWNER/NAME, or NAME, got {name!r}: {error}") from error
    endpoint = hub.constants.ENDPOINT
    if not hub_reachable():
        offline = " (HF_HUB_OFFLINE is set)" if hub.constants.HF_HUB_OFFLINE else ""
        raise UserError(
            f"there is no connection to the hub at {endpoint}{offline}; nothing was pushed. Try again with a network,"
            " or export into a folder without --push"
        )
    if not hub.get_token():
        raise UserError(
            "there is no token for the hub; run `hf auth login`, or set HF_TOKEN to a token with write access"
            f" ({endpoint}/settings/tokens)"
        )
    if "/" in name:
        return name
    with _explained(name):
        return f"{hub.HfApi().whoami()['name']}/{name}"


def push_model(folder: Path, name: str, *, private: bool = False, force: bool = False) -> Pushed:
    """Upload an exported model as one commit to OWNER/NAME, which is created if it is not there.

    Files of an earlier model that the new one lacks are deleted by the same commit. A repository with files of anything
    else is refused without force.
    """
    hub, files = _hub(), sorted(path for path in folder.rglob("*") if path.is_file())
    api = hub.HfApi()
    ours = {path.relative_to(folder).as_posix(): path for path in files}
    with _explained(name):
        address = str(api.create_repo(name, private=True if private else None, exist_ok=True))
        before = api.model_info(name)
        there = {file.rfilename for file in before.siblings or []}
        if private and before.private is False:
            raise UserError(f"{name} exists and is public; make it private in its settings, or leave --private out")
        if there - {".gitattributes"} and not force and not _is_ours(hub, name, there, before.sha):
            raise UserError(
                f"{name} holds files that sfumato did not write ({_some(there)}); give another name, or --force to"
                " replace those of the same names"
            )
        parts = {file for file in there if any(fnmatch.fnmatch(file, pattern) for pattern in HUB_FILES)}
        commit = api.create_commit(
            name,
            [
                *(hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=path) for file, path in ours.items()),
                *(hub.CommitOperationDelete(path_in_repo=file) for file in sorted(parts - ours.keys())),
            ],
            commit_message="Model exported by sfumato",
            parent_commit=before.sha,
        )
    return Pushed(name, address, commit.oid, commit.oid != before.sha, sum(path.stat().st_size for path in files))


def _hub() -> Any:
    with need("backbones", "pushing to the Hugging Face hub needs huggingface_hub"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    return huggingface_hub


def _is_ours(hub: Any, name: str, files: set[str], revision: str) -> bool:
    """Whether the repository holds a model that sfumato exported."""
    if CONFIG not in files:
        return False
    try:
        config = json.loads(Path(hub.hf_hub_download(name, CONFIG, revision=revision)).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return False
    return isinstance(config, dict) and "sfumato" in config


def _some(files: set[str]) -> str:
    names = sorted(files - {".gitattributes"})
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what the hub's client raises into one line, which never holds the token."""
    hub = _hub()
    try:
        yield
    except (hub.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        way_out = {
            401: ". Run `hf auth login`, or set HF_TOKEN to a valid token with write access"
            f" ({hub.constants.ENDPOINT}/settings/tokens)",
            403: f". Give a token with write access to {name}, or a name below your own",
        }.get(status or 0, "" if isinstance(error, ValueError) else ". Run the same command again")
        problem = hub_problem(error).replace(hub.get_token() or "\0", "***")
        unchanged = "no file was changed there" if status else "probably no file was changed there"
        raise UserError(f"cannot push to {name}, and {unchanged}: {problem}{way_out}") from error
