"""How often `sfumato search` suggests another spelling: for right words, and for words with one typing error.

python benchmarks/spelling.py FLICKR8K

The items are 400 photographs of Flickr8k's test split with their captions, or without any. Right words: 200 of at least
three letters that captions of the validation split have three times or more, and 200 that they have at all. Misspelt:
200 words of the items (four letters or more, twice or more) with one letter left out, added, replaced or swapped.
"""

import json
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from string import ascii_lowercase

from sfumato import load
from sfumato.search.texts import known_words, spelling, words_of


def misspelt(word: str, draw: random.Random) -> str:
    """A word with one typing error."""
    i, letter, found = draw.randrange(len(word) - 1), draw.choice(ascii_lowercase), word
    while found == word:
        ways = (word[:i] + word[i + 1 :], word[:i] + letter + word[i:], word[:i] + letter + word[i + 1 :])
        found = draw.choice([*ways, word[:i] + word[i + 1] + word[i] + word[i + 2 :]])
        i, letter = draw.randrange(len(word) - 1), draw.choice(ascii_lowercase)
    return found


def main() -> None:
    images = json.loads((Path(sys.argv[1]) / "dataset_flickr8k.json").read_text("utf-8"))["images"]

    def words(chosen: list[dict[str, list[dict[str, str]]]]) -> Counter[str]:
        return Counter(word for image in chosen for s in image["sentences"] for word in words_of(s["raw"]))

    draw, known = random.Random(0), known_words(load("small").model)
    there = words(draw.sample([image for image in images if image["split"] == "test"], 400))
    others = words([image for image in images if image["split"] == "val"])
    right = {n: draw.sample(sorted(w for w, c in others.items() if c >= n and len(w) > 2), 200) for n in (3, 1)}
    wrong = {
        w: misspelt(w, draw) for w in draw.sample(sorted(w for w, c in there.items() if c > 1 and len(w) > 3), 200)
    }
    for name, items in (("with captions", there), ("without", Counter[str]())):
        for n, some in right.items():
            false = [(w, found) for w in some if (found := spelling(w, partial(Counter, items), known))]
            print(f"{name}: {len(false)} of {len(some)} words that occur {n} times: {false[:8]}")
        said = [(w, spelling(typed, partial(Counter, items), known)) for w, typed in wrong.items()]
        hits, others_ = sum(w == s for w, s in said), sum(s is not None and w != s for w, s in said)
        print(f"{name}: of {len(wrong)} misspelt words {hits} are found, {others_} are taken for others")


if __name__ == "__main__":
    main()
