"""Random changes of a training batch: mixup and CutMix of images, and SizeAugment of image and text tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

MixChoice = Literal["batch", "element"]


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
        expected = (len(self), 3, *self.size)
        if tuple(pixels.shape) != expected:
            raise ValueError(f"MixPlan.apply: the plan is for pixels of shape {expected}, got {tuple(pixels.shape)}")
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
        if match.ndim != 2 or len(match) != len(self):
            raise ValueError(f"MixPlan.match: match must have shape ({len(self)}, m), got {tuple(match.shape)}")
        match = match if match.is_floating_point() else match.float()
        fraction = self.own_fraction.to(match).unsqueeze(1)
        return torch.lerp(match[self.partner.to(match.device)], match, fraction)

    @classmethod
    def cat(cls, plans: Sequence["MixPlan"]) -> "MixPlan":
        """Concatenate several plans; partners stay within their own plan."""
        sizes = sorted({plan.size for plan in plans})
        if len(sizes) != 1:
            raise ValueError(f"MixPlan.cat: expected plans for images of one size, got {len(plans)} plans for {sizes}")
        starts = np.cumsum([0, *map(len, plans)]).tolist()
        return cls(
            torch.cat([plan.partner + start for plan, start in zip(plans, starts, strict=False)]),
            torch.cat([plan.own_fraction for plan in plans]),
            torch.cat([plan.box for plan in plans]),
            sizes[0],
        )


def plan_mixing(
    n: int,
    *,
    size: tuple[int, int],
    generator: torch.Generator,
    fraction: float = 0.25,
    mixup_alpha: float = 2.0,
    cutmix_alpha: float = 2.0,
    cutmix_probability: float = 0.5,
    choice: MixChoice = "batch",
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
    if n < 0 or min(size) < 1:
        raise ValueError(f"plan_mixing: expected n >= 0 images of size (h, w) >= 1, got {n} of {size}")
    for name, value, limit in (
        ("fraction", fraction, 1),
        ("cutmix_probability", cutmix_probability, 1),
        ("mixup_alpha", mixup_alpha, np.inf),
        ("cutmix_alpha", cutmix_alpha, np.inf),
    ):
        if not (0 <= value <= limit and np.isfinite(value)):
            raise ValueError(f"plan_mixing: {name} must be a number in [0, {limit}], got {value}")
    if mixup_alpha == 0 == cutmix_alpha:
        raise ValueError(
            "plan_mixing: mixup_alpha and cutmix_alpha are both 0; set one above 0, or set fraction to 0 to mix nothing"
        )
    if choice not in get_args(MixChoice):
        raise ValueError(f"plan_mixing: unknown choice {choice!r}; known: {', '.join(get_args(MixChoice))}")
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
    return MixPlan(
        torch.from_numpy(np.where(mixed, flipped, np.arange(n))),
        torch.from_numpy(np.where(mixed, own_fraction, np.float32(1))),
        torch.from_numpy(np.where((mixed & cut)[:, None], box, 0)),
        size,
    )


def smooth_match(match: Tensor, smoothing: float) -> Tensor:
    """Label smoothing: 0 becomes smoothing, 1 becomes 1 - smoothing, linear between."""
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"smooth_match: smoothing must lie in [0, 0.5), got {smoothing}")
    return smoothing + (1 - 2 * smoothing) * match


def drop_tokens(mask: Tensor, *, rate: float = 0.2, generator: torch.Generator | None = None) -> Tensor:
    r"""Drop some tokens of some items: a fraction 1 - rate of the items lose up to a fraction rate of their tokens.

    Each item samples p ~ U(0, 1). If p > rate, each of its tokens is dropped with probability rate * p; otherwise no
    token is dropped. An item keeps at least one of its tokens. A class token is treated like every other token, as in
    the released code.

    Paper: Chen et al., CVPR 2021 (VSE-infinity); Chun, ICLR 2024, table B.1.

    mask (n, t) -> (n, t).
    """
    _check_mask(mask, rate, "drop_tokens")
    p = torch.rand(len(mask), 1, generator=generator, device=mask.device)
    draw = torch.rand(mask.shape, generator=generator, device=mask.device)
    threshold = torch.where(p > rate, rate * p, 0)
    return mask & ((draw >= threshold) | _is_largest(draw, mask))


def drop_regions(mask: Tensor, *, rate: float, generator: torch.Generator | None = None) -> Tensor:
    r"""Drop each region with the same probability. An item keeps at least one of its regions.

    VSE-infinity augments region features in this way, and the tokens of other encoders with :func:`drop_tokens`, which
    drops fewer: at rate 0.2 a region is dropped with probability 20 %, a token with 9.6 %.

    Source: https://github.com/woodfrog/vse_infty, the data set of precomputed regions. Paper: Chen et al., CVPR 2021.

    mask (n, r) -> (n, r).
    """
    _check_mask(mask, rate, "drop_regions")
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
    _check_mask(mask, rate, "augment_token_ids")
    if ids.dtype != torch.int64:
        raise TypeError(f"augment_token_ids: ids must be int64, got {ids.dtype}")
    if ids.shape != mask.shape or min(special) < 0:
        raise ValueError(
            f"augment_token_ids: expected ids and mask of one shape and two counts of special tokens >= 0, got"
            f" {tuple(ids.shape)}, {tuple(mask.shape)} and {special}"
        )
    if min(masked, replaced) < 0 or masked + replaced > 1:
        raise ValueError(
            f"augment_token_ids: masked and replaced must be at least 0, and at most 1 together; got {masked}"
            f" and {replaced}"
        )
    if mask_id is None and masked:
        raise ValueError("augment_token_ids: mask_id is None, but a fraction of the chosen tokens is masked")
    masking = pad_id if mask_id is None else mask_id
    for name, values in (("mask_id", [masking]), ("pad_id", [pad_id]), ("forbidden", forbidden)):
        if outside := [i for i in values if not 0 <= i < vocabulary_size]:
            raise ValueError(
                f"augment_token_ids: {name} holds {outside[0]}, but the ids of the vocabulary are 0 to"
                f" {vocabulary_size - 1}"
            )
    allowed = torch.ones(vocabulary_size, dtype=torch.bool)
    allowed[list(forbidden)] = False
    known = allowed.nonzero().squeeze(1).to(ids.device)
    if not len(known):
        raise ValueError(f"augment_token_ids: all {vocabulary_size} ids are forbidden; no id is left to sample")

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


def _check_mask(mask: Tensor, rate: float, who: str) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"{who}: mask must be bool, got {mask.dtype}")
    if mask.ndim != 2:
        raise ValueError(f"{who}: mask must have shape (n, t), got {tuple(mask.shape)}")
    if not 0 <= rate <= 1:
        raise ValueError(f"{who}: rate must lie in [0, 1], got {rate}")
