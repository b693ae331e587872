"""One process of a group that trains together: forward_backward on fixed batches, the results into a file."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from sfumato import LOSSES, get_distance, register_loss
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.towers import DualEncoder, Tower
from sfumato.losses.pcme import PCMEOptions
from sfumato.losses.pcmepp import PCMEPPOptions
from sfumato.models.process_group import ProcessGroup, join_process_group
from sfumato.training.step import TrainBatch, forward_backward


def tiny_model(*, variance: bool = True) -> DualEncoder:
    """Two heads on token features of 6 channels, in float64."""
    torch.manual_seed(0)
    options = HeadOptions(variance=variance, init_total_variance=0.5)
    return DualEncoder(*(Tower(None, FeatureInput(6, 0.0), GaussianHead(6, 8, options)) for _ in "it")).double()


def tiny_batch(n: int, process_group: ProcessGroup, step: int) -> TrainBatch:
    """n pairs of random features with a few more matches than the diagonal; this process's part."""
    generator = torch.Generator().manual_seed(step)
    image, text = (torch.randn(n, t, 6, generator=generator, dtype=torch.float64) for t in (4, 5))
    match = torch.eye(n)
    match[0, n - 1] = 1
    match[n // 2, 0] = 0.6
    own = process_group.part(n)
    return TrainBatch(Inputs(image[own]), Inputs(text[own]), lambda _: (match[own], match.T[own]))


def plain_loss(image, text, match, options):
    """A loss as a function, with learnt logits and a term that crosses all pairs."""
    distance = get_distance(options.distance).matrix(image, text)
    logit = options.logit_bias - options.logit_scale * distance
    cross_entropy = functional.binary_cross_entropy_with_logits(logit, match)
    return {"match": cross_entropy, "log_sum": 0.1 * distance.logsumexp((0, 1))}


def gradients_of_losses(out: Path, sizes: list[int]) -> None:
    """Gradients and measured values of each loss and batch, from every process."""
    with join_process_group(lambda _: torch.device("cpu"), 1.0) as process_group:
        tensors, measured = {}, {}
        register_loss("plain", plain_loss, PCMEPPOptions)
        for loss_name, entry in LOSSES.items():
            # PCME with its uniformity, whose sum within a logarithm crosses all processes.
            options = (PCMEOptions(uniformity_weight=0.5),) if loss_name == "pcme" else ()
            model, loss = tiny_model(), entry(*options).double()
            for step, n in enumerate(sizes):
                model.zero_grad()
                loss.zero_grad()
                case, batch = f"{loss_name}/{step}", tiny_batch(n, process_group, step)
                measured[case] = forward_backward(model, loss, batch, process_group, epoch=5)
                for name, parameter in [*model.named_parameters(), *loss.named_parameters()]:
                    if parameter.grad is not None:
                        tensors[f"{case}/{name}"] = parameter.grad.clone()
        save_file(tensors, out / f"{process_group.size}-{process_group.rank}.safetensors")
        (out / f"{process_group.size}-{process_group.rank}.json").write_text(json.dumps(measured))
