"""The demo page of the documentation site: emoji, searched in the browser without a server. `make site` runs this.

    python scripts/demo_page.py [--run runs/demo/run] [--out build/site/demo]

The model is that of `sfumato demo`; it is trained first if the run folder does not exist. The page gets the vectors of
the emoji and of a list of queries in half precision, the words of the emoji, and the constants of the probabilities.
docs/demo has its code; tests/docs/test_demo_page.py compares its answers with those of the library.
"""

import argparse
import base64
import io
import json
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from sfumato.arrays import Array, as_numpy
from sfumato.calibration import fits
from sfumato.demo import RECIPE
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.errors import UserError
from sfumato.ids import NUMBERS, uniform_hash
from sfumato.models.model import Model
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_model
from sfumato.search import answer, candidates, texts
from sfumato.search.answer import TextQuery
from sfumato.search.collection import GaussianCollection
from sfumato.search.searcher import Searcher, advice
from sfumato.training.loop import fit
from sfumato.workflows.index import GalleryPart, create_collection

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PACKAGE = ROOT / "docs" / "demo", ROOT / "src" / "sfumato"
EMOJI = PACKAGE / "data" / "emoji_set"

STYLE = "fluent3d"
"""Drawing style of the emoji on the page; training has the two others."""

LEFT_OUT = ("flags", "component", "symbols")
"""Groups that have more signs than things."""

_VARIANT = re.compile(r"(man|woman|men|women) |.*: ")
COLUMNS, SIZE = 40, 64  # of the sheet of all drawings
MOST_BYTES = 5_000_000
N_NAMES, N_TAGS = 130, 130
_CHAT = ("feels", "ily", "omg", "tale", "whatever", "xoxo")  # tags that nobody searches for

PHRASES = """
animal; cactus; fruit; money; happy; weather; flower; love; dog; tree; blue; flying; anger; sport; sleep; work; music
something to eat; something to drink; something sweet; something red; something round; something that flies
a wild animal; farm animals; animals in the sea; a small animal; a bird that cannot fly; insects and bugs; reptile
musical instrument; string instrument; winter sport; ball game; water sport; martial arts; playing cards; board game
a happy face; a sad face; an angry face; a tired face; crying face; a face with glasses; sick person; feeling cold
a vehicle with two wheels; public transport; emergency vehicle; things in the sky; things at the beach; bad weather
tools; office supplies; kitchen utensils; furniture; clothes for winter; jewellery; shoes; tropical fruit; vegetables
fast food; japanese food; breakfast; birthday party; wedding; halloween; christmas; a place to sleep; time of day
love and hearts; hand gestures; people at work; fairy tale creatures; scientific instruments; money and banking
outer space; plants and trees; flowers; dessert; alcoholic drinks; seafood; buildings; holidays; music; danger
black cat; polar bear; hot dog; red apple; green apple; slice of pizza; birthday cake; palm tree; christmas tree
full moon; shooting star; fire engine; police car; racing car; roller coaster; cup of tea; hot beverage; glass of milk
ear of corn; ice cream; soft ice cream; red heart; broken heart; bullet train; steam locomotive; sailing boat; anchor
alarm clock; light bulb; magnifying glass; musical keyboard; soccer ball; baseball; ice skate; boxing glove; kite
crystal ball; magic wand; playground slide; ferris wheel; teddy bear; wrapped gift; balloon; t-shirt; running shoe
top hat; graduation cap; lipstick; diamond ring; open book; paper clip; pair of scissors; globe; compass; volcano
desert island; snow-capped mountain; rainbow; tornado; umbrella; snowman; droplet; fire; rocket; flying saucer; robot
alien; ghost; pile of poo; skull; clown; cowboy; detective; astronaut; firefighter; teacher; mermaid; vampire; ninja
spreadsheet; quantum physics; tax return; inflation rate; philosophy; photosynthesis; traffic jam; insurance policy
sewing machine; washing machine; refrigerator; lawn mower; parking meter; tectonic plates; kitchen sink; hair dryer
coffee machine; vacuum cleaner; bagpipes; walrus; armadillo; ostrich; giraffe in a zoo; cat sleeping on a sofa
two dogs running; a man with a surfboard; children playing football; a street at night; a person reading a newspaper
"""
"""Queries in words of the author, vague and precise ones, and ones that no emoji shows."""


@dataclass(frozen=True)
class Emoji:
    """An item of the page."""

    id: str  # code points, as in the data set
    title: str
    tags: tuple[str, ...]
    png: bytes

    @property
    def payload(self) -> dict[str, str]:
        """Its texts, as a collection keeps them."""
        return {"title": self.title, "tags": "\n".join(self.tags)}


def choose_items() -> list[Emoji]:
    """The emoji of the page: one drawing style, without signs and without the variants of one person."""
    concepts = json.loads((EMOJI / "concepts.json").read_text("utf-8"))
    with zipfile.ZipFile(EMOJI / "pictures.zip") as archive:
        return [
            Emoji(one["hexcode"], one["label"], tuple(one["tags"]), archive.read(f"{STYLE}/{one['hexcode']}.png"))
            for one in concepts
            if STYLE in one["styles"] and one["group"] not in LEFT_OUT and not _VARIANT.match(one["label"])
        ]


def make_searcher(model: Model, items: Sequence[Emoji], folder: Path) -> Searcher:
    """A collection of the items in a folder, with their names and tags as texts, and its model."""
    embeddings, ids = model.embed_images([one.png for one in items]), [one.id for one in items]
    collection = create_collection(model, GalleryPart(embeddings, ids), folder, texts=True)
    collection.upsert(embeddings, ids, payloads=[one.payload for one in items])
    return Searcher(collection, model.source, lambda: model)


def choose_queries(items: Sequence[Emoji], searcher: Searcher) -> list[str]:
    """The queries of the page, in the order of the alphabet: phrases, frequent tags, and names drawn by a hash.

    A query that the library would correct or warn of is left out.
    """
    phrases = [phrase.strip() for phrase in PHRASES.replace("\n", ";").split(";") if phrase.strip()]
    tags = Counter(tag for one in items for tag in one.tags if tag.isalpha() and len(tag) > 2 and tag not in _CHAT)
    names = [one.title.lower() for one in sorted(items, key=lambda one: uniform_hash(one.id))]
    chosen = {*phrases, *(tag for tag, _ in tags.most_common(N_TAGS)), *names[:N_NAMES]}
    model = searcher.model.model
    return [one for one in sorted(chosen) if not any(advice(TextQuery(one), searcher.gallery, model).values())]


def half(vectors: Array) -> str:
    """(n, d) vectors in half precision, the low byte first, as base64."""
    return base64.b64encode(as_numpy(vectors).astype("<f2").tobytes()).decode()


def page_data(searcher: Searcher, items: Sequence[Emoji], queries: Sequence[str]) -> dict[str, Any]:
    """What the page searches with: vectors, words, and the constants of the probabilities. No answer is in it."""
    collection, scorer = searcher.gallery, searcher.gallery.scorer
    if collection.distance != "squared_l2" or scorer.calibration is None:
        raise UserError("the demo page needs a model with squared_l2 and a calibration, as that of sfumato demo")
    assert isinstance(collection, GaussianCollection) and collection.texts is not None
    ids, payloads = [one.id for one in items], [one.payload for one in items]
    stored = collection.get(ids)
    row = {id: j for j, id in enumerate(stored.ids)}
    query, own = searcher.model.embed_texts(list(queries)), collection.texts.of(ids, payloads)
    return {
        "items": [[one.id, one.title, ", ".join(one.tags)] for one in items],
        "queries": list(queries),
        "vectors": {
            "items": half(stored.embeddings.mean[[row[id] for id in ids]]),
            "texts": half(own.vectors),
            "queries": half(query.mean),
            "sentences": half(sentence_vectors(queries)),
        },
        "lengths": own.lengths.tolist(),
        "few": own.few.tolist(),
        **word_data(payloads, queries),
        "logit": {
            "scale": scorer.logit_scale,
            "bias": scorer.logit_bias + scorer.prior_shift(candidates.REFERENCE_SIZE),
        },
        "fits": collection.fits.to_json(),
        "constants": {
            "near": fits.N_NEAR,
            "maxGap": fits._MAX_GAP,
            "rarest": texts._RAREST,
            "close": texts._CLOSE,
            "numbers": sorted(NUMBERS[1:]),
            "many": answer.MANY,
            "few": answer._FEW,
            "line": answer.LINE,
            "clear": answer._CLEAR,
            "unsure": answer._UNSURE,
        },
        "columns": COLUMNS,
    }


def word_data(payloads: Sequence[dict[str, str]], queries: Sequence[str]) -> dict[str, Any]:
    """The stems of the items' words, by number, and which of them say the stems of the queries."""
    number: dict[str, int] = {}

    def numbers(stems: Sequence[str]) -> list[int]:
        return [number.setdefault(stem, len(number)) for stem in stems]

    lines = [
        [numbers([texts._stem(word) for word in texts._tokens(line)]) for line in text.split("\n")]
        for text in map(texts.item_words, payloads)
    ]
    written = [texts.item_words(payload).split("\n") for payload in payloads]
    short = [" ".join(line for line in own if len(line.split()) <= texts._LABEL) for own in written]
    labels = [numbers(texts.word_stems(text)) for text in short]
    own = [numbers(texts.word_stems(texts.item_words(payload))) for payload in payloads]
    asked = [texts.word_stems(query) for query in queries]
    saying = {stem: sorted(number[s] for s in texts.saying(stem) if s in number) for own in asked for stem in own}
    return {"stems": list(number), "lines": lines, "labels": labels, "own": own, "asked": asked, "saying": saying}


def sheet(items: Sequence[Emoji]) -> bytes:
    """All drawings in one WebP image, row by row."""
    image = Image.new("RGB", (SIZE * COLUMNS, SIZE * -(-len(items) // COLUMNS)), "white")
    for i, one in enumerate(items):
        with Image.open(io.BytesIO(one.png)) as drawing:
            image.paste(drawing.convert("RGB"), (SIZE * (i % COLUMNS), SIZE * (i // COLUMNS)))
    found = io.BytesIO()
    image.save(found, "webp", quality=80, method=6)
    return found.getvalue()


def script() -> str:
    """The page's code and the part of the service's page that it uses, as one script: modules need a server."""
    shared = (PACKAGE / "serve" / "page" / "words.js").read_text("utf-8")
    own = (SOURCE / "demo.js").read_text("utf-8")
    joined = re.sub(r"^export ", "", shared, flags=re.MULTILINE) + re.sub(r"^import .*$", "", own, flags=re.MULTILINE)
    return f"(() => {{\n{joined}}})();\n"


def write_page(searcher: Searcher, items: Sequence[Emoji], out: Path) -> int:
    """Write all files of the page. Returns their bytes."""
    queries = choose_queries(items, searcher)
    data = json.dumps(page_data(searcher, items, queries), separators=(",", ":"), ensure_ascii=False)
    licences = [EMOJI / "licences" / name for name in ("FluentEmoji-MIT.txt", "Unicode-3.0.txt", "emojibase-MIT.txt")]
    licences.append(PACKAGE / "search" / "licences" / "WordNet-3.0.txt")
    files = {
        "index.html": (SOURCE / "index.html").read_bytes(),
        "demo.css": (SOURCE / "demo.css").read_bytes(),
        "page.css": (PACKAGE / "serve" / "page" / "page.css").read_bytes(),
        "demo.js": script().encode(),
        "data.js": f"window.DATA={data};\n".encode(),
        "emoji.webp": sheet(items),
        "licences.txt": "\n\n".join(f"{one.stem}\n\n{one.read_text('utf-8')}" for one in licences).encode(),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        raise UserError(f"the demo page has {size:,} bytes, more than {MOST_BYTES:,}: leave out items or queries")
    print(f"{len(items)} emoji, {len(queries)} queries, {size / 1e6:.1f} MB: open {out / 'index.html'} in a browser")
    return size


def main() -> None:
    """Train the model if there is none, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo/run"), help="a run of the recipe of sfumato demo")
    parser.add_argument("--out", type=Path, default=Path("build/site/demo"), help="folder of the page")
    given = parser.parse_args()
    if not (given.run / "calibration.json").exists():
        print(f"Training the model of the demo page into {given.run}, about a minute")
        fit(load_recipe(find_recipe(RECIPE), []), given.run)
    items = choose_items()
    with (
        tempfile.TemporaryDirectory() as folder,
        make_searcher(load_model(str(given.run)), items, Path(folder) / "collection") as searcher,
    ):
        write_page(searcher, items, given.out)


if __name__ == "__main__":
    main()
