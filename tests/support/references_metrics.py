"""Slow, obvious oracles for ranks, metrics and distances between Gaussians; they import nothing of ours."""

import numpy as np

order_of = lambda distances: sorted(range(len(distances)), key=lambda j: (distances[j], j))


def ranks_by_sorting(distance, ground_truths):
    ranks = []
    for row, ground_truth in zip(distance, ground_truths, strict=True):
        order = order_of(list(row))
        ranks += [order.index(j) for j in sorted(set(ground_truth))]
    return np.array(ranks, dtype=np.int64)


def metrics_by_definition(distance, ground_truths, ks=(1, 5, 10)):
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
    result = np.zeros((len(mean_x), len(mean_y)))
    for i in range(len(mean_x)):
        for j in range(len(mean_y)):
            gap = np.float64(mean_x[i]) - np.float64(mean_y[j])
            result[i, j] = (gap * gap).sum() + np.float64(var_x[i]).sum() + np.float64(var_y[j]).sum()
    return result
