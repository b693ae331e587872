"""Losses of (images, texts, match): pure functions, and modules with their learnable logits.

To add a loss: a module with its options, its function and its class; an entry in LOSSES; a slow loop in the tests'
references.
"""

from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, loss_of_block, option, vib_loss
from sfumato.losses.daa import DAALoss, DAAOptions, daa_loss
from sfumato.losses.dispersion import dispersion_loss, match_dispersion
from sfumato.losses.infonce import InfoNCELoss, InfoNCEOptions, infonce_loss
from sfumato.losses.pcme import PCMELoss, PCMEOptions, pcme_loss
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions, pcmepp_loss, pseudo_positives
from sfumato.losses.prolip import ProLIPLoss, ProLIPOptions, prolip_loss
from sfumato.losses.pvse import PVSELoss, PVSEOptions, pvse_loss
from sfumato.losses.triplet import TripletLoss, TripletOptions, triplet_loss

LOSSES: dict[str, type[MatchLoss]] = {
    "pcmepp": PCMEPPLoss,
    "pcme": PCMELoss,
    "prolip": ProLIPLoss,
    "infonce": InfoNCELoss,
    "triplet": TripletLoss,
    "pvse": PVSELoss,
    "daa": DAALoss,
}
"""Every loss by the name that recipes use."""

__all__ = [
    "LOSSES",
    "DAALoss",
    "DAAOptions",
    "InfoNCELoss",
    "InfoNCEOptions",
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
