"""Are made-up texts told from words that no training saw? Five folds of the emoji set's wordings.

    python benchmarks/unfamiliar.py

Two kinds of made-up texts come from the generator of the fit with another seed; runs of neighbouring keys do not.
"""

from statistics import fmean

import numpy as np

from sfumato.data.emoji import load_emoji
from sfumato.encoders.backbones import text_backbone
from sfumato.metrics.bootstrap import auroc
from sfumato.models.model import UnfamiliarTexts, nonsense

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
N = 300


def key_runs(n: int, seed: int) -> list[str]:
    """Runs of four to eight neighbouring keys, forwards or backwards, one or two in a text."""
    random = np.random.default_rng(seed)

    def run() -> str:
        row = ROWS[random.integers(3)]
        length = random.integers(4, min(9, len(row) + 1))
        start = random.integers(len(row) - length + 1)
        return row[start : start + length][:: random.choice([-1, 1])]

    return [" ".join(run() for _ in range(random.integers(1, 3))) for _ in range(n)]


def main() -> None:
    backbone = text_backbone("minilm-l6-v2")
    pieces = backbone.pieces  # type: ignore[attr-defined]  # MiniLM has subwords.
    made_up = nonsense(2 * N, seed=1)
    kinds = {"random letters": made_up[::2], "syllables": made_up[1::2], "neighbouring keys": key_runs(N, 1)}
    of_kind: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    alarms, n_new = [], 0
    for fold in range(5):
        splits = load_emoji(held_out_wordings=f"{fold}/5", held_out_concepts=f"{fold}/10")
        training = splits["train"].texts
        known = set(training)
        new = [text for text in splits["test"].texts if text not in known]
        judge = UnfamiliarTexts.fit(training, pieces)
        n_new += len(new)
        alarms.append(fmean(judge.of(new, pieces)))
        for name, texts in kinds.items():
            score = judge.score([*new, *texts], pieces)
            of_kind[name].append((auroc(score, np.arange(len(score)) >= len(new)), fmean(judge.of(texts, pieces))))
    print("| texts | n | AUROC against the new texts | called unfamiliar |\n| --- | ---: | ---: | ---: |")
    for name, found in of_kind.items():
        print(f"| {name} | {N} | {fmean(a for a, _ in found):.3f} | {fmean(f for _, f in found):.0%} |")
    print(f"| texts that training lacked, five folds | {n_new} | | {fmean(alarms):.1%} |")


if __name__ == "__main__":
    main()
