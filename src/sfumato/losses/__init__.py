"""Losses of (images, texts, match): pure functions, and modules with their learnable logits.

To add a loss: a module with its options, its function and its class; an entry in LOSSES; a slow loop in the tests'
references.
"""

from dataclasses import dataclass

from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, loss_of_block, option, vib_loss
from sfumato.losses.daa import DAALoss, DAAOptions, daa_loss
from sfumato.losses.dispersion import dispersion_loss, match_dispersion
from sfumato.losses.infonce import InfoNCELoss, InfoNCEOptions, infonce_loss
from sfumato.losses.pcme import PCMELoss, PCMEOptions, pcme_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
from sfumato.losses.prolip import ProLIPLoss, ProLIPOptions, prolip_loss
from sfumato.losses.pvse import PVSELoss, PVSEOptions, pvse_loss
from sfumato.losses.triplet import TripletLoss, TripletOptions, triplet_loss


@dataclass(frozen=True)
class LossEntry:
    """A loss of the registry."""

    options: type[LossOptions]  # class of its options; its fields are the keys of the recipe's section ``[loss]``
    module: type[MatchLoss]  # class of its module, which takes only the options

    def build(self, options: LossOptions | None = None) -> MatchLoss:
        """Build a module with initial logits."""
        options = self.options() if options is None else options
        if type(options) is not self.options:
            raise TypeError(f"{self.module.__name__}: expected {self.options.__name__}, got {type(options).__name__}")
        return self.module(options)


LOSSES: dict[str, LossEntry] = {
    "pcmepp": LossEntry(PCMEPPOptions, PCMEPPLoss),
    "pcme": LossEntry(PCMEOptions, PCMELoss),
    "prolip": LossEntry(ProLIPOptions, ProLIPLoss),
    "infonce": LossEntry(InfoNCEOptions, InfoNCELoss),
    "triplet": LossEntry(TripletOptions, TripletLoss),
    "pvse": LossEntry(PVSEOptions, PVSELoss),
    "daa": LossEntry(DAAOptions, DAALoss),
}
"""Every loss by the name that recipes use."""

__all__ = [
    "LOSSES",
    "DAALoss",
    "DAAOptions",
    "InfoNCELoss",
    "InfoNCEOptions",
    "LossEntry",
    "LossOptions",
    "LossOutput",
    "MatchLoss",
    "PCMELoss",
    "PCMEOptions",
    "PCMEPPLoss",
    "PCMEPPOptions",
    "PVSELoss",
    "PVSEOptions",
    "PairBlock",
    "ProLIPLoss",
    "ProLIPOptions",
    "TripletLoss",
    "TripletOptions",
    "daa_loss",
    "dispersion_loss",
    "infonce_loss",
    "loss_of_block",
    "match_dispersion",
    "option",
    "pcme_loss",
    "pcmepp_loss",
    "prolip_loss",
    "pseudo_positives",
    "pvse_loss",
    "triplet_loss",
    "vib_loss",
]
