"""SizeAugment of VSE-infinity: in training, pictures lose some of their token features and texts some of their words.

It knows ids and masks, not the networks or tokenizers they belong to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def drop_tokens(mask: Tensor, *, rate: float = 0.2, generator: torch.Generator | None = None) -> Tensor:
    r"""Leave out some tokens of some items: (1 - rate) of the items lose up to a share rate of theirs.

    Each item draws p ~ U(0, 1). If p > rate, each of its tokens goes with probability rate * p; otherwise none does. An item
    keeps at least one of its tokens. A class token is a token like the others, as in the released code.

    Args:
        mask: (n, t) bool, True where there is a token; torch.ones(n, t, dtype=torch.bool, device=...) where all are.
        rate: in [0, 1]; 0 drops nothing.
        generator: on the device of mask; the global one, which torch.manual_seed governs, if None.

    Returns:
        (n, t) bool, a part of mask. The mean and the log variance of an item share it.

    Raises:
        TypeError: mask is not bool.
        ValueError: mask is not two-dimensional, or rate is out of its range.

    Paper: Chen et al., CVPR 2021 (VSE-infinity); Chun, ICLR 2024, table B.1.
    """
    _check_mask(mask, rate, "drop_tokens")
    p = torch.rand(len(mask), 1, generator=generator, device=mask.device)
    draw = torch.rand(mask.shape, generator=generator, device=mask.device)
    threshold = torch.where(p > rate, rate * p, 0)
    return mask & ((draw >= threshold) | _is_largest(draw, mask))


def augment_token_ids(
    ids: Tensor,
    mask: Tensor,
    *,
    special: tuple[int, int],
    mask_id: int,
    vocabulary_size: int,
    pad_id: int = 0,
    forbidden: Sequence[int] = (),
    rate: float = 0.2,
    masked: float = 0.5,
    replaced: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Damage texts: each word token is chosen with probability rate, then masked, replaced or deleted.

    Of the chosen, 50 % become mask_id, 10 % a random id of the vocabulary and 40 % are deleted, unless other shares are given;
    what is left moves together to the left. A text that would lose all its words keeps one of them as it was.

    Args:
        ids: (n, t) int64 token ids.
        mask: (n, t) bool, True where there is a token.
        special: how many tokens at the beginning and at the end of each text are not words and never touched.
        mask_id: id of a masked word.
        vocabulary_size: of the model that reads the ids; random ids are below it.
        pad_id: id of the places without a token.
        forbidden: ids that are never drawn as random ones: beginning, end, padding, ...
        rate: in [0, 1]; 0 changes nothing.
        masked, replaced: shares of the chosen; 0 and 0 delete all of them, PCME's caption dropping.
        generator: on the device of ids; the global one if None.

    Returns:
        ((n, t) int64 ids, (n, t) bool mask), every text at the left, pad_id behind it.

    Raises:
        TypeError: mask is not bool, or ids are not int64.
        ValueError: shapes do not fit, a number or an id is out of its range, or all ids are forbidden.

    Paper: Chen et al., CVPR 2021; Chun, ICLR 2024, table B.1. The released code draws its random ids from the size of BERT's
    vocabulary whatever the model's own is.
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
            f"augment_token_ids: masked and replaced must be shares of a whole, got {masked} and {replaced}"
        )
    for name, values in (("mask_id", [mask_id]), ("pad_id", [pad_id]), ("forbidden", forbidden)):
        if outside := [i for i in values if not 0 <= i < vocabulary_size]:
            raise ValueError(
                f"augment_token_ids: {name} holds {outside[0]}, but the ids of the vocabulary are 0 to {vocabulary_size - 1}"
            )
    allowed = torch.ones(vocabulary_size, dtype=torch.bool)
    allowed[list(forbidden)] = False
    known = allowed.nonzero().squeeze(1).to(ids.device)
    if not len(known):
        raise ValueError(f"augment_token_ids: all {vocabulary_size} ids are forbidden; there is none to draw")

    place = mask.cumsum(1) - 1
    word = mask & (place >= special[0]) & (place < mask.sum(1, keepdim=True) - special[1])
    choice, kind = torch.rand(2, *ids.shape, generator=generator, device=ids.device)
    random_ids = known[torch.randint(len(known), ids.shape, generator=generator, device=ids.device)]
    chosen = word & (choice < rate)
    deleted = chosen & (kind >= masked + replaced)
    rescued = _is_largest(choice, word) & ~(word & ~deleted).any(1, keepdim=True)
    ids = torch.where(chosen & ~deleted, torch.where(kind < masked, mask_id, random_ids), ids)
    mask = mask & (~deleted | rescued)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    return torch.where(mask, ids.gather(1, order), pad_id), mask


def _is_largest(draw: Tensor, mask: Tensor) -> Tensor:
    """(n, t) bool, True at the largest draw of each row among those of its mask: a random one of them."""
    inside = draw.masked_fill(~mask, -1)
    return mask & (inside == inside.amax(1, keepdim=True))


def _check_mask(mask: Tensor, rate: float, who: str) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"{who}: mask must be bool, got {mask.dtype}")
    if mask.ndim != 2:
        raise ValueError(f"{who}: mask must have shape (n, t), got {tuple(mask.shape)}")
    if not 0 <= rate <= 1:
        raise ValueError(f"{who}: rate must lie in [0, 1], got {rate}")
