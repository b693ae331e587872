"""Losses of (images, texts, match): pure functions, and modules with their learnable logits.

To add a loss to the package: a module with its options, its function and its class; an entry in LOSSES; a slow loop in
the tests' references. From outside of it: :func:`register_loss`.
"""

from dataclasses import fields

from sfumato.imports import claim_name
from sfumato.losses.base import FunctionLoss, LossFunction, LossOptions, MatchLoss
from sfumato.losses.contrastive import InfoNCELoss, ProLIPLoss
from sfumato.losses.pcme import PCMELoss
from sfumato.losses.pcmepp import PCMEPPLoss
from sfumato.losses.triplet import DAALoss, PVSELoss, TripletLoss

LOSSES: dict[str, type[MatchLoss]] = {
    "pcmepp": PCMEPPLoss, "pcme": PCMELoss, "prolip": ProLIPLoss, "infonce": InfoNCELoss,
    "triplet": TripletLoss, "pvse": PVSELoss, "daa": DAALoss,
}  # fmt: skip
"""Every loss by the name that recipes use."""


def register_loss(name: str, loss: LossFunction | type[MatchLoss], options: type[LossOptions] = LossOptions) -> None:
    """Make a loss known, so that ``loss.name = "NAME"`` works in a recipe of this process.

    Args:
        name: its name; the module or file that took it may define it again, for example in a notebook.
        loss: a function of (images, texts, match, options): (n, d) and (m, d) embeddings, (n, m) labels in [0, 1] of
            their dtype, and the options; it returns a scalar tensor, or a dict of them that sum to the loss. It is
            given whole batches, also by several processes, each of which then computes the same. Or a class derived
            from :class:`~sfumato.losses.base.MatchLoss`, which works in blocks of pairs.
        options: frozen dataclass of the keys of the recipe's section ``[loss]``, derived from
            :class:`~sfumato.losses.base.LossOptions`, each an :func:`~sfumato.losses.base.option`; for a function
            alone. Options ``logit_scale`` and ``logit_bias`` are the start of numbers that are learnt, and the function
            gets these as scalar tensors.

    Raises:
        ValueError: another module or file has taken the name, or it is no identifier.
        TypeError: the loss or its options are of another kind.

    Example:
        >>> import torch
        >>> from sfumato import GaussianEmbedding, csd_matrix
        >>> def pull(image, text, match, options):
        ...     return {"pull": (match * csd_matrix(image, text)).mean()}
        >>> register_loss("pull", pull)
        >>> image, text = (GaussianEmbedding.point(torch.tensor([[x, 0.0]])) for x in (1.0, 3.0))
        >>> LOSSES.pop("pull")()(image, text, torch.ones(1, 1)).total
        tensor(4.)
    """
    if isinstance(loss, type) and issubclass(loss, MatchLoss):
        if options is not LossOptions or not hasattr(loss, "Options"):
            raise TypeError(f"register_loss: the class {loss.__name__} needs its options as Options, and no others")
        claim_name("loss", name, LOSSES, loss)
        LOSSES[name] = loss
        return
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(f"register_loss: loss is {loss!r}; expected a function, or a class derived from MatchLoss")
    if not (isinstance(options, type) and issubclass(options, LossOptions)):
        raise TypeError(f"register_loss: options is {options!r}; expected a dataclass derived from LossOptions")
    known = {item.name: item for item in fields(options)}
    given = {*known, *vars(options).get("__annotations__", {})}
    if wrong := [key for key in given if key == "name" or "description" not in getattr(known.get(key), "metadata", ())]:
        expected = "expected fields of a frozen dataclass, each an option() of another name than 'name'"
        raise TypeError(f"register_loss: the option {min(wrong)!r} of {options.__name__} is none; {expected}")
    if "logit_bias" in known and "logit_scale" not in known:
        raise TypeError("register_loss: logit_bias is learnt with logit_scale; add that option, or rename the bias")
    claim_name("loss", name, LOSSES, loss)
    LOSSES[name] = type(name, (FunctionLoss,), {"function": staticmethod(loss), "Options": options})
