"""What is said beside the hits of words that people type, through the collection that `sfumato index --data` makes.

    python benchmarks/people.py FLICKR8K [--split test] [--json FILE]

FLICKR8K as for own_folder.py. Three draws of 400 photographs; all, some or none of them have four captions. A
photograph fits a word if its five captions have it, a word for the same thing or a kind of it ("poodle" for "dog").
Words: those of own_folder.WORDS that a photograph of the draw fits. Absent: things that none fits. Odd: other
languages, misspelt words and names. Added: 40 more photographs without texts beside the 400 with captions; the query is
a caption, and right is its own photograph.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from own_folder import DRAWS, WORDS, Split, split_arguments
from scipy.stats import spearmanr

from sfumato.search.answer import LINE, Answer, QueryInfo
from sfumato.search.collection import GaussianCollection
from sfumato.search.texts import says, word_stems

THINGS = [
    "kangaroo", "spreadsheet", "airplane cockpit", "cat sleeping on a sofa", "pizza", "helicopter", "elephant",
    "giraffe", "laptop", "wedding cake", "chess board", "piano", "submarine", "volcano", "cactus", "penguin", "zebra",
    "toothbrush", "microscope", "rocket", "lighthouse", "windmill", "tractor in a field", "stained glass window",
    "x-ray", "passport", "washing machine", "octopus", "owl", "castle", "pumpkin", "aquarium", "violin",
    "traffic light", "hospital bed", "bowl of soup", "Christmas tree", "tulips", "bookshelf", "dentist",
    "newborn twins", "sushi", "world map", "fireworks over a city", "northern lights",
]  # fmt: skip

ODD = {
    "other languages": ["perro", "Fahrrad", "neige", "собака", "犬", "ragazza che corre", "Hund im Schnee"],
    "misspelt": ["bycicle", "swiming", "skatebord", "montain", "childern", "snwo"],
    "names": ["Barack Obama", "Eiffel Tower", "Uncle Tom", "Golden Gate Bridge", "Lionel Messi", "Berlin"],
}


def search(data: Split, gallery: GaussianCollection, queries: list[str]) -> list[Answer]:
    """The answers to texts, as `sfumato search` finds them."""
    return gallery.search(data.model.embed_texts(queries), 10, about=QueryInfo.of_texts(queries))


def first(answers: list[Answer]) -> dict[str, float]:
    """What is said of first hits, and how often that nothing fits."""
    said = np.array([answer.best_probability for answer in answers])
    nothing = [answer.verdict is not None and answer.verdict.kind == "nothing" for answer in answers]
    return {"said": float(said.mean()), "one half": float((said >= 0.5).mean()), "nothing": float(np.mean(nothing))}


def words(answers: list[Answer], fitting: Sequence[set[str]]) -> dict[str, float]:
    """The same beside what is right, and the expected numbers of matches beside those of mentions."""
    expected = np.array([answer.expected_matches for answer in answers], float)
    sure = np.array([answer.best_probability >= LINE for answer in answers])
    true, p, y = np.array([len(found) for found in fitting]), list[float](), list[bool]()
    for answer, found in zip(answers, fitting, strict=True):
        p += [hit.match_probability for hit in answer]
        y += [hit.id in found for hit in answer]
    return first(answers) | {
        "right": float(np.mean([answer[0].id in found for answer, found in zip(answers, fitting, strict=True)])),
        "1 to 10 said": float(np.mean(p)),
        "1 to 10 right": float(np.mean(y)),
        "expected / true": float(np.median(expected / true)),
        "within a factor of 2": float(np.mean(((expected > true / 2 - 0.5) & (expected < 2 * true + 0.5))[sure])),
        "spearman": float(spearmanr(expected, true).statistic),
    }


def of_draw(data: Split, folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """The figures of one draw."""
    drawn = random.Random(seed).sample(range(len(data.files)), 440)
    own, new, result = drawn[:400], drawn[400:], dict[str, dict[str, float]]()
    stems = {i: set[str]().union(*data.stems[i]) for i in drawn}
    by_word = {word: {str(i) for i in own if says(stems[i], word_stems(word))} for word in (*WORDS, *THINGS)}
    known = [word for word in WORDS if by_word[word]]
    absent = [thing for thing in THINGS if not by_word[thing]]
    parts = {"with captions": 1, "without captions": 0, "a tenth": 0.1, "a fifth": 0.2, "three tenths": 0.3}
    for name, fraction in parts.items():
        captioned = set(random.Random(1).sample(own, round(400 * fraction)))
        with data.collection(folder / f"{seed} {name}", own, captioned) as gallery:
            found = search(data, gallery, known)
            result[f"words {name}"] = words(found, [by_word[word] for word in known]) | {"n": len(known)}
            result[f"absent {name}"] = first(search(data, gallery, absent)) | {"n": len(absent)}
            for kind, queries in ODD.items():
                result[f"{kind} {name}"] = first(search(data, gallery, queries))
    with data.collection(folder / f"{seed} added", drawn, set(own)) as gallery:
        found = search(data, gallery, data.fifth(new))
        result["40 added without captions"] = first(found) | {
            "right": float(np.mean([int(answer[0].id) == i for answer, i in zip(found, new, strict=True)]))
        }
        found = search(data, gallery, data.fifth(own))
        result["the 400 beside them"] = first(found) | {
            "right": float(np.mean([int(answer[0].id) == i for answer, i in zip(found, own, strict=True)]))
        }
    return result


def main() -> None:
    given = split_arguments(__doc__)
    data = Split(given.flickr8k, given.split)
    with tempfile.TemporaryDirectory() as folder:
        draws = [of_draw(data, Path(folder), seed) for seed in range(DRAWS)]
    result: dict[str, Any] = {}
    for name, keys in draws[0].items():
        values = {key: [draw[name][key] for draw in draws] for key in keys}
        result[name] = {key: [float(f(own)) for f in (np.mean, np.std)] for key, own in values.items()}
        shown = "  ".join(f"{key} {mean:.3f} ± {deviation:.3f}" for key, (mean, deviation) in result[name].items())
        print(f"{name:34s}", shown)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
