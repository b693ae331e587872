"""Slow, obvious float64 loops straight from docs/concepts. Imports nothing of ours: it must be able to disagree."""

import math

csd = lambda m1, v1, m2, v2: sum((a - b) ** 2 + s + t for a, s, b, t in zip(m1, v1, m2, v2, strict=True))
squared_l2 = lambda m1, v1, m2, v2: sum((a - b) ** 2 for a, b in zip(m1, m2, strict=True))
wasserstein2_root = lambda m1, v1, m2, v2: math.sqrt(wasserstein2(m1, v1, m2, v2))
kl_reversed = lambda m1, v1, m2, v2: kl(m2, v2, m1, v1)
min_kl = lambda m1, v1, m2, v2: min(kl(m1, v1, m2, v2), kl(m2, v2, m1, v1))
js = lambda m1, v1, m2, v2: (kl(m1, v1, m2, v2) + kl(m2, v2, m1, v1)) / 2
sigmoid = lambda x: 1 / (1 + math.exp(-x))
cross_entropy = lambda x, label: -label * math.log(sigmoid(x)) - (1 - label) * math.log(1 - sigmoid(x))
transpose = lambda matrix: [list(row) for row in zip(*matrix, strict=True)]
table = lambda images, texts, formula=csd: [[formula(*x, *y) for y in texts] for x in images]


def wasserstein2(m1, v1, m2, v2):
    return sum((a - b) ** 2 + (math.sqrt(s) - math.sqrt(t)) ** 2 for a, s, b, t in zip(m1, v1, m2, v2, strict=True))


def wasserstein2_printed(m1, v1, m2, v2):
    return math.sqrt(sum((a - b) ** 2 + (s - t) ** 2 for a, s, b, t in zip(m1, v1, m2, v2, strict=True)))


def kl(m1, v1, m2, v2):
    return sum((s / t - math.log(s / t) + (a - b) ** 2 / t - 1) / 2 for a, s, b, t in zip(m1, v1, m2, v2, strict=True))


def elk(m1, v1, m2, v2):
    term = lambda a, s, b, t: ((a - b) ** 2 / (s + t) + math.log(s + t) + math.log(2 * math.pi)) / 2
    return sum(map(term, m1, v1, m2, v2))


def bhattacharyya(m1, v1, m2, v2):
    term = lambda a, s, b, t: (a - b) ** 2 / (s + t) / 4 + math.log((s + t) / (2 * math.sqrt(s * t))) / 2
    return sum(map(term, m1, v1, m2, v2))


def nearest(m1, v1, m2, v2, k):
    size = len(m1) // k
    parts = [[m[i : i + size] for i in range(0, len(m), size)] for m in (m1, m2)]
    return min(math.dist(a, b) ** 2 for a in parts[0] for b in parts[1])


def pseudo_positives(logits, match):
    """Per row: whatever is at least as likely as the row's own match takes its label."""
    return [
        [max(row) if logit >= own[row.index(max(row))] else label for logit, label in zip(own, row, strict=True)]
        for own, row in zip(logits, match, strict=True)
    ]


def mean_cross_entropy(logits, labels):
    values = [cross_entropy(x, y) for a, b in zip(logits, labels, strict=True) for x, y in zip(a, b, strict=True)]
    return sum(values) / len(values)


def vib(means, variances):
    pairs = [pair for a, b in zip(means, variances, strict=True) for pair in zip(a, b, strict=True)]
    return sum((m * m + v - 1 - math.log(v)) / 2 for m, v in pairs) / len(pairs)


def pcme(images, texts, match, scale, bias):
    """Mean over pairs; images and texts are lists of lists of draws."""
    total = 0.0
    for draws, row in zip(images, match, strict=True):
        for others, label in zip(texts, row, strict=True):
            p = [sigmoid(bias - scale * math.dist(x, y)) for x in draws for y in others]
            mean = sum(p) / len(p)
            total -= label * math.log(mean) + (1 - label) * math.log(1 - mean)
    return total / len(images) / len(texts)


def match_dispersion(vectors):
    unit = [[a / math.sqrt(sum(b * b for b in v)) for a in v] for v in vectors]
    values = [1 - sum(a * b for a, b in zip(x, y, strict=True)) for x in unit for y in unit]
    return sum(values) / len(values) if values else 0.0


def infonce(distance, match, scale):
    """Both directions, each averaged over the rows that have a positive."""
    total = 0.0
    for d, m in ((distance, match), (transpose(distance), transpose(match))):
        rows = []
        for row, labels in zip(d, m, strict=True):
            if sum(labels):
                norm = math.log(sum(math.exp(-scale * x) for x in row))
                rows.append(sum(y / sum(labels) * (norm + scale * x) for x, y in zip(row, labels, strict=True)))
        total += sum(rows) / len(rows) / 2
    return total


def discrepancy(images, texts):
    mean = lambda xs, ys: sum(math.exp(-(math.dist(x, y) ** 2) / 2) for x in xs for y in ys) / len(xs) / len(ys)
    return mean(images, images) - 2 * mean(images, texts) + mean(texts, texts)


def diversity(items):
    """Mean over items, each a list of K vectors."""
    total = 0.0
    for vectors in items:
        unit = [[a / math.hypot(*v) for a in v] for v in vectors]
        squares = [sum(a * b for a, b in zip(x, y, strict=True)) ** 2 for x in unit for y in unit if x is not y]
        total += math.sqrt(sum(squares)) / len(vectors) ** 2
    return total / len(items)


def triplet(distance, match, margin, mining):
    """Both directions, each averaged over the positive pairs."""
    total = 0.0
    for d, m in ((distance, match), (transpose(distance), transpose(match))):
        hinges = []
        for row, labels in zip(d, m, strict=True):
            negatives = [x for x, y in zip(row, labels, strict=True) if y < 0.5]
            for own, label in zip(row, labels, strict=True):
                if label < 0.5:
                    continue
                chosen = negatives
                if mining == "hardest":
                    chosen = sorted(negatives)[:1]
                elif mining == "semi-hard":
                    chosen = sorted(x for x in negatives if own < x < own + margin)[:1]
                hinges.append(sum(max(0.0, margin + own - x) for x in chosen))
        total += sum(hinges) / len(hinges)
    return total


def rank_disagreement(distance, label, temperature):
    """DAA: 1 - min / max of the smooth rank by distance and the rank by label, averaged over rows and gallery."""
    total = 0.0
    for d, y in zip(distance, label, strict=True):
        for i in range(len(d)):
            rank = 1 + sum(1 / (1 + math.exp(-(d[i] - d[j]) / temperature)) for j in range(len(d)) if j != i)
            meant = 1 + sum(1.0 if y[j] > y[i] else 0.5 * (y[j] == y[i]) for j in range(len(d)) if j != i)
            total += (1 - min(rank, meant) / max(rank, meant)) / len(d)
    return total / len(distance)


def sigmoid_terms(images, texts, match, scale, bias):
    """(logits, mean cross-entropy, bottleneck of both sides at the default weight) of losses with match logits."""
    logits = [[bias - scale * d for d in row] for row in table(images, texts)]
    both = sum(vib([m for m, _ in side], [v for _, v in side]) for side in (images, texts))
    return logits, mean_cross_entropy(logits, match), 1e-4 * both


def pcmepp_total(images, texts, match):
    logits, cross_entropy, bottleneck = sigmoid_terms(images, texts, match, 5.0, 5.0)
    raised = 0.0
    for rows, labels in ((logits, match), (transpose(logits), transpose(match))):
        raised += mean_cross_entropy(rows, pseudo_positives(rows, labels))
    return 2 * cross_entropy + 0.1 * raised + bottleneck


def pcme_total(images, texts, match):
    """Of embeddings that are nearly points: each sample is the mean."""
    *_, bottleneck = sigmoid_terms(images, texts, match, 5.0, 5.0)
    return 2 * pcme(*([[mean] for mean, _ in side] for side in (images, texts)), match, 5.0, 5.0) + bottleneck


def prolip_total(images, texts, match):
    _, cross_entropy, bottleneck = sigmoid_terms(images, texts, match, 5.0, 0.0)
    return 2 * len(images) * len(texts) / (len(images) + len(texts)) * cross_entropy + bottleneck


def triplet_total(images, texts, match, margin=0.4):
    return triplet(table(images, texts, squared_l2), match, margin, "hardest")


def daa_total(images, texts, match):
    d = table(images, texts, squared_l2)
    ranks = rank_disagreement(d, match, 0.02) + rank_disagreement(transpose(d), transpose(match), 0.02)
    return triplet_total(images, texts, match) + 0.39 * ranks


# The whole of every loss in LOSSES with its default options, of two lists of (mean, variance) and the labels.
LOSS_TOTALS = {
    "pcmepp": pcmepp_total, "pcme": pcme_total, "prolip": prolip_total,
    "infonce": lambda images, texts, match: infonce(table(images, texts, squared_l2), match, 5.0),
    "triplet": triplet_total, "daa": daa_total,
    # One embedding an item: neither of the other terms.
    "pvse": lambda images, texts, match: triplet_total(images, texts, match, margin=0.2),
}  # fmt: skip
