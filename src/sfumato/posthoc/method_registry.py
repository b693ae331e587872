"""Every method by name, and files of fitted methods."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes

from sfumato.files import write_atomically
from sfumato.posthoc.asymvlm import AsymVLM
from sfumato.posthoc.laplace import LaplaceProjections
from sfumato.posthoc.margins import AdversarialMargin, CosineMargin
from sfumato.posthoc.method import PosthocMethod
from sfumato.posthoc.probvlm import ProbVLM
from sfumato.posthoc.top1 import Top1Distance
from sfumato.posthoc.variance_adapters import PCMEPPAdapter, PFEAdapter, ProLIPAdapter
from sfumato.posthoc.whitened import WhitenedNorm

METHODS: dict[str, type[PosthocMethod]] = {
    method.name: method
    for method in (
        Top1Distance,
        CosineMargin,
        AdversarialMargin,
        WhitenedNorm,
        LaplaceProjections,
        ProbVLM,
        AsymVLM,
        PFEAdapter,
        PCMEPPAdapter,
        ProLIPAdapter,
    )
}
"""Every method by its name."""

NOT_BUILT: dict[str, str] = {
    "grove": "GroVE is 1,024 Gaussian processes. For 30,000 pairs in 512 dimensions its published 250 epochs take at"
    " least 100 hours of one core (benchmarks/grove_cost.py). A query takes 20 gradient steps from a random start, at"
    " least .9 s there (392 ms in its table 10, where others take 30 to 33), and two calls give two answers"
}
"""Published methods that are left out, with the reason."""

_FORMAT = "sfumato-posthoc-1"


def save_method(path: str | Path, method: PosthocMethod) -> None:
    """Write a fitted method into one safetensors file, atomically."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in method.state().items()}
    write_atomically(path, safetensors_bytes(tensors, {"format": _FORMAT, "method": method.name}))


def load_method(path: str | Path) -> PosthocMethod:
    """Read a file of :func:`save_method`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no fitted method at {path}; write one with save_method()")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path}: not a fitted post-hoc method of sfumato (expected format {_FORMAT!r})")
            name = metadata.get("method", "")
            if name not in METHODS:
                raise ValueError(f"{path}: unknown method {name!r}; known: {', '.join(METHODS)}")
            return METHODS[name].from_state({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error}); fit and write it again") from error
