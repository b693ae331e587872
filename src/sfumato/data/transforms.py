"""Random changes of training batches: Mixup and CutMix of images, SizeAugment of image and text tokens, crops, colours
and erased rectangles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.data.image_decoding import Box


@dataclass(frozen=True, eq=False)
class MixPlan:
    """Which images of a batch are mixed, with which, how and how much."""

    partner: Tensor  # (n,) int64, the other image; an image that is not mixed has itself
    own_fraction: Tensor
    box: Tensor
    size: tuple[int, int]  # (h, w) of the images that the plan was sampled for

    def __len__(self) -> int:
        return len(self.partner)

    @property
    def cut(self) -> Tensor:
        """(n,) bool, True where CutMix has a box."""
        return self.box.any(1)

    def apply(self, pixels: Tensor) -> Tensor:
        """The mixed images, on the device of pixels and with its gradients. pixels (n, 3, h, w) -> (n, 3, h, w)."""
        values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
        rows = (self.own_fraction < 1).nonzero().squeeze(1)  # (r,)
        device = pixels.device
        cut, fraction = self.cut[rows].to(device), self.own_fraction[rows].to(device)
        top, bottom, left, right = self.box[rows].to(device).T.reshape(4, -1, 1, 1)
        y, x = torch.arange(self.size[0], device=device).unsqueeze(1), torch.arange(self.size[1], device=device)
        outside = (y < top) | (y >= bottom) | (x < left) | (x >= right)  # (r, h, w)
        own = torch.where(cut.reshape(-1, 1, 1), outside, fraction.reshape(-1, 1, 1)).unsqueeze(1)
        partner, rows = self.partner[rows].to(device), rows.to(device)
        return values.index_copy(0, rows, torch.lerp(values[partner], values[rows], own))

    def match(self, match: Tensor) -> Tensor:
        """The labels of the mixed images: the mean of their own and their partner's labels, weighted by own_fraction.

            mixed_ij = own_fraction_i * match_ij + (1 - own_fraction_i) * match_(partner_i)j

        Every caption that matched before mixing keeps a label: a second caption of one of the two images keeps that
        image's weight, and a caption of both images keeps the label 1.

        Paper: Chun, ICLR 2024, section 2.4. The released code rebuilds the labels from a diagonal instead, so that a
        second caption of an image in the batch becomes a non-match.

        match (n, m) -> (n, m).
        """
        match = match if match.is_floating_point() else match.float()
        return torch.lerp(match[self.partner.to(match.device)], match, self.own_fraction.to(match).unsqueeze(1))

    @classmethod
    def cat(cls, plans: Sequence["MixPlan"]) -> "MixPlan":
        """Concatenate several plans; partners stay within their own plan."""
        starts = np.cumsum([0, *map(len, plans)]).tolist()
        partner = torch.cat([plan.partner + start for plan, start in zip(plans, starts, strict=False)])
        fraction, box = torch.cat([plan.own_fraction for plan in plans]), torch.cat([plan.box for plan in plans])
        return cls(partner, fraction, box, plans[0].size)


def plan_mixing(
    n: int,
    *,
    size: tuple[int, int],
    generator: torch.Generator,
    fraction: float = 0.25,
    mixup_alpha: float = 2.0,
    cutmix_alpha: float = 2.0,
    cutmix_probability: float = 0.5,
    choice: Literal["batch", "element"] = "batch",
    choice_generator: torch.Generator | None = None,
) -> MixPlan:
    r"""Sample a plan for n images: image i is mixed with image n - 1 - i with probability fraction.

    Mixup blends with lambda ~ Beta(alpha, alpha). CutMix samples lambda too. It copies a box of the partner to the same
    place: the box has 1 - lambda of the area and a uniformly sampled centre, and is clipped at the border of the image.
    own_fraction is the remaining area after clipping. With odd n the image in the middle is its own partner: it is
    never mixed.

    Paper: Zhang et al., "mixup", ICLR 2018; Yun et al., "CutMix", ICCV 2019; Chun, ICLR 2024, section 2.4 and table
    B.1. The released code mixes every image, not a fraction of them, when Mixup or CutMix is off.
    """
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    probability = 0.0 if cutmix_alpha == 0 else 1.0 if mixup_alpha == 0 else cutmix_probability
    chosen = random.random(1 if choice == "batch" else n)
    if choice == "batch" and choice_generator is not None:
        chosen = np.random.default_rng(int(torch.randint(2**62, (), generator=choice_generator))).random(1)
    cut = np.broadcast_to(chosen < probability, n)
    mixed = random.random(n) < fraction
    # An alpha of 0 is replaced, because Beta(0, 0) cannot be sampled; its samples are not used.
    blend, area = (random.beta(alpha or 1.0, alpha or 1.0, n) for alpha in (mixup_alpha, cutmix_alpha))
    sides = np.array(size)
    centre = random.integers(sides, size=(n, 2))
    half = (sides * np.sqrt(1 - area)[:, None]).astype(np.int64) // 2
    start, stop = (centre - half).clip(0), (centre + half).clip(max=sides)  # (n, 2), down and across
    box = np.stack([start, stop], axis=2).reshape(n, 4)
    left = 1 - (stop - start).prod(1) / sides.prod()
    own_fraction = np.where(cut, left, blend).astype(np.float32)
    flipped = np.arange(n)[::-1]
    # Nothing is mixed where lambda rounds to 1 or the box is empty.
    mixed &= (flipped != np.arange(n)) & (own_fraction < 1)
    partner, own = np.where(mixed, flipped, np.arange(n)), np.where(mixed, own_fraction, np.float32(1))
    box = np.where((mixed & cut)[:, None], box, 0)
    return MixPlan(torch.from_numpy(partner), torch.from_numpy(own), torch.from_numpy(box), size)


def smooth_match(match: Tensor, smoothing: float) -> Tensor:
    """Label smoothing: 0 becomes smoothing, 1 becomes 1 - smoothing, linear between."""
    return smoothing + (1 - 2 * smoothing) * match


def drop_tokens(mask: Tensor, *, rate: float = 0.2, generator: torch.Generator | None = None) -> Tensor:
    r"""Drop some tokens of some items: a fraction 1 - rate of the items lose up to a fraction rate of their tokens.

    Each item samples p ~ U(0, 1). If p > rate, each of its tokens is dropped with probability rate * p; otherwise no
    token is dropped. An item keeps at least one of its tokens. A class token is treated like every other token, as in
    the released code.

    Paper: Chen et al., CVPR 2021 (VSE-infinity); Chun, ICLR 2024, table B.1.

    mask (n, t) -> (n, t).
    """
    p = torch.rand(len(mask), 1, generator=generator, device=mask.device)
    draw = torch.rand(mask.shape, generator=generator, device=mask.device)
    return mask & ((draw >= torch.where(p > rate, rate * p, 0)) | _is_largest(draw, mask))


def drop_regions(mask: Tensor, *, rate: float, generator: torch.Generator | None = None) -> Tensor:
    r"""Drop each region with the same probability. An item keeps at least one of its regions.

    VSE-infinity augments region features in this way, and the tokens of other encoders with :func:`drop_tokens`, which
    drops fewer: at rate 0.2 a region is dropped with probability 20 %, a token with 9.6 %.

    Source: https://github.com/woodfrog/vse_infty, the data set of precomputed regions. Paper: Chen et al., CVPR 2021.

    mask (n, r) -> (n, r).
    """
    draw = torch.rand(mask.shape, generator=generator, device=mask.device)
    return mask & ((draw >= rate) | _is_largest(draw, mask))


def augment_token_ids(
    ids: Tensor,
    mask: Tensor,
    *,
    special: tuple[int, int],
    mask_id: int | None,
    vocabulary_size: int,
    pad_id: int = 0,
    forbidden: Sequence[int] = (),
    rate: float = 0.2,
    masked: float = 0.5,
    replaced: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Augment texts: each word token is chosen with probability rate, then masked, replaced or deleted.

    By default 50 % of the chosen tokens become mask_id, 10 % become a random id of the vocabulary and 40 % are deleted.
    The remaining tokens move to the left. A text that would lose all its words keeps one of them unchanged.

    Paper: Chen et al., CVPR 2021; Chun, ICLR 2024, table B.1. The released code samples random ids from the range of
    BERT's vocabulary, for every model.

    ids (n, t), mask (n, t).
    """
    masking = pad_id if mask_id is None else mask_id
    allowed = torch.ones(vocabulary_size, dtype=torch.bool)
    allowed[list(forbidden)] = False
    known = allowed.nonzero().squeeze(1).to(ids.device)
    position = mask.cumsum(1) - 1
    word = mask & (position >= special[0]) & (position < mask.sum(1, keepdim=True) - special[1])
    choice, kind = torch.rand(2, *ids.shape, generator=generator, device=ids.device)
    random_ids = known[torch.randint(len(known), ids.shape, generator=generator, device=ids.device)]
    chosen = word & (choice < rate)
    deleted = chosen & (kind >= masked + replaced)
    rescued = _is_largest(choice, word) & ~(word & ~deleted).any(1, keepdim=True)
    ids = torch.where(chosen & ~deleted, torch.where(kind < masked, masking, random_ids), ids)
    mask = mask & (~deleted | rescued)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    return torch.where(mask, ids.gather(1, order), pad_id), mask


def _is_largest(draw: Tensor, mask: Tensor) -> Tensor:
    """(n, t) bool, True at one random position of each row's mask: the one with the largest random number."""
    inside = draw.masked_fill(~mask, -1)
    return mask & (inside == inside.amax(1, keepdim=True))


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, in [0, 1]."""


def random_crop_box(random: np.random.Generator, low: float = 0.6) -> Box:
    """Sample a random crop for training: a random width and height, which changes the aspect, then a random position.

    Source: the training crop of the PCME++ code, https://github.com/naver-ai/pcmepp, which samples one fraction for
        both sides.

    Returns (left, top, width, height).
    """
    width, height, across, down = random.random(4).tolist()
    width, height = low + (1 - low) * width, low + (1 - low) * height
    return across * (1 - width), down * (1 - height), width, height


def resized_crop_box(random: np.random.Generator, aspect: float, *, low: float = 0.08) -> Box:
    """Sample a random crop as it is usual for ImageNet: a fraction of the area, then an aspect, then a position.

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 6.

    Returns (left, top, width, height).
    """
    for _ in range(10):
        area, shape = random.uniform(low, 1), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(area * shape / aspect), math.sqrt(area * aspect / shape)
        if width <= 1 and height <= 1:
            across, down = random.random(2).tolist()
            return across * (1 - width), down * (1 - height), width, height
    shape = min(max(aspect, 3 / 4), 4 / 3)
    width, height = min(1.0, shape / aspect), min(1.0, aspect / shape)
    return (1 - width) / 2, (1 - height) / 2, width, height


def augment(pixels: Tensor, *, generator: torch.Generator) -> Tensor:
    """Apply random changes of geometry and colour, different for each image, that keep the identity of the object.

    Rotation by up to 15 degrees, scale 0.75 to 1.15, shift by up to 12 % and, for every other image, a mirror image;
    then a random background instead of white for half of them, brightness, contrast, a random mix of the colour
    channels, and grey for one in five.

    pixels (n, 3, h, w) -> (n, 3, h, w).
    """
    n = len(pixels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    angle, scale = uniform(-math.pi / 12, math.pi / 12), uniform(0.75, 1.15)
    mirror = torch.where(uniform(0, 1) < 0.25, -1.0, 1.0)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    first = torch.stack([cos * mirror, -sin, uniform(-0.24, 0.24)], 1)
    second = torch.stack([sin * mirror, cos, uniform(-0.24, 0.24)], 1)
    matrix = torch.stack([first, second], 1)
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    # Pixels outside of the image are 0, so the image is inverted: white stays white.
    dark = functional.grid_sample(1 - pixels.float() / 255, grid, align_corners=False)
    background = torch.where(uniform(0, 1, 1, 1, 1) < 0.5, uniform(0, 1, 3, 1, 1), 0.0)
    light = 1 - dark
    whiteness = light.amin(1, keepdim=True).sub(0.85).clamp_min(0) / 0.15
    image = light * (1 - whiteness * background)
    mix = torch.eye(3) + 0.25 * torch.randn(n, 3, 3, generator=generator)
    mix = mix / mix.sum(2, keepdim=True).clamp_min(0.3)
    grey = uniform(0, 1, 1, 1) < 0.2
    mix = torch.where(grey, torch.full((3, 3), 1 / 3), mix)
    image = torch.einsum("nij,njhw->nihw", mix, image)
    mean = image.mean((1, 2, 3), keepdim=True)
    image = (image - mean) * uniform(0.6, 1.4, 1, 1, 1) + mean + uniform(-0.2, 0.2, 1, 1, 1)
    return image.clamp(0, 1)


def crop_and_mirror(pixels: Tensor, *, generator: torch.Generator, low: float = 0.6) -> Tensor:
    """PCME++'s training geometry on decoded images: a random part of each, stretched; half of them mirrored.

    pixels (n, 3, h, w) -> (n, 3, h, w).
    """
    fraction = low + (1 - low) * torch.rand(len(pixels), 2, generator=generator)
    shift = (2 * torch.rand(len(pixels), 2, generator=generator) - 1) * (1 - fraction)
    fraction[:, 0] *= torch.where(torch.rand(len(pixels), generator=generator) < 0.5, -1.0, 1.0)
    matrix = torch.cat([torch.diag_embed(fraction), shift.unsqueeze(2)], 2)
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels.float() / 255, grid, padding_mode="border", align_corners=False).clamp(0, 1)


def erase_rectangles(pixels: Tensor, *, fraction: float, generator: torch.Generator) -> Tensor:
    """Random erasing: in some images a rectangle is filled with the mean colour of ImageNet.

    The rectangle has between 2 % and a third of the image's area, an aspect ratio between 0.3 and 1 / 0.3, and a random
    position. A side longer than the image is reduced to the side of the image.

    Paper: Zhong et al., "Random Erasing Data Augmentation", AAAI 2020, with its limits of area and aspect.

    pixels (n, 3, h, w) -> (n, 3, h, w).
    """
    values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    chosen, area, aspect, down, across = torch.rand(5, len(pixels), 1, generator=generator)
    area, aspect = 0.02 + area * (1 / 3 - 0.02), ((2 * aspect - 1) * math.log(1 / 0.3)).exp()
    inside = []
    lengths = (area * aspect).sqrt(), (area / aspect).sqrt()
    for side, length, start in zip(pixels.shape[2:], lengths, (down, across), strict=True):
        middle = (torch.arange(side) + 0.5) / side
        first = start * (1 - length.clamp(max=1))
        inside.append((middle >= first) & (middle < first + length))
    erased = inside[0].unsqueeze(2) & inside[1].unsqueeze(1) & (chosen < fraction).unsqueeze(2)
    return torch.where(erased.unsqueeze(1), torch.tensor(IMAGENET_MEAN).view(3, 1, 1), values)
