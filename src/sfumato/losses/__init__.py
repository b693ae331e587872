"""Losses over (images, texts, match): pure functions, and modules that hold their learnable logits."""

from sfumato.inclusion import inclusion_loss, inclusion_test, log_inclusion
from sfumato.losses.base import LossOutput, MatchLoss, PairShare, loss_of_share, vib_loss
from sfumato.losses.daa import DAALoss, daa_loss
from sfumato.losses.dispersion import dispersion_loss, match_dispersion
from sfumato.losses.infonce import InfoNCELoss, infonce_loss
from sfumato.losses.pcme import PCMELoss, pcme_loss
from sfumato.losses.pcmepp import PCMEPPLoss, pcmepp_loss, pseudo_positives
from sfumato.losses.prolip import ProLIPLoss, prolip_loss
from sfumato.losses.pvse import PVSELoss, pvse_loss
from sfumato.losses.triplet import TripletLoss, triplet_loss

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
    "InfoNCELoss",
    "LossOutput",
    "MatchLoss",
    "PCMELoss",
    "PCMEPPLoss",
    "PVSELoss",
    "PairShare",
    "ProLIPLoss",
    "TripletLoss",
    "daa_loss",
    "dispersion_loss",
    "inclusion_loss",
    "inclusion_test",
    "infonce_loss",
    "log_inclusion",
    "loss_of_share",
    "match_dispersion",
    "pcme_loss",
    "pcmepp_loss",
    "prolip_loss",
    "pseudo_positives",
    "pvse_loss",
    "triplet_loss",
    "vib_loss",
]
