"""Whole words: their vocabulary, vectors from files, and the GRU against a loop over single texts without padding."""

import math

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.scratch import WordEncoder, read_word_vectors, word_tokenizer
from sfumato.errors import UserError

TEXTS = ["A dog, a Dog and a café.", "The dog sleeps", "sleeps"]


def test_the_vocabulary_is_the_words_by_frequency_then_by_letters():
    tokenizer = word_tokenizer(TEXTS)
    words = ["[UNK]", "a", "dog", "sleeps", ",", ".", "and", "cafe", "the"]
    assert sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) == words
    assert tokenizer.encode("The  DOG, a zebra").ids == [8, 2, 4, 1, 0]
    assert word_tokenizer(reversed(TEXTS)).to_str() == tokenizer.to_str()
    often = word_tokenizer(TEXTS, min_count=2)
    assert set(often.get_vocab()) == {"[UNK]", "a", "dog", "sleeps"} and often.encode("the dog").ids == [0, 2]
    assert word_tokenizer([]).encode("dog").ids == [0]
    raises(ValueError, "min_count must be at least 1, got 0", word_tokenizer, TEXTS, min_count=0)


GLOVE = "the 0.5 1 -2\ndog 1e-1 2 3\n. . . 7 8 9\ndog 9 9 9\nzebra 4 5 6\n, 1 1 1\n"


def written(tmp_path, content):
    path = tmp_path / "vectors.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("head", ["", "6 3\n"], ids=["glove", "fasttext"])
def test_vectors_of_known_words_are_read_and_the_first_of_a_word_counts(tmp_path, head):
    tokenizer = word_tokenizer(TEXTS)
    found = read_word_vectors(written(tmp_path, head + GLOVE), tokenizer, 3)
    expected = {"the": [0.5, 1, -2], "dog": [0.1, 2, 3], ",": [1, 1, 1]}
    # "." has spaces within, "zebra" is not asked for.
    assert {tokenizer.id_to_token(i) for i in found} == set(expected)
    for word, vector in expected.items():
        np.testing.assert_array_equal(found[tokenizer.token_to_id(word)], np.float32(vector))
    encoder = WordEncoder(tokenizer.get_vocab_size(), 3, 2)
    before = encoder.words.weight.detach().clone()
    encoder.set_vectors(found)
    changed = (encoder.words.weight != before).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted(found)
    torch.testing.assert_close(encoder.words.weight[tokenizer.token_to_id("dog")], torch.tensor([0.1, 2, 3]))


def test_files_that_are_no_vectors_of_that_width_are_refused(tmp_path):
    for content, message in (
        ("the 1 2\ndog 1 2\n", r"line 1: 2 numbers after the word, but model.text.width=3; .* set model.text.width=2"),
        ("the 1 2 3 4\n", "line 1: 4 numbers after the word"),
        ("the 1 2 3\n\nsleeps 1 2 3", "line 2: expected a word and its numbers .got 0 fields.; is it the text file"),
        ("the 1 2 3\nof 1 2 3\ndog 1\n", "line 3: expected a word and its numbers .got 2 fields"),
        ("a text that is no file of vectors", "line 1: expected a word and its numbers .*'text'"),
        (b"PK\x03\x04\x14\x00 \xff\xfe\x00 some zip", "line 1: expected a word and its numbers"),
        ("the 1 nan 2\n", "line 1: a number after the word is not finite"),
        ("zebra 1 2 3\nlion 1 2 3\n", "has a vector for none of the 8 words"),
        ("", "has a vector for none of the 8 words"),
    ):
        raises(UserError, message, read_word_vectors, written(tmp_path, content), word_tokenizer(TEXTS), 3)


def state(gru, vectors, suffix):
    """h after reading a list of word vectors in that order, by the formulas of the GRU, a word at a time."""
    weights = {name: p.detach().numpy() for name, p in gru.named_parameters()}
    h = np.zeros(gru.hidden_size)
    states = []
    for x in vectors:
        of_input = weights[f"weight_ih_l0{suffix}"] @ x + weights[f"bias_ih_l0{suffix}"]
        of_state = weights[f"weight_hh_l0{suffix}"] @ h + weights[f"bias_hh_l0{suffix}"]
        (r1, z1, n1), (r2, z2, n2) = np.split(of_input, 3), np.split(of_state, 3)
        reset, update = 1 / (1 + np.exp(-r1 - r2)), 1 / (1 + np.exp(-z1 - z2))
        h = (1 - update) * np.tanh(n1 + reset * n2) + update * h
        states.append(h)
    return states


def batch():
    """Three texts of 5, 2 and 1 words with nonsense behind them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (3, 5), generator=generator)
    return Inputs(ids, torch.arange(5) < torch.tensor([[5], [2], [1]]))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_are_those_of_each_text_read_alone_word_by_word(bidirectional):
    torch.manual_seed(0)
    encoder = WordEncoder(9, 4, 3, bidirectional=bidirectional).double()
    inputs = batch()
    final = encoder(inputs)
    encoder.states = "all"
    every = encoder(inputs)
    assert final.mask is None and every.mask is inputs.mask
    for gru, ended, states in (
        (encoder.mean_gru, final.mean, every.mean),
        (encoder.variance_gru, final.log_var, every.log_var),
    ):
        assert ended.shape == (3, 1, encoder.channels) and states.shape == (3, 5, encoder.channels)
        for row, (ids, mask) in enumerate(zip(inputs.values, inputs.mask, strict=True)):
            vectors = [encoder.words.weight[i].detach().numpy() for i in ids[mask]]
            forward = state(gru, vectors, "")
            backward = state(gru, vectors[::-1], "_reverse")[::-1] if bidirectional else []
            expected = [np.concatenate(both) for both in zip(forward, backward, strict=True)] if backward else forward
            np.testing.assert_allclose(states[row, mask].detach(), expected, atol=1e-12)
            # Forwards the state at the last word, backwards at the first; the released code takes both at the last.
            last = np.concatenate([forward[-1], backward[0]]) if backward else forward[-1]
            np.testing.assert_allclose(ended[row, 0].detach(), last, atol=1e-12)
            if backward and len(vectors) > 1:
                assert np.abs(backward[0] - backward[-1]).max() > 1e-3
    assert (final.mean - final.log_var).abs().min() > 1e-6, "two networks"


def test_word_vectors_are_shared_unless_they_are_frozen_and_the_variances_gru_is_its_own():
    torch.manual_seed(0)
    moved = []
    for encoder in (WordEncoder(9, 4, 3), frozen := WordEncoder(9, 4, 3, freeze=True)):
        encoder(batch()).log_var.sum().backward()
        moved.append({name for name, p in encoder.named_parameters() if p.grad is not None})
    assert moved[1] == {n for n, _ in frozen.named_parameters() if n.startswith("variance_gru.")}
    assert moved[0] == moved[1] | {"words.weight"} and "words.weight" in frozen.state_dict()
    assert math.isclose(frozen.words.weight.abs().max(), 0.1, rel_tol=0.3) and frozen.words.weight.abs().max() <= 0.1
