"""Make the table of words that mean the same or a kind of it (src/sfumato/search/kinds.json) from WordNet 3.0.

    python benchmarks/word_kinds.py WORDNET FLICKR8K COCO5K [--out KINDS_JSON] [--show WORD ...]

WORDNET is the folder of WordNet's files (data.noun, index.noun ...), as Debian's package wordnet-base installs it.
FLICKR8K holds dataset_flickr8k.json, and COCO5K testall_caps.txt (a caption a line): the words that captions use.

A text that has "poodle" says "dog", and one that has "couch" says "sofa". WordNet lists both, and much that a person
would not think of: so a pair counts only if its words are close for the sentence encoder as well. Kinds are those of
the most usual sense of nouns that can be seen; words for the same thing share one of the two most usual senses of each.
Of people, only words that captions use. A word stem counts if the most usual word that has it does.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import normalize

from sfumato.encoders.package_weights import sentence_vectors, shared_minilm
from sfumato.search.languages import words_of
from sfumato.search.texts import FUNCTION_WORDS, _stem

VISIBLE = {"04": "act", "05": "life", "06": "artefact", "08": "body", "13": "life", "17": "object", "18": "person"}
VISIBLE |= {"20": "life"}
"""By WordNet's numbers of files, what can be seen. An animal and its meat, a tree and its fruit are not two things."""

RIVAL = 4
"""How much more usual the first sense of a noun has to be than the second one."""

GENERAL = {"person", "animal", "plant", "food"}
"""The visible nouns among the most general ones."""

KIND, SAME = 0.35, 0.6
"""Least cosine of a kind and its name, and of words for the same thing."""

NEVER = {
    "bike": {"motorcycle"},
    "cricket": {"animal", "creature", "insect"},
    "girl": {"adult", "grownup", "woman", "women"},
    "orange": {"citrus", "fruit"},
    "pants": {"underpants", "underwear"},
}
"""What WordNet says and captions do not mean: their girls are children, and their oranges are mostly colours."""


@dataclass
class WordNet:
    """The nouns and the verbs of WordNet that are one word each."""

    folder: Path
    senses: dict[str, list[str]] = field(default_factory=dict)  # by word, its synsets, the most usual first
    above: dict[str, list[str]] = field(default_factory=dict)  # by synset, the more general ones
    visible: dict[str, str] = field(default_factory=dict)  # by synset, what can be seen
    uses: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # by word and by stem, as n, v, a, r
    uses_of: Counter[tuple[str, int]] = field(default_factory=Counter)  # by word and number of its sense, as noun

    def __post_init__(self) -> None:
        for part in ("noun", "verb"):
            sign = part[0]
            for row in self._rows(f"data.{part}"):
                n_words = int(row[3], 16)
                words, rest = row[4 : 4 + 2 * n_words : 2], row[5 + 2 * n_words :]
                self.above[sign + row[0]] = [sign + rest[i + 1] for i in range(0, len(rest) - 3, 4) if rest[i] == "@"]
                if part == "noun" and (row[1] in VISIBLE or GENERAL & set(words[:1])):
                    self.visible[sign + row[0]] = VISIBLE.get(row[1], words[0])
            for word, _, n_senses, *rest in self._rows(f"index.{part}"):
                if word.isalpha() and len(word) > 2:
                    self.senses.setdefault(word, []).extend(sign + at for at in rest[-int(n_senses) :])
        for form, word in self._irregular():
            self.senses[form] = [*dict.fromkeys(self.senses[word] + self.senses.get(form, []))]
        for key, number, n in self._rows("cntlist.rev"):
            word, _, kind = key.partition("%")
            for name in {word, _stem(word)}:
                self.uses[name]["nvars"[int(kind[0]) - 1]] += int(n)
            self.uses_of[word, int(number)] += int(n) * (kind[0] == "1")

    def _rows(self, name: str) -> Iterator[list[str]]:
        """The rows of a file without its licence and explanations."""
        for line in (self.folder / name).read_text("utf-8").splitlines():
            if not line.startswith("  "):
                yield line.partition(" | ")[0].split()

    def usual(self, word: str, sign: str) -> list[str]:
        """The two most usual senses of a word as noun or verb, if it is mostly one; nothing else."""
        return [at for at in self.senses[word] if at[0] == sign][:2] if self.is_mostly(word, sign) else []

    def is_mostly(self, word: str, sign: str) -> bool:
        """Whether a word or a stem is mostly a noun, or a verb."""
        return 2 * self.uses[word][sign] >= sum(self.uses[word].values())

    def seen(self, word: str) -> list[str]:
        """The most usual sense of a noun that can be seen, if no other thing that can be seen is as usual."""
        first, *others = self.usual(word, "n") or [""]
        rival = {self.visible.get(at) for at in others} - {None, self.visible.get(first)}
        clear = not rival or self.uses_of[word, 1] > RIVAL * self.uses_of[word, 2]
        return [first] if first in self.visible and clear and self.is_mostly(_stem(word), "n") else []

    def more_general(self, synset: str) -> set[str]:
        """All synsets above one."""
        found, todo = set[str](), [synset]
        while todo:
            new = [at for at in self.above[todo.pop()] if at not in found]
            found.update(new)
            todo += new
        return found

    def _irregular(self) -> list[tuple[str, str]]:
        """Irregular forms with their words: forms that are no words themselves."""
        rows = [row for part in ("noun", "verb") for row in self._rows(f"{part}.exc")]
        found = [(form, word) for form, *words in rows for word in words]
        found += [(word[:-2] + "en", word) for word in self.senses if word.endswith("man")]
        new = [(a, b) for a, b in found if a.isalpha() and a not in self.senses and b in self.senses]
        return [("people", "person"), ("men", "man"), *new]


def pairs(net: WordNet, known: set[str], used: Counter[str]) -> Iterator[tuple[str, str, float]]:
    """(word, what a text that has it says, least cosine). known: words that people ask for; used: those of captions."""
    named, same = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    words = [word for word in net.senses if word in used or "person" not in map(net.visible.get, net.senses[word])]
    for word in words:
        own = net.usual(word, "n")
        for at in {*own, *net.usual(word, "v")}:
            same[at].append(word)
        for at in own[:1] if word in known else []:
            named[at].append(word)
    for word in words:
        for at in net.seen(word):
            above = net.more_general(at) & net.visible.keys()
            yield from ((word, name, KIND) for at in above for name in named[at])
    for at, some in same.items():
        says = [word for word in some if net.is_mostly(_stem(word), at[0])]
        yield from ((a, b, SAME) for a in says for b in some if a != b and b in known)


def caption_words(flickr8k: Path, coco5k: Path) -> Counter[str]:
    """The words of captions with their numbers."""
    images = json.loads((flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    captions = [one["raw"] for image in images if image["split"] == "train" for one in image["sentences"]]
    captions += (coco5k / "testall_caps.txt").read_text("utf-8").splitlines()
    return Counter(word for caption in captions for word in words_of(caption))


def usual_words(net: WordNet, used: Counter[str]) -> dict[str, str]:
    """By stem, the most usual word that has it."""
    words = sorted({*used, *net.senses}, key=lambda word: (used[word], net.uses_of[word, 1], -len(word), word))
    return {_stem(word): word for word in words}


def is_form(word: str, of: str) -> bool:
    """Whether a word is a regular form of another one."""
    ends = {"e": ["es", "ed", "ing"], "y": ["ies", "ied"]}.get(of[-1], [])
    forms = [of + end for end in ("", "s", "es", "ed", "ing", of[-1] + "ed", of[-1] + "ing")]
    return word in forms or word in [of[:-1] + end for end in ends]


def close(found: list[tuple[str, str, float]]) -> list[tuple[str, str]]:
    """The pairs whose words are close enough for the sentence encoder, in singular and plural together."""
    words = sorted({word for pair in found for word in pair[:2]})
    row = {word: i for i, word in enumerate(words)}
    vectors = normalize(
        torch.from_numpy(sentence_vectors(words) + sentence_vectors([word + "s" for word in words])), dim=1
    )
    ends = torch.tensor([(row[a], row[b]) for a, b, _ in found])
    cosine = torch.cat([(vectors[part[:, 0]] * vectors[part[:, 1]]).sum(1) for part in ends.split(50_000)]).tolist()
    return [(a, b) for (a, b, least), value in zip(found, cosine, strict=True) if value >= least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("wordnet", "flickr8k", "coco5k"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, help="where the table goes")
    parser.add_argument("--show", nargs="*", default=[], metavar="WORD", help="print what says these words")
    given = parser.parse_args()
    net, used = WordNet(given.wordnet), caption_words(given.flickr8k, given.coco5k)
    known = {word for word, _ in net.uses_of} | shared_minilm("cpu").words | used.keys()
    table, usual = defaultdict[str, set[str]](set), usual_words(net, used)
    for a, b in close(list(dict.fromkeys(pairs(net, known, used)))):
        if b not in NEVER.get(a, ()) and _stem(a) != _stem(b) and not {a, b} & FUNCTION_WORDS:
            table[b].add(a)
    of_stem = defaultdict[str, set[str]](set)
    for word, own in table.items():
        stems = {_stem(one) for one in own if any(is_form(usual[_stem(one)], other) for other in own)}
        if _stem(word) not in FUNCTION_WORDS and (word in used or is_form(usual[_stem(word)], word)):
            of_stem[_stem(word)] |= stems - FUNCTION_WORDS - {_stem(word)}
    print(len(of_stem), "words,", sum(map(len, of_stem.values())), "others")
    for word in given.show:
        print(f"{word}: {' '.join(sorted(of_stem[_stem(word)]))}")
    if given.out:
        lines = [f' "{word}": "{" ".join(sorted(own))}"' for word, own in sorted(of_stem.items()) if own]
        given.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
