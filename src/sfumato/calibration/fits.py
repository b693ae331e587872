"""The probability of target "fits": a person would say that the text describes the image.

It is a logistic function of a few numbers about a query and an item. The constants were fitted once: on people's
verdicts about sentences (Hodosh, Young and Hockenmaier 2013, Flickr8k), and, for single words, on whether captions
mention the word. benchmarks/fits_prior.py fits them; docs/results/own-photographs.md says how well they hold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of q queries and c items."""

    image: Tensor  # (q, c) logit that a random pair at their distance is a listed match
    agreement: Tensor  # (q, c) cosine of the query with the mean of the item's texts; nan for an item without texts
    words: Tensor  # (q, c) fraction of the query's words that the texts have, weighed by rarity; over their number
    n_words: Tensor  # (q,) number of the query's words, at least 1

    def features(self) -> Tensor:
        """(q, c, 4) agreement, image, words, and one over the number of words."""
        one_over = (1 / self.n_words).unsqueeze(1).expand_as(self.image)
        return torch.stack([self.agreement, self.image, self.words, one_over], dim=2)


WITH_TEXTS, WITH_TEXTS_BIAS = (6.52, 0.22, 8.37, 0.55), -4.78
"""Weights of the features of an item with texts."""

WITHOUT_TEXTS, WITHOUT_TEXTS_BIAS = (0.48, WITH_TEXTS[2] / 2, 0.81), 0.2
"""Weights of image, words and one over the number of words, for an item without texts. It may have words, those of its
name or place, and these count half as much as those of a text; that weight was not fitted."""


def fits_logit(evidence: Evidence) -> Tensor:
    """(q, c) logits that a person would say that the query describes the item."""
    features = evidence.features().double()
    alone = features[..., 1:] @ torch.tensor(WITHOUT_TEXTS, dtype=torch.float64) + WITHOUT_TEXTS_BIAS
    both = features.nan_to_num() @ torch.tensor(WITH_TEXTS, dtype=torch.float64) + WITH_TEXTS_BIAS
    return torch.where(evidence.agreement.isnan(), alone, both).float()
