"""Texts whose words a model hardly knows: against real words that the fit never saw, and where users meet them."""

import json
import shutil

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, GaussianIndex, load_emoji
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.encoder_protocol import piece_counter
from sfumato.encoders.processors import TokenProcessor, train_tokenizer
from sfumato.errors import UserError
from sfumato.metrics.bootstrap import auroc
from sfumato.models.model import UnfamiliarTexts, nonsense
from sfumato.models.run import WORDS, load_model, load_run
from sfumato.search.answer import QueryInfo


@pytest.fixture(scope="module")
def splits():
    return load_emoji(held_out_wordings="0/5", held_out_concepts="0/10")


@pytest.fixture(scope="module")
def pieces():
    return text_backbone("minilm-l6-v2").pieces


@pytest.fixture(scope="module")
def judge(splits, pieces):
    return UnfamiliarTexts.fit(splits["train"].texts, pieces)


def test_pieces_are_those_of_the_tokenizer(pieces):
    assert pieces(["dog", "giraffe", "qxzvkw"])[0] == 1 and pieces(["qxzvkw"])[0] >= 4 and pieces([]) == []
    tokenizer = train_tokenizer(["red fox", "red dog"] * 20, 60)
    own = TokenProcessor(tokenizer, 8).pieces(["red", "zebra"])
    assert own[0] == 1 < own[1]


def test_new_words_and_made_up_ones_are_told_apart(judge, pieces, splits, tmp_path):
    known = set(splits["train"].texts)
    new = [text for text in splits["test"].texts if text not in known]
    made_up = nonsense(600, seed=99)
    for texts, least in ((made_up[::2], 0.97), (made_up[1::2], 0.92)):
        score = judge.score([*new, *texts], pieces)
        assert auroc(score, np.arange(len(score)) >= len(new)) > least
    assert np.mean(judge.of(new, pieces)) < 0.08 < 0.8 < np.mean(judge.of(made_up[::2], pieces))
    assert not any(judge.of(splits["train"].texts, pieces))
    assert judge.of(["", "?!", "Clock", "asdfgh qwrtzp"], pieces) == [False, False, False, True]
    judge.save(tmp_path / WORDS)
    assert UnfamiliarTexts.load(tmp_path / WORDS) == judge
    (tmp_path / WORDS).write_text(json.dumps({"weights": [1.0]}))
    raises(UserError, r"words\.json is damaged .*; delete it", UnfamiliarTexts.load, tmp_path / WORDS)
    with pytest.raises(ValueError, match="needs 100 texts with words, got 2"):
        UnfamiliarTexts.fit(["a", "b", "?"], lambda words: [1] * len(words))


def test_a_run_remembers_its_words_and_a_verdict_says_it_first(toy, tmp_path, judge):
    shutil.copytree(toy / "run", tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.unfamiliar is None and run.unfamiliar_texts(["qxzvkw"]) == [False]  # Fewer than 100 texts.
    judge.save(tmp_path / "run" / WORDS)
    run = load_run(tmp_path / "run")
    assert piece_counter(run.model) and run.unfamiliar_texts(["clock", "qxzvkw vvkkqx"]) == [False, True]
    loaded = load_model(tmp_path / "run")  # As searches and the service load it.
    assert loaded.unfamiliar_texts(["clock", "qxzvkw vvkkqx"]) == [False, True]
    embeddings = GaussianEmbedding(torch.zeros(3, 2), torch.zeros(3, 2))
    index = GaussianIndex.build(embeddings, ["a", "b", "c"])
    answers = index.search(embeddings[:2], 1, about=[QueryInfo("a"), QueryInfo("b", unfamiliar=True)])
    assert answers[0].verdict is None
    found = answers[1].verdict
    assert found.kind == "unfamiliar" and found.text == "The model hardly knows these words: the results are guesses"
