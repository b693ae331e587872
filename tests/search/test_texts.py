"""Texts of items as evidence: the order and the probabilities against loops, and that both stores stay in step."""

import functools
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import snowballstemmer
from support.raising import raises

import sfumato
from sfumato import Calibration, GaussianCollection, GaussianEmbedding, QueryScores, csd_matrix
from sfumato.calibration import fits
from sfumato.calibration.fits import FitsCalibration
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.errors import UserError
from sfumato.search import languages
from sfumato.search import texts as searches
from sfumato.search.answer import QueryInfo, SearchOptions, TextQuery
from sfumato.search.index import copy_gallery
from sfumato.search.languages import date_words, known_words, split_facts
from sfumato.search.searcher import advice
from sfumato.search.stores.protocol import WORDS, Filter, Records
from sfumato.search.texts import (
    are_together,
    is_close,
    item_texts,
    item_words,
    saying,
    spelling,
    text_vectors,
    word_stems,
)

THINGS = ("dog", "snow", "bicycle", "running children", "a red car in the street", "harbour at night", "cake", "tent")
OTHERS = {"anim": {"dog"}, "vehicl": {"bicycl", "car"}}
"""By stem, those of THINGS that say it, too."""

says = lambda stems, wanted: not (OTHERS.get(wanted, set()) | {wanted}).isdisjoint(stems)


def gaussians(n, seed):
    mean, noise = np.random.default_rng(seed).standard_normal((2, n, 7), np.float32)
    return GaussianEmbedding(mean, noise - 3)


def payloads(n):
    found = []
    for i in range(n):
        own = {"captions": f"a photo of a {THINGS[i % 8]}\nseen on day {i}"} if i % 3 else {}
        own |= {"tags": "holiday\nbeach", "title": "At the sea"} if i % 5 == 1 else {}
        own |= {"name": "harbour"} if i % 7 == 0 else {}
        found.append(own | {"date": f"2024-{i % 12 + 1:02}"})
    return found


@pytest.fixture
def made(tmp_path):
    n, gallery, queries = 60, gaussians(60, 0), gaussians(200, 1)
    distance = csd_matrix(queries, gallery)
    match = np.eye(n, dtype=int)[distance.argmin(1)]
    calibration = Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))
    with GaussianCollection.create(tmp_path / "c", d=7, calibration=calibration, texts=True) as collection:
        collection.upsert(gallery, [f"{i:02}.jpg" for i in range(n)], payloads=payloads(n))
        yield collection, gallery


def asked(collection, *texts, k=9, **options):
    return collection.search(gaussians(len(texts), 5), k, SearchOptions(**options), QueryInfo.of_texts(texts))


def linear(of, logit, values):
    inside = [min(max(v, low), high) for v, low, high in zip(values, of["low"], of["high"], strict=True)]
    return of["slope"] * logit + of["intercept"] + sum(w * v for w, v in zip(of["weights"], inside, strict=True))


def close(stems, payload):
    """Whether a line says all stems, with at most three words between the first and the last beside them."""
    for line in item_words(payload).split("\n"):
        order = [word_stems(word)[0] for word in re.findall(r"\w+", line.lower())]
        for i in range(len(order)):
            if all(says(order[i : i + len(stems) + 3], stem) for stem in stems):
                return True
    return False


@functools.cache
def vectors_by_text():
    every = [text for payload in payloads(60) for text in item_texts(payload)] + [*ASKED, "a photo day", "dog", "snow"]
    return dict(zip(every, text_vectors([{"title": text} for text in every]), strict=True))


def by_loops(collection, gallery, query, text, neutral=False, own=None):
    """Items with logits of the pairs, those of the hits, the best first, and that of nothing: the guide's formulas."""
    vector, own, n_words = vectors_by_text()[text], own or payloads(gallery.n), len(word_stems(text))
    constants = FitsCalibration.packaged().to_json()
    of = constants["lengths"][min(n_words, 3) - 1]
    prior = sum(w * float(v) for w, v in zip(constants["prior"][:-1], vector, strict=True)) + constants["prior"][-1]
    all_stems = [set(word_stems(item_words(payload))) for payload in own]
    weight = {s: math.log((len(own) + 1) / (sum(says(has, s) for has in all_stems) + 0.5)) for s in word_stems(text)}
    images, pairs = collection.scorer.pair_logit(csd_matrix(query, gallery)[0], 1_000).tolist(), []
    for i, payload in enumerate(own):
        image = sum(images) / len(images) if neutral else images[i]
        words = sum(w for s, w in weight.items() if says(all_stems[i], s)) / sum(weight.values())
        missing = max((w for s, w in weight.items() if not says(all_stems[i], s)), default=0)
        if texts := item_texts(payload):
            mean = np.stack([vectors_by_text()[one] for one in texts]).mean(0)
            length = math.sqrt((1 + 0.6 * (len(texts) - 1)) / len(texts) / (1 + 0.6 * 3) * 4)  # As of four texts.
            cosine, few = float(vector @ mean / np.linalg.norm(mean)) * length, missing / len(texts)
            values = (cosine, words, float(close(weight, payload)), missing, few, 1 / n_words, prior)
            pairs.append(linear(of["pair_with"], image, values))
        else:
            names = of["pair_with"]["weights"][1] * words / 2
            pairs.append(linear(of["pair_without"], image, (1 / n_words, prior)) + names)
    best = sorted(pairs, reverse=True)[:50]
    expected = math.log(sum(1 / (1 + math.exp(-z)) for z in best))
    listed = (min(best[0] - best[1], 5), expected, 1 / n_words, prior)
    small = collection.metadata.get("run") == "small"
    file = Path(fits.__file__).parent / "captions.npy" if small else collection.folder / fits.KNOWN_TEXTS
    rows = np.load(file).astype(float) if file.exists() else np.eye(384)
    near = sum(sorted(rows @ vector / np.linalg.norm(rows, axis=1))[-5:]) / 5
    bare = "hit_bare" if file.exists() else "hit_without"
    kinds = ["hit_with" if item_texts(payload) else bare for payload in own]
    read = {"hit_bare": (best[0], *listed, near)}
    hits = [linear(of[kind], z, read.get(kind, (best[0], *listed))) for kind, z in zip(kinds, pairs, strict=True)]
    found = sorted((-z, f"{i:02}.jpg") for i, z in enumerate(hits))
    return pairs, [(1 / (1 + math.exp(z)), i) for z, i in found], linear(of["nothing"], -best[0], listed)


ASKED = ["a dog", "vehicles in snow", "zebra", "a cat and an animal on a sofa"]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("model", ["", "small", "trained"])
@pytest.mark.parametrize("text", ASKED)
def test_order_and_probabilities_are_those_of_the_formula(made, text, model, bare):
    collection, gallery = made
    own = [payload if not bare or i == 1 else {"date": "2024"} for i, payload in enumerate(payloads(60))]
    if model == "trained":
        vectors = sentence_vectors(["two cats", "a dog in snow", "a tent", "the sea", "an old car", "a sofa"])
        np.save(collection.folder / fits.KNOWN_TEXTS, fits.in_bytes(vectors))
    if model == "small":
        collection.keep({"run": "small"})
    collection.upsert(gallery, [f"{i:02}.jpg" for i in range(60)], payloads=own)
    query, (answer,) = gaussians(1, 5), asked(collection, text, k=20)
    _, expected, nothing = by_loops(collection, gallery, query, text, own=own)
    assert answer.target == "fits" and [hit.id for hit in answer] == [i for _, i in expected[:20]]
    assert [hit.match_probability for hit in answer] == pytest.approx([p for p, _ in expected[:20]], rel=2e-4)
    assert answer.expected_matches == pytest.approx(sum(p for p, _ in expected), rel=2e-4)
    assert answer.nothing_probability == pytest.approx(
        min(1 / (1 + math.exp(-nothing)), 1 - answer.best_probability), rel=2e-4
    )
    constants = FitsCalibration.packaged().to_json()["lengths"][min(len(word_stems(text)), 3) - 1]
    images = collection.scorer.pair_logit(csd_matrix(query, gallery)[0], 1_000).tolist()
    for hit in answer:  # Why: the parts add up, and the image has what the two formulas give it.
        p, has = hit.match_probability, bool(item_texts(hit.payload))
        assert sum(hit.why.values()) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
        slope = constants["pair_with" if has else "pair_without"]["slope"]
        slope *= constants["hit_with" if has else "hit_bare" if model else "hit_without"]["slope"]
        assert hit.why["image"] == pytest.approx(slope * images[int(hit.id[:2])], rel=1e-4)
        assert bool(hit.why["texts"]) is has
    assert [h.distance for h in answer] == pytest.approx(
        [csd_matrix(query, gallery[int(h.id[:2]) : int(h.id[:2]) + 1]).item() for h in answer], rel=1e-4
    )


@pytest.mark.parametrize("large", [False, True])
def test_the_closest_items_have_the_same_probabilities(made, large):
    collection, gallery = made
    if large:
        collection.n_exact, collection.n_sample = 55, 40
    fits, closest = (asked(collection, "a dog", k=60, order=order)[0] for order in ("fits", "distance"))
    nearest = csd_matrix(gaussians(1, 5), gallery)[0].argsort().tolist()
    assert [hit.id for hit in closest][:50] == [f"{i:02}.jpg" for i in nearest[:50]]
    assert [hit.id for hit in fits] != [hit.id for hit in closest]
    assert {h.id: h.match_probability for h in fits} == {h.id: h.match_probability for h in closest}
    assert fits.nothing_probability == closest.nothing_probability and fits.expected_matches == closest.expected_matches
    assert closest.target == "fits" and [hit.rank for hit in closest] == list(range(1, len(closest) + 1))


def test_items_whose_texts_fit_an_unwanted_text_fall_back(made):
    collection, gallery = made
    query, text_query = gaussians(1, 5), TextQuery("a photo", ("day",), ("dog", "snow"))
    (answer,) = collection.search(query, 60, about=[QueryInfo(text_query.name, text_query, native=False)])
    wanted = {i: p for p, i in by_loops(collection, gallery, query, "a photo day")[1]}
    for text in text_query.without:
        pairs = by_loops(collection, gallery, query, text, neutral=True)[0]
        for i, payload in enumerate(payloads(60)):
            wanted[f"{i:02}.jpg"] *= 1 / (1 + math.exp(pairs[i])) if item_texts(payload) else 1
    assert [hit.match_probability for hit in answer] == pytest.approx([wanted[hit.id] for hit in answer], rel=2e-3)
    assert [hit.id for hit in answer] == sorted(wanted, key=lambda i: (-wanted[i], i))
    assert not answer.calibrated and answer.nothing_probability is None


def test_queries_without_a_text_go_by_distance_and_the_stores_stay_in_step(made, tmp_path):
    (collection, gallery), queries = made, gaussians(2, 5)
    mixed = collection.search(queries, 5, about=[*QueryInfo.of_texts(["a dog"]), QueryInfo("an image")])
    plain = collection.search(queries, 5)
    assert [a.target for a in mixed] == ["fits", "listed"] and mixed[1].hits == plain[1].hits
    assert asked(collection, "a dog", "tent", k=5, coverage=0.9)[0].target == "listed"
    assert mixed[0][0].best_text and "best_text" not in plain[0].to_json()["hits"][0]
    with_texts = sum(bool(item_texts(payload)) for payload in payloads(60))
    assert collection.texts.store.count() == with_texts
    collection.upsert(gallery[1:2], ["01.jpg"], payloads=[{}])  # Its texts are gone.
    assert collection.delete(["02.jpg", "none"]) == 1 and collection.texts.store.count() == with_texts - 2
    (filtered,) = asked(collection, "dog", k=60, filter=Filter({"date": ("2024-03",)}))
    assert {hit.payload["date"] for hit in filtered} == {"2024-03"} and filtered.target == "fits"
    with copy_gallery(collection, tmp_path / "copy") as copied:
        assert copied.texts.store.count() == with_texts - 2
        ((a,), (b,)) = (asked(one, "cake") for one in (copied, collection))
        assert a.hits == b.hits
    collection.close()
    with GaussianCollection.open(tmp_path / "c") as opened:
        assert asked(opened, "cake")[0].hits == b.hits


@pytest.mark.parametrize("target", ["fits", "listed"])
@pytest.mark.parametrize("large", [False, True])
def test_a_filter_takes_items_away_and_changes_no_probability(made, target, large):
    collection, dates = made[0], [f"2024-{m + 1:02}" for m in range(12)]
    collection.n_exact, collection.n_sample = (10, 50) if large else (300, 20_000)
    answers = lambda **how: asked(collection, "dog", "harbour at night", "a tent", "zebra", k=60, target=target, **how)
    for left in (dates, dates[3:4], random.Random(1).sample(dates, 5), dates[::2]):
        for one, some in zip(answers(), answers(filter=Filter({"date": left})), strict=True):
            said = {hit.id: hit.match_probability for hit in one if hit.payload["date"] in left}
            found = {hit.id: hit.match_probability for hit in some if not large or hit.id in said}
            assert found == pytest.approx({i: said[i] for i in found}, rel=1e-6)
            assert large or list(found) == list(said)
            assert large or some.expected_matches == pytest.approx(sum(said.values()), rel=1e-3)
            before, nothing = (each.nothing_probability or 0.0 for each in (one, some))
            assert nothing >= before
            if left is dates:
                assert nothing == pytest.approx(before, rel=1e-6, abs=0)
                assert some.verdict == one.verdict and some.expected_matches == pytest.approx(one.expected_matches)


def test_what_another_process_has_changed_is_found(made, tmp_path):
    collection, _ = made
    collection.close()
    with GaussianCollection.open(tmp_path / "c") as reader, GaussianCollection.open(tmp_path / "c") as writer:
        assert asked(reader, "lighthouse", k=1)[0][0].id != "new.jpg"
        writer.rename("05.jpg", "new.jpg", {"captions": "a lighthouse"})
        object.__setattr__(reader._sampler._last, "good_until", 0)  # Some seconds later.
        (hit,) = asked(reader, "lighthouse", k=1)[0]
        assert hit.id == "new.jpg" and writer.get(["05.jpg"]).ids == ()
        writer.keep({"a": 1})
        reader.keep(lambda now: {"b": now["a"] + 1})
        assert reader.metadata["a"] == 1 and reader.metadata["b"] == 2


@pytest.mark.parametrize("typed, plain", [
    ("cafe\u0301", "caf\u00e9"), ("kit\u200bchen", "kitchen"), ("\uff4b\uff49\uff54", "kit"), ("2 dogs", "two dogs"),
    ("10 cats", "ten cats"), ("in 2024", "in 2024"), ("at 2:30", "at 2:30"), ("12 dogs", "12 dogs"),
    ("\ufb01sh", "fish"),
])  # fmt: skip
def test_one_text_in_several_forms(typed, plain):
    assert TextQuery(typed).parts == TextQuery(plain).parts == (plain,)
    assert word_stems(typed) == word_stems(plain) and is_close(word_stems(plain), f"a photo of {typed}")


@pytest.mark.parametrize("text", ["?", "!!!", "\u200b", "\U0001f418"])
@pytest.mark.parametrize("place", ["text", "also", "without"])
def test_a_text_without_words_is_refused(text, place):
    parts = {"text": "a dog"} | {place: text if place == "text" else (text,)}
    raises(UserError, "a text to search for has no words: ", TextQuery, **parts)


def test_words_have_stems_and_kinds_in_every_thread():
    assert word_stems("The dogs are running") == word_stems("a dog runs") == ["dog", "run"]
    assert word_stems("to the") == ["to", "the"] and word_stems("...") == []
    hat = word_stems("red hat")
    lines = {"a red hat": True, "a hat that is red": True, "hat and a blue and red coat": False, "a red coat": False}
    assert {line: is_close(hat, line) for line in lines} == lines and is_close(["dog"], "Dogs!")
    tags = ["Birthday", "Grand Rapids", "cake", "a red car at a restaurant"]
    assert are_together(["birthday", "cake"], tags) and not are_together(["red", "cake"], tags)
    said = {"animal": "poodle", "dog": "puppies", "bicycle": "bikes", "women": "woman", "people": "boy"}
    assert all(saying(word_stems(word)[0]) >= set(word_stems(text)) for word, text in said.items())
    not_said = {"poodle": "dog", "woman": "girl", "animal": "cricket", "fruit": "orange", "dog": "cat", "two": "three"}
    assert not any(saying(word_stems(word)[0]) & set(word_stems(text)) for word, text in not_said.items())
    assert is_close(["two", "anim"], "Two poodles") and not is_close(["two", "anim"], "three poodles")
    assert is_close(["two", "women"], "two young women") and not is_close(["two", "women"], "a woman behind two dogs")
    generator = random.Random(0)
    words = ["".join(generator.choices("aeinrstgly", k=generator.randint(3, 9))) + "ing" for _ in range(4_000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(word_stems, words))
    one = snowballstemmer.stemmer("english")
    assert found == [[one.stemWord(word)] for word in words]


@pytest.mark.parametrize("typed, expected", [
    ("a red bycicle", "a red bicycle"), ("wagging tale", None), ("xqzvw 12345 бишка", None),
    ("Bicylce and DGO", "bicycle and DGO"),  # Three letters: left alone.
    ("bicycles", None),  # The same stem.
    ("a bicycle at the harbor", None),  # The model knows it.
    ("harbur", "harbour"),  # A word of the items before one of the model.
    ("lettr", "letter"),  # No item has it.
    ("htunedr or wettler", "thunder or wettler"),  # Two edits of the same letters; of others they are too many.
])  # fmt: skip
def test_misspelt_words(typed, expected):
    there = {"bicycle": 3, "red": 5, "harbour": 2, "and": 9, "dog": 4}
    known = frozenset({"harbor", "letter", "wagging", "tale", "thunder", "settled"})
    assert spelling(typed, lambda: there, known) == expected
    assert spelling(typed, lambda: there, frozenset()) is None  # Of a model that does not show its words.


def test_a_later_search_makes_no_table_again(made, monkeypatch):
    model, texts = sfumato.load("small").model, ("ein grosser Hund", "a bycicle near the harbour")

    def search(text):
        return advice(TextQuery(text), made[0], model), asked(made[0], text)

    before = [search(text) for text in texts]
    for module in (fits, searches, languages):
        monkeypatch.setattr(module, "files", None)
    assert known_words(model) is known_words(model) and "harbour" in known_words(model)
    assert [search(text)[0] for text in texts] == [told for told, _ in before]


@pytest.mark.parametrize("typed", ["IMG_1039", "1039", "img_1039.jpg", "IMG 1039"])
def test_the_number_in_the_name_of_a_file_finds_it(made, typed):
    collection, gallery = made
    own = [payload | {"file": f"IMG 10{i} jpg"} for i, payload in enumerate(payloads(60))]
    collection.upsert(gallery, [f"{i:02}.jpg" for i in range(60)], payloads=own)
    answer, of_all = (asked(collection, text)[0] for text in (typed, "img"))
    assert answer[0].id == "39.jpg" and answer[0].match_probability > 0.5 > answer[1].match_probability
    assert not any(hit.why["texts"] > 0 for hit in of_all)  # What all names have says nothing.


SCENES = ("a dog in the snow", "a cake on a table", "children run over a meadow", "a red car in the street")
RARE = "\n".join((*SCENES[1:], "the tin box of the Ostrakavelli"))


def test_a_rare_word_is_found_in_a_large_gallery(tmp_path, monkeypatch):
    n = 120
    mean = np.random.default_rng(0).standard_normal((n, 7))
    mean[77] = 1.5  # Farther from the query than nearly all.
    items = GaussianEmbedding(mean, np.full((n, 7), -3.0))
    payloads = [{"captions": f"{SCENES[i % 4]}\na photo of day {i}", "date": f"20{i % 3}"} for i in range(n)]
    payloads[8:78:2] = [{"captions": "the Ostrakaveli", "date": "202"}] * 35  # Sounds nearer than the captions.
    payloads[77] = {"captions": RARE, "date": "202"}
    query = GaussianEmbedding(np.zeros((1, 7)), np.full((1, 7), -3.0))

    def first(collection, **options):
        collection.n_exact, collection.n_sample = 10, 50
        (answer,) = collection.search(query, 3, SearchOptions(**options), QueryInfo.of_texts(["the Ostrakavelli"]))
        return answer[0].id

    with GaussianCollection.create(tmp_path / "made", d=7, texts=True) as made:
        made.upsert(items, [f"{i:03}" for i in range(n)], payloads=payloads)
        assert first(made) == first(made, filter=Filter({"date": ("202",)})) == "077"
        assert first(made, filter=Filter({"date": ("200", "201")})) != "077"
        with monkeypatch.context() as patch:
            patch.setattr(type(made.texts.store), "match_words", lambda *_: [])
            assert first(made) != "077"
        stored = made.texts.store.get(["077"])
        assert "ostrakavelli" in stored.payloads[0][WORDS].split() and WORDS not in made.get(["077"]).payloads[0]
        old = ({"date": "202"},)  # As stores of earlier versions have it.
        made.texts.store.upsert(Records(stored.ids, stored.vectors, stored.uncertainty, old))
        assert first(made) != "077"
        with copy_gallery(made, tmp_path / "copy") as copied:
            assert first(copied) == "077"
            copied.rename("077", "new", payloads[77])
            assert first(copied) == "new"
            copied.delete(["new"])
            assert first(copied) not in ("new", "077")


@pytest.mark.parametrize("date, words", [
    ("2023-12-25T10:00:00", "2023 winter december monday christmas"), ("", ""), ("2019", "2019"),
    ("2023-12-27", "2023 winter december wednesday"),
    ("2024-02", "2024 winter february"), ("2023-03-05", "2023 spring sunday"),
    ("2023-13-45", "2023"), ("0000-00-00", ""), ("in June", ""), ("05-12-2021", ""), ("²", ""), ("20231", ""),
])  # fmt: skip
def test_the_words_of_a_date(date, words):
    assert " ".join(date_words(date)) == words


FACTS = {
    "dog in Rome": ("dog", ["rome"], []), "dog in Zürich 2021": ("dog", ["zurich"], ["2021"]),
    "two dogs, Rome, winter 2021": ("two dogs", ["rome"], ["winter", "2021"]),
    "a girl's dog in Saint Denis": ("a girl's dog", ["saint denis"], []), "dog in the summer": ("dog", [], ["summer"]),
    "2021 in New York with a dog": ("with a dog", ["new york"], ["2021"]),
    "100_2550.JPG from 2021": ("100_2550.JPG", [], ["2021"]),
}  # fmt: skip
PLAIN = (
    *(
        "dog rome", "dog in York", "dog in 2020", "summer dress", "in winter coats", "woman in summer dress",
        "dog in june",
    ),
    *("children at Christmas market", "girl in nice dress", "dog in 2021 or 2022", "2021-05-04 photo", "plate of rome"),
)  # fmt: skip


@pytest.mark.parametrize("text", [*FACTS, *PLAIN])
def test_words_of_time_and_place_are_taken_apart(text):
    places = {"rome", "saint denis", "new york", "zurich", "nice"}
    dates = {"2021", "2022", "summer", "winter", "christmas"}
    assert split_facts(text, places, dates) == FACTS.get(text, (text, [], []))
