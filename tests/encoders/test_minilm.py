"""Sentence vectors that the text encoder of a search has just computed are not computed again."""

import torch

from sfumato.encoders import package_weights as minilm
from sfumato.encoders.backbones import text_backbone


def test_a_text_is_embedded_once_for_both_uses(monkeypatch):
    texts = ["a dog", "two children play in the snow", "a dog"]
    network = minilm.shared_minilm()
    network._sentences.clear()
    fresh = minilm.sentence_vectors(texts)  # Nothing is remembered of these.
    text_backbone("minilm-l6-v2")(texts)
    calls, states = [], network._states
    monkeypatch.setattr(network, "_states", lambda *given: calls.append(given) or states(*given))
    remembered = minilm.sentence_vectors(texts)
    assert not calls
    torch.testing.assert_close(remembered, fresh, atol=1e-5, rtol=0)
    minilm.sentence_vectors([*texts, "a cat"])
    assert [len(tokens["input_ids"]) for tokens, _ in calls] == [1]


def test_only_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr(minilm, "_LATEST", 4)
    network = minilm.shared_minilm()
    network._sentences.clear()
    text_backbone("minilm-l6-v2")([f"word {i}" for i in range(9)])
    assert len(network._sentences) == 4


def test_a_text_longer_than_the_encoder_reads_is_not_mistaken_for_its_beginning():
    long = " ".join(["word"] * 100)
    text_backbone("minilm-l6-v2", max_tokens=64)([long])
    whole = minilm.sentence_vectors([long])
    minilm.shared_minilm()._sentences.clear()
    torch.testing.assert_close(whole, minilm.sentence_vectors([long]), atol=1e-5, rtol=0)
