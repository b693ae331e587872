"""Push of an exported model to the Hugging Face hub, or to the service that HF_ENDPOINT names, as one commit."""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfumato.encoders.package_weights import hub_problem, hub_reachable
from sfumato.errors import UserError, need
from sfumato.models.pretrained import CONFIG, HUB_FILES


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
