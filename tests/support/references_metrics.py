"""Slow, obvious oracles for ranks, metrics and distances between Gaussians; they import nothing of ours."""

import numpy as np


def order_of(distances):
    """Gallery positions from closest to farthest, equal distances by position."""
    return sorted(range(len(distances)), key=lambda j: (distances[j], j))


def ranks_by_sorting(distance, ground_truths):
    """Ranks of the relevant items, query by query, items in ascending order."""
    ranks = []
    for row, ground_truth in zip(distance, ground_truths, strict=True):
        order = order_of(list(row))
        ranks += [order.index(j) for j in sorted(set(ground_truth))]
    return np.array(ranks, dtype=np.int64)


def metrics_by_definition(distance, ground_truths, ks=(1, 5, 10)):
    """Averages over the queries with a relevant item, straight from the definitions."""
    values = {name: [] for name in [*(f"recall@{k}" for k in ks), "r_precision", "map@r", "best"]}
    for row, ground_truth in zip(distance, ground_truths, strict=True):
        ground_truth = set(ground_truth)
        if not ground_truth:
            continue
        relevant, r = [j in ground_truth for j in order_of(list(row))], len(ground_truth)
        for k in ks:
            values[f"recall@{k}"].append(any(relevant[:k]))
        values["r_precision"].append(sum(relevant[:r]) / r)
        values["map@r"].append(sum(sum(relevant[: i + 1]) / (i + 1) for i in range(r) if relevant[i]) / r)
        values["best"].append(relevant.index(True) + 1)
    best, result = values.pop("best"), {name: float(np.mean(v)) for name, v in values.items()}
    return result | {"median_rank": float(np.median(best)), "mean_rank": float(np.mean(best))}


def csd_by_loops(mean_x, var_x, mean_y, var_y):
    """(n, m) closed-form sampled distances in float64."""
    result = np.zeros((len(mean_x), len(mean_y)))
    for i in range(len(mean_x)):
        for j in range(len(mean_y)):
            gap = np.float64(mean_x[i]) - np.float64(mean_y[j])
            result[i, j] = (gap * gap).sum() + np.float64(var_x[i]).sum() + np.float64(var_y[j]).sum()
    return result
