"""Residual networks as image towers, fine-tuned from pixels: the images of VSE++ and PCME.

The layers are those of transformers. Their shape, and by what pixels are standardised, is in the description that a run keeps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.package_weights import from_pretrained, import_transformers
from sfumato.errors import UserError

RESNETS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "resnet-18": ("basic", (2, 2, 2, 2), (64, 128, 256, 512)),
    "resnet-34": ("basic", (3, 4, 6, 3), (64, 128, 256, 512)),
    "resnet-50": ("bottleneck", (3, 4, 6, 3), (256, 512, 1024, 2048)),
    "resnet-101": ("bottleneck", (3, 4, 23, 3), (256, 512, 1024, 2048)),
    "resnet-152": ("bottleneck", (3, 8, 36, 3), (256, 512, 1024, 2048)),
}
"""(kind of block, blocks of each stage, channels behind each) of what can be built without weights; He et al. 2016, table 1."""


class ResNetEncoder(nn.Module):
    """(n, 3, s, s) pixels -> (n, t, c) cells of the last map, 7 x 7 of them for 224 pixels and four stages; all of it learns.

    Args:
        network: ResNetModel of transformers.
        pixel_mean, pixel_std: by which pixels in [0, 1] are standardised.

    Attributes:
        resting: beginnings of the names of parameters that rest while the image network does; None for all. Set it to () where nothing
            came pre-trained.
    """

    resting: tuple[str, ...] | None
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        network: Any,
        *,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.resting = None
        self.network = network
        self.channels = int(network.config.hidden_sizes[-1])
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(3, 1, 1), persistent=False)

    @property
    def description(self) -> dict[str, Any]:
        """JSON-able: what :func:`resnet_encoder` needs to build it again without its weights."""
        return {
            "backbone": self.network.config.to_diff_dict(),
            "pixel_mean": self.pixel_mean.flatten().tolist(),
            "pixel_std": self.pixel_std.flatten().tolist(),
        }

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features without a mask. float pixels (augmented ones) are taken as they are, in [0, 1]."""
        pixels = inputs.values
        pixels = pixels.to(self.pixel_mean.dtype) / 255 if pixels.dtype == torch.uint8 else pixels
        normal = ((pixels - self.pixel_mean) / self.pixel_std).contiguous(memory_format=torch.channels_last)
        return TokenFeatures(self.network(normal).last_hidden_state.flatten(2).transpose(1, 2))


def resnet_encoder(
    weights: str = "",
    *,
    architecture: str = "resnet-50",
    depths: Sequence[int] | None = None,
    width: int = 64,
    description: Mapping[str, Any] | None = None,
) -> ResNetEncoder:
    """A residual network as an image encoder.

    Args:
        weights: a hub name or a local folder of transformers, e.g. "microsoft/resnet-152"; "" for random weights. Its image
            processor says how pixels are standardised.
        architecture: without weights, a name in RESNETS.
        depths: in place of an architecture, blocks of each stage, of the basic kind.
        width: with depths, channels of the first stage; each further one has twice as many.
        description: of an encoder built before, in place of all that.

    Raises:
        UserError: transformers or the weights are missing, or the model is of another kind.
        ValueError: the architecture is unknown, or depths are empty.
    """
    transformers = import_transformers()
    if description is not None:
        network = transformers.ResNetModel(transformers.ResNetConfig(**description["backbone"]))
        return ResNetEncoder(network, pixel_mean=description["pixel_mean"], pixel_std=description["pixel_std"])
    if weights:
        config = from_pretrained(transformers.AutoConfig, weights)
        if config.model_type != "resnet":
            raise UserError(
                f"{weights!r} is a model of type {config.model_type!r}; kind 'resnet' takes type 'resnet' only"
            )
        processor = from_pretrained(transformers.AutoImageProcessor, weights)
        mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
        network = from_pretrained(transformers.ResNetModel, weights).float()
        return ResNetEncoder(network, pixel_mean=tuple(mean), pixel_std=tuple(std))
    if depths is not None:
        if not depths:
            raise ValueError("resnet_encoder: depths are empty; give the number of blocks of each stage")
        kind, blocks, channels = "basic", tuple(depths), tuple(width * 2**i for i in range(len(depths)))
    elif architecture in RESNETS:
        kind, blocks, channels = RESNETS[architecture]
    else:
        raise ValueError(f"resnet_encoder: unknown architecture {architecture!r}; known: {', '.join(RESNETS)}")
    shape = {"layer_type": kind, "depths": list(blocks), "hidden_sizes": list(channels)}
    first = width if depths is not None else 64
    return ResNetEncoder(transformers.ResNetModel(transformers.ResNetConfig(embedding_size=first, **shape)))
