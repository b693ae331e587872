"""Small data sets of pairs without pictures, for tests of batches and noise."""

import numpy as np

from sfumato.data.images import FileImage
from sfumato.data.pairs import PairData, make_pair_data


def many_to_many(n=23, m=17, n_pairs=60, seed=0):
    random = np.random.default_rng(seed)
    images = np.concatenate([np.arange(n), random.integers(0, n, n_pairs)])
    pairs = np.stack([images, random.integers(0, m, n + n_pairs)], 1)
    names, files = tuple(f"i{k}" for k in range(n)), tuple(FileImage(f"{k}.png") for k in range(n))
    texts = tuple(f"t{k}" for k in range(m)), tuple(f"text {k}" for k in range(m))
    return PairData(names, files, *texts, tuple(("name", "tag", "group")[k % 3] for k in range(m)), pairs)


def captions(n, each):
    texts = [[f"{k} {c}" for c in range(each)] for k in range(n)]
    return make_pair_data([f"i{k}" for k in range(n)], [FileImage(f"{k}.png") for k in range(n)], texts)
