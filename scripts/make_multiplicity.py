"""Fit the constants of multiplicity in src/sfumato/calibration/fits.py, and say how well they hold.

python scripts/make_multiplicity.py PQPP

PQPP holds train.jsonl and validation.jsonl: caption, and relevant, the images that people found relevant. Fitted on
train; nothing is chosen here. The scales of the kernel and the 256 axes were chosen on validation.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from scipy.stats import pearsonr, spearmanr

from sfumato.calibration import fits
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.search.languages import words_of

TARGET = Path(fits.__file__).with_name("multiplicity.safetensors")
N_AXES = 256


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sentence vectors, numbers of words, and logs of the numbers of images."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [row["caption"] for row in rows]
    n_words = np.array([len(words_of(text)) for text in texts])
    return sentence_vectors(texts), n_words, np.log([len(row["relevant"]) for row in rows])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pqpp", type=Path)
    given = parser.parse_args()
    vectors, n_words, log_number = read(given.pqpp / "train.jsonl")
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
    likeness, mean = fits.kernel(numbers, cosine, numbers), log_number.mean()
    weights = np.linalg.solve(likeness + np.eye(len(likeness)), log_number - mean)
    small = {"axes": axes, "numbers": numbers}
    exact = {"centre": centre, "spread": spread, "weights": weights, "mean": np.array([mean])}
    values = {"captions": stored} | {name: np.ascontiguousarray(value, np.float16) for name, value in small.items()}
    save_file(values | {name: value.astype(np.float32) for name, value in exact.items()}, TARGET)
    vectors, n_words, log_number = read(given.pqpp / "validation.jsonl")
    found = np.log(fits.multiplicity(vectors, n_words))
    rank, line = spearmanr(found, log_number).statistic, pearsonr(found, log_number).statistic
    print(f"validation: Spearman {rank:.3f}, Pearson {line:.3f}; {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
