"""Fit the constants of images_and_precision in src/sfumato/calibration/fits.py, and say how they hold.

python scripts/make_multiplicity.py PQPP

PQPP holds train.jsonl and validation.jsonl: caption; relevant, the images that people found relevant; clip_p10 and
blip2_p10, the fractions of relevant images among the ten best of CLIP and of BLIP-2. Fitted on train; nothing is chosen
here. The scales of the kernel and the 256 axes were chosen on validation.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from scipy.stats import kendalltau, pearsonr, spearmanr

from sfumato.calibration import fits
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.search.languages import words_of

TARGET = Path(fits.__file__).with_name("multiplicity.safetensors")
N_AXES = 256


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sentence vectors, numbers of words, and (n, 2) log numbers of images and mean precisions at 10."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [row["caption"] for row in rows]
    n_words = np.array([len(words_of(text)) for text in texts])
    labels = [(np.log(max(1, len(row["relevant"]))), (row["clip_p10"] + row["blip2_p10"]) / 2) for row in rows]
    return sentence_vectors(texts), n_words, np.array(labels)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pqpp", type=Path)
    given = parser.parse_args()
    vectors, n_words, labels = read(given.pqpp / "train.jsonl")
    axes = np.linalg.svd(vectors, full_matrices=False)[2][:N_AXES].T
    placed = vectors @ axes
    stored = np.round(placed * (127 / np.abs(placed).max(1, keepdims=True))).astype(np.int8)
    captions = fits.unit(stored.astype(np.float32))
    cosine = captions @ captions.T
    np.fill_diagonal(cosine, -1)  # Each among the others.
    numbers = fits.place(cosine, n_words)
    centre, spread = numbers.mean(0), numbers.std(0) + 1e-9
    numbers = ((numbers - centre) / spread).clip(-4, 4)
    np.fill_diagonal(cosine, 1)
    likeness, mean = fits.kernel(numbers, cosine, numbers), labels.mean(0)
    weights = np.linalg.solve(likeness + np.eye(len(likeness)), labels - mean)
    small = {"axes": axes, "numbers": numbers}
    exact = {"centre": centre, "spread": spread, "weights": weights, "mean": mean}
    values = {"captions": stored} | {name: np.ascontiguousarray(value, np.float16) for name, value in small.items()}
    save_file(values | {name: value.astype(np.float32) for name, value in exact.items()}, TARGET)
    vectors, n_words, labels = read(given.pqpp / "validation.jsonl")
    found, tests = fits.log_images_and_precision(vectors, n_words), (pearsonr, spearmanr, kendalltau)
    for name, own, truth in zip(("log number of images", "precision at 10"), found.T, labels.T, strict=True):
        pearson, spearman, kendall = (test(own, truth).statistic for test in tests)
        print(f"validation, {name}: Pearson {pearson:.3f}, Spearman {spearman:.3f}, Kendall {kendall:.3f}")
    print(f"{TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
