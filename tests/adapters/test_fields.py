"""What documents of every framework say, and the choice among calibrated hits; without any of the frameworks."""

import importlib
from importlib.util import find_spec

import pytest

from sfumato import ScoreCalibrator
from sfumato.adapters import calibrated, fields_of, text_of
from sfumato.errors import UserError
from sfumato.search.answer import Answer, Hit, Verdict

HIT = Hit("a", 1, 0.5, 0.8, 0.1, {"path": "a.png", "label": "one", "id": "other", "_text": "hidden"})
ANSWER = Answer("q", "csd", True, 0.1, (HIT,), verdict=Verdict("clear", "One clear match"), target="fits")


def test_metadata_has_the_verdict_and_calibrated_hits_are_the_most_probable_ones():
    found = {"path": "a.png", "label": "one", "id": "a", "distance": 0.5, "match_probability": 0.8}
    assert fields_of(HIT, ANSWER) == {**found, "verdict": "One clear match", "verdict_kind": "clear"}
    bare = fields_of(HIT, Answer("q", "csd", False, 0.1, (HIT,)))
    assert bare["match_probability"] is bare["verdict_kind"] is None and "not calibrated" in bare["verdict"]
    assert text_of(HIT) == "one" and text_of(Hit("a", 1, 0.5, 0.8, 0.1, {}, best_text="a red bird")) == "a red bird"
    distances, calibrator = [0.9, 0.1, 0.8, 0.7, 0.75], ScoreCalibrator(prior="cosine", higher_is_better=False)
    probability = calibrator.predict_proba(distances)[:, 1]
    kept, nothing = calibrated(calibrator, distances, 2, 0.0)
    assert kept == [(1, probability[1]), (3, probability[3])]
    assert nothing == calibrator.nothing_matches(distances)[0] and 0 < nothing < 1
    assert calibrated(calibrator, distances, None, float(probability[3]))[0] == kept
    assert calibrated(calibrator, [], 2, 0.0) == ([], 1.0)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("langchain", "langchain_core", "langchain-core"),
        ("llama_index", "llama_index", "llama-index-core"),
        ("haystack", "haystack", "haystack-ai"),
    ],
)
def test_an_absent_package_is_named(name, module, package):
    if find_spec(module) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"needs {package}: pip install 'sfumato.{name.replace('_', '-')}."):
        importlib.import_module(f"sfumato.adapters.{name}")
