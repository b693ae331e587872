"""The model of the package by onnxruntime against its heads in torch, and what it says of unfamiliar inputs."""

import json
import shutil

import make_small
import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, GaussianIndex, load_emoji
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.encoder_protocol import Inputs, piece_counter
from sfumato.encoders.processors import TokenProcessor, train_tokenizer
from sfumato.errors import UserError
from sfumato.metrics.bootstrap import auroc
from sfumato.models.model import UnfamiliarTexts, model_digest, nonsense
from sfumato.models.run import HEADS, PACKAGED, SMALL, WORDS, load_model, load_run
from sfumato.search.answer import QueryInfo


@pytest.fixture(scope="module")
def both():
    return load_model(SMALL), load_model(SMALL, trainable=True)


def close(found, expected):
    for name in ("mean", "log_var"):
        ours, theirs = getattr(found, name), getattr(expected, name).numpy()
        assert isinstance(ours, np.ndarray) and ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def test_images_and_texts_are_embedded_as_by_torch(both):
    images = [image.read_bytes() for image in load_emoji()["val"].images[:5]]
    texts = ["a dog", "", "a red car in a street full of people " * 20, "Grüße 日本語 🦊", "?"]
    close(both[0].embed_images(images), both[1].embed_images(images))
    close(both[0].embed_texts(texts), both[1].embed_texts(texts))
    close(both[0].embed_texts(texts * 60), both[1].embed_texts(texts * 60))
    assert model_digest(both[0].model) == model_digest(both[1].model), "galleries of either are valid"
    found, expected = (one.probability(texts, images) for one in both)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("side", HEADS)
def test_a_head_averages_the_tokens_that_are_there(both, side):
    graph, module = (getattr(one.model, side) for one in both)
    channels, random = module.encoder.channels, np.random.default_rng(0)
    values = random.normal(2, 3, (4, 3, channels)).astype(np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    for given in (Inputs(values, mask), Inputs(values)):
        with torch.no_grad():
            close(graph.batch(given), module.batch(given))
    assert (graph.dim, graph.variances) == (module.dim, True)
    assert (graph.normalize, graph.has_offset) == (module.normalize, module.has_offset)


@pytest.mark.parametrize(("side", "name"), HEADS.items())
def test_the_graphs_are_those_of_the_script(side, name, tmp_path):
    weights = PACKAGED / SMALL / "model.safetensors"
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    make_small.write_head(tmp_path / name, side)
    assert (tmp_path / name).read_bytes() == (PACKAGED / SMALL / name).read_bytes()


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
