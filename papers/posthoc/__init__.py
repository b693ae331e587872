"""Uncertainty for a frozen image-text model that somebody already has.

The registry METHODS holds every method by its name. Each is fitted on :class:`FrozenPairs` and gives one number for a
query, larger is less certain; methods with ``per_item`` also give a Gaussian for every item. NOT_BUILT says what is
left out and why.
"""

from papers.posthoc.adapters import AdapterMethod
from papers.posthoc.asymvlm import AsymVLM
from papers.posthoc.closed_forms import (
    AdversarialMargin,
    BayesianBM25,
    BayesianBM25Platt,
    CosineMargin,
    Top1Distance,
    WhitenedNorm,
)
from papers.posthoc.laplace import LaplaceProjections
from papers.posthoc.memory import MemoryContrast, MemoryDistance, MemoryEntropy
from papers.posthoc.method import FrozenPairs, PosthocMethod
from papers.posthoc.variance_adapters import PCMEPPAdapter, PFEAdapter, ProbVLM, ProLIPAdapter
from sfumato.imports import claim_name

METHODS: dict[str, type[PosthocMethod]] = {
    method.name: method
    for method in (
        Top1Distance,
        CosineMargin,
        AdversarialMargin,
        BayesianBM25,
        BayesianBM25Platt,
        MemoryContrast,
        MemoryEntropy,
        MemoryDistance,
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
    " least 100 hours of one core. A query takes 20 gradient steps from a random"
    " start, at least .9 s there (392 ms in its table 10, where others take 30 to 33), and two calls give two answers",
    "geoflowvlm": "GeoFlowVLM (arXiv 2605.13352) learns a flow on a product of spheres. We know its abstract alone;"
    " memory_entropy asks its question of the model's own logits",
    "repvlm": "REPVLM (arXiv 2601.21662) learns a density on the sphere by a flow. We know its abstract alone;"
    " memory_distance has the distance of a neighbour in place of the density",
}
"""Published methods that are left out, with the reason."""


def register_method(method: type[PosthocMethod]) -> type[PosthocMethod]:
    """Make a post-hoc method of your own known: `python -m papers referee` then compares it with all others.

    Args:
        method: a class derived from :class:`~papers.posthoc.PosthocMethod`; it is known by its ``name``.

    Returns:
        The class, so that this is a decorator.

    Raises:
        ValueError: another module or file has taken the name, or it is no identifier.
        TypeError: it is not such a class.

    Example:
        >>> from papers.posthoc.closed_forms import CosineMargin
        >>> class Mine(CosineMargin):
        ...     name = "mine"
        >>> register_method(Mine).name, METHODS.pop("mine") is Mine
        ('mine', True)
    """
    if not (isinstance(method, type) and issubclass(method, PosthocMethod)):
        raise TypeError(f"register_method: {method!r} is not a class derived from PosthocMethod")
    claim_name("method", getattr(method, "name", ""), METHODS, method)
    METHODS[method.name] = method
    return method


__all__ = ["METHODS", "NOT_BUILT", "AdapterMethod", "FrozenPairs", "PosthocMethod", "register_method"]
