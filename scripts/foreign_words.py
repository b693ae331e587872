"""Make the table of words of other languages that no English text has (src/sfumato/search/foreign.json).

python scripts/foreign_words.py CLDR STOPS WORDNET FLICKR8K

CLDR is the folder annotations of Unicode's CLDR (Debian: unicode-cldr-core), STOPS that of Snowball's lists of stop
words (Debian: postgresql, tsearch_data), WORDNET that of WordNet's files (Debian: wordnet-base); FLICKR8K holds
dataset_flickr8k.json. The words are those that name emoji, and stop words. Words that WordNet has, or two captions,
are English, and those of four languages, such as "selfie", are everybody's.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from sfumato.search.languages import words_of

LANGUAGES = {"German": "de", "French": "fr", "Spanish": "es", "Italian": "it", "Portuguese": "pt", "Dutch": "nl"}
LANGUAGES |= {"Swedish": "sv", "Polish": "pl", "Turkish": "tr"}
TARGET = Path(__file__).resolve().parents[1] / "src" / "sfumato" / "search" / "foreign.json"


def english_words(wordnet: Path, stops: Path, flickr8k: Path) -> set[str]:
    """The words that are English."""
    known = set((stops / "english.stop").read_text("utf-8").split())
    for part in ("noun", "verb", "adj", "adv"):
        for line in (wordnet / f"index.{part}").read_text("utf-8").splitlines():
            known |= set(line.split()[0].split("_")) if not line.startswith("  ") else set()
        known |= set((wordnet / f"{part}.exc").read_text("utf-8").split())
    images = json.loads((flickr8k / "dataset_flickr8k.json").read_text("utf-8"))["images"]
    used = Counter(word for image in images for one in image["sentences"] for word in words_of(one["raw"]))
    return known | {word for word, n in used.items() if n > 1}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cldr", "stops", "wordnet", "flickr8k"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    english, table = english_words(given.wordnet, given.stops, given.flickr8k), dict[str, set[str]]()
    for language, code in LANGUAGES.items():
        notes = ElementTree.parse(given.cldr / f"{code}.xml").iter("annotation")
        texts = [note.text or "" for note in notes]
        if (file := given.stops / f"{language.lower()}.stop").is_file():
            texts.append(file.read_text("utf-8"))
        words = {word for word in words_of(" ".join(texts)) if len(word) > 1 and word not in english}
        table[language] = {word for word in words if not (word.endswith("s") and word[:-1] in english)}
    shared = {word for word, n in Counter(word for words in table.values() for word in words).items() if n > 3}
    lines = [f' "{language}": "{" ".join(sorted(words - shared))}"' for language, words in table.items()]
    print(", ".join(f"{language} {len(words - shared)}" for language, words in table.items()))
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
