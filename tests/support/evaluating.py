"""Figures of embeddings, scores and lists against ground truths, in one call each."""

from sfumato.evaluation.benchmarks import figures, rank
from sfumato.evaluation.protocols import Embeddings, Lists, Scores


def evaluate_benchmarks(images, texts, image_ids, text_ids, ground_truths, **options):
    return figures(rank(Embeddings(images, texts, **options), image_ids, text_ids, ground_truths))


def evaluate_score_matrix(scores, image_ids, text_ids, ground_truths, **options):
    return figures(rank(Scores(scores, **options), image_ids, text_ids, ground_truths))


def evaluate_ranked_lists(i2t, t2i, image_ids, text_ids, ground_truths, **options):
    return figures(rank(Lists(i2t, t2i, **options), image_ids, text_ids, ground_truths))
