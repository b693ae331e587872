"""Words and regions: vectors from files, the GRU and the graph of regions against loops; padding is not there."""

import math

import numpy as np
import pytest
import torch
from support.raising import raises
from torch import nn

from sfumato.data.image_inputs import regions_to_bytes
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.feature_rows import GraphLayer, RegionEncoder, RegionProcessor, RegionReasoning
from sfumato.encoders.scratch import WordEncoder, read_word_vectors, word_tokenizer
from sfumato.errors import UserError

TEXTS = ["A dog, a Dog and a café.", "The dog sleeps", "sleeps"]


def test_the_vocabulary_is_the_words_by_frequency_then_by_letters():
    tokenizer, words = word_tokenizer(TEXTS), ["[UNK]", "a", "dog", "sleeps", ",", ".", "and", "cafe", "the"]
    assert sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) == words
    assert tokenizer.encode("The  DOG, a zebra").ids == [8, 2, 4, 1, 0]
    assert word_tokenizer(reversed(TEXTS)).to_str() == tokenizer.to_str()
    often = word_tokenizer(TEXTS, min_count=2)
    assert set(often.get_vocab()) == {"[UNK]", "a", "dog", "sleeps"} and often.encode("the dog").ids == [0, 2]
    assert word_tokenizer([]).encode("dog").ids == [0]
    raises(ValueError, "min_count must be at least 1, got 0", word_tokenizer, TEXTS, min_count=0)


def written(tmp_path, content):
    path = tmp_path / "vectors.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("head", ["", "6 3\n"], ids=["glove", "fasttext"])
def test_vectors_of_known_words_are_read_and_the_first_of_a_word_counts(tmp_path, head):
    glove = "the 0.5 1 -2\ndog 1e-1 2 3\n. . . 7 8 9\ndog 9 9 9\nzebra 4 5 6\n, 1 1 1\n"
    tokenizer = word_tokenizer(TEXTS)
    found = read_word_vectors(written(tmp_path, head + glove), tokenizer, 3)
    expected = {"the": [0.5, 1, -2], "dog": [0.1, 2, 3], ",": [1, 1, 1]}
    # "." has spaces within, "zebra" is not asked for.
    assert {tokenizer.id_to_token(i) for i in found} == set(expected)
    for word, vector in expected.items():
        np.testing.assert_array_equal(found[tokenizer.token_to_id(word)], np.float32(vector))
    encoder = WordEncoder(tokenizer.get_vocab_size(), 3, 2)
    before = encoder.words.weight.detach().clone()
    encoder.set_vectors(found)
    assert (encoder.words.weight != before).any(1).nonzero()[:, 0].tolist() == sorted(found)
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
    h, states = np.zeros(gru.hidden_size), []
    for x in vectors:
        of_input = weights[f"weight_ih_l0{suffix}"] @ x + weights[f"bias_ih_l0{suffix}"]
        of_state = weights[f"weight_hh_l0{suffix}"] @ h + weights[f"bias_hh_l0{suffix}"]
        (r1, z1, n1), (r2, z2, n2) = np.split(of_input, 3), np.split(of_state, 3)
        reset, update = 1 / (1 + np.exp(-r1 - r2)), 1 / (1 + np.exp(-z1 - z2))
        h = (1 - update) * np.tanh(n1 + reset * n2) + update * h
        states.append(h)
    return states


def batch():
    ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(1))
    return Inputs(ids, torch.arange(5) < torch.tensor([[5], [2], [1]]))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_are_those_of_each_text_read_alone_word_by_word(bidirectional):
    torch.manual_seed(0)
    encoder, inputs = WordEncoder(9, 4, 3, bidirectional=bidirectional).double(), batch()
    final = encoder(inputs)
    encoder.states = "all"
    every = encoder(inputs)
    assert final.mask is None and every.mask is inputs.mask
    for gru, ended, states in (
        (encoder.mean_gru, final.mean, every.mean), (encoder.variance_gru, final.log_var, every.log_var),
    ):  # fmt: skip
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


def layer_of(width, seed=0):
    torch.manual_seed(seed)
    layer = GraphLayer(width).double()
    nn.init.normal_(layer.norm.weight)
    nn.init.normal_(layer.norm.bias)
    layer.norm.running_mean.normal_()
    layer.norm.running_var.uniform_(0.5, 2)
    return layer


def loop(layer, regions, lengths, *, training):
    """Equation by equation: lists of regions, no mask, no matrix products of several regions."""

    def linear(module, vector):
        rows = zip(module.weight.tolist(), module.bias.tolist(), strict=True)
        return [sum(w * v for w, v in zip(row, vector, strict=True)) + b for row, b in rows]

    moved = []
    for n, length in enumerate(lengths):
        own = [regions[n, i].tolist() for i in range(length)]
        theta, phi, g = ([linear(m, v) for v in own] for m in (layer.theta, layer.phi, layer.g))
        for i in range(length):
            message = [0.0] * len(own[0])
            for j in range(length):
                relation = sum(a * b for a, b in zip(theta[i], phi[j], strict=True)) / length
                message = [m + relation * x for m, x in zip(message, g[j], strict=True)]
            moved.append(((n, i), linear(layer.out, message)))
    values, norm = np.array([vector for _, vector in moved]), layer.norm
    mean, var = (values.mean(0), values.var(0)) if training else (norm.running_mean.numpy(), norm.running_var.numpy())
    weight, bias = (p.detach().numpy() for p in (norm.weight, norm.bias))
    normal = (values - mean) / np.sqrt(var + norm.eps) * weight + bias
    return {place: regions[place].numpy() + row for (place, _), row in zip(moved, normal, strict=True)}


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_layer_is_the_loop(training):
    layer, lengths, regions = layer_of(4).train(training), [3, 5, 1], torch.randn(3, 5, 4, dtype=torch.float64)
    mask, expected = torch.arange(5) < torch.tensor(lengths)[:, None], loop(layer, regions, lengths, training=training)
    with torch.no_grad():
        found = layer(regions, mask)
    for place, vector in expected.items():
        np.testing.assert_allclose(found[place].numpy(), vector, rtol=1e-10, atol=1e-12)
    assert torch.equal(found[~mask], regions[~mask])


def test_a_new_layer_is_the_identity_and_a_single_region_is_normalised_by_the_running_statistics():
    torch.manual_seed(0)
    layer, regions = GraphLayer(6), torch.randn(2, 4, 6)
    found = layer(regions, torch.ones(2, 4, dtype=torch.bool))
    assert torch.equal(found, regions)
    found.square().sum().backward()
    assert layer.norm.weight.grad.abs().sum() > 0
    layer = layer_of(4).train()
    regions, mask = torch.randn(1, 2, 4, dtype=torch.float64), torch.tensor([[True, False]])
    before = {name: value.clone() for name, value in layer.norm.named_buffers()}
    expected, found = loop(layer, regions, [1], training=False), layer(regions, mask)
    np.testing.assert_allclose(found[0, 0].detach().numpy(), expected[0, 0], rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in layer.norm.named_buffers())
    found.sum().backward()
    assert layer.out.weight.grad.abs().sum() > 0


def encoder_of(seed=0, **options):
    torch.manual_seed(seed)
    encoder = RegionEncoder(5, 6, layers=2, **options)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight)
    return encoder


@pytest.mark.parametrize("recurrent", [True, False])
def test_padding_and_holes_are_as_if_the_item_came_alone(recurrent):
    encoder, features = encoder_of(recurrent=recurrent, variance=True).eval(), torch.randn(2, 4, 5)
    mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    found = encoder(Inputs(features, mask))
    for n in range(2):
        alone = encoder(Inputs(features[n : n + 1, mask[n]]))
        for whole, single in ((found.mean, alone.mean), (found.log_var, alone.log_var)):
            torch.testing.assert_close(whole[n] if recurrent else whole[n, mask[n]], single[0], rtol=1e-5, atol=1e-6)


def test_the_gru_ends_at_the_last_region_the_log_variance_shares_nothing_and_regions_are_dropped():
    encoder, inputs = encoder_of(variance=True), Inputs(torch.randn(3, 4, 5))
    encoder(inputs).log_var.sum().backward()
    assert all(p.grad is None for p in encoder.mean.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.variance_layers.parameters())
    shapes = [[tuple(p.shape) for p in part.parameters()] for part in (encoder.mean, encoder.variance_layers)]
    assert shapes[0] == shapes[1] and encoder_of().variance_layers is None and encoder_of()(inputs).log_var is None
    encoder = RegionEncoder(5, 6, layers=0, recurrent=False, variance=True, region_dropout=0.5)
    inputs = Inputs(torch.randn(200, 8, 5))
    torch.manual_seed(0)
    assert encoder.channels == 5 and not list(encoder.parameters())
    assert 0.45 < encoder.train()(inputs).mask.float().mean() < 0.55  # 1,600, each dropped with probability 1/2.
    found = encoder.eval()(inputs)
    assert found.mask.all() and torch.equal(found.mean, inputs.values) and found.log_var is None
    torch.manual_seed(1)
    reasoning = RegionReasoning(5, 6, layers=0, recurrent=True)
    features, mask = torch.randn(2, 3, 5), torch.tensor([[True, True, True], [True, True, False]])
    found = reasoning(features, mask)[:, 0]
    for n, length in enumerate((3, 2)):
        unit = nn.functional.normalize(reasoning.linear(features[n, :length]), dim=-1)
        state, cell = torch.zeros(1, 6), nn.GRUCell(5 + 1, 6)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(cell, name, getattr(reasoning.gru, f"{name}_l0"))
        for region in unit:
            state = cell(region[None], state)
        torch.testing.assert_close(found[n], state[0])


def test_a_store_reads_what_a_batch_needs_and_pads_it():
    random = np.random.default_rng(0)
    features, reads = [random.standard_normal((r, 5)).astype(np.float32) for r in (2, 4, 1)], []
    item = lambda k: lambda: reads.append(k) or regions_to_bytes(features[k])
    failed, items = {}, [item(0), lambda: b"no features", item(1), item(2)]
    store, kept = RegionProcessor(5).read(items, on_error=lambda i, error: failed.update({i: str(error)}))
    assert kept.tolist() == [0, 2, 3] and len(store) == 3 and list(failed) == [1] and reads == [0, 1, 2]
    batch = store.batch(np.array([2, 1]))
    assert reads == [0, 1, 2, 2, 1] and batch.values.shape == (2, 4, 5) and batch.mask.sum(1).tolist() == [1, 4]
    assert np.array_equal(batch.values[0, :1], features[2]) and not batch.values[0, 1:].any()
    assert store.batch(np.array([], np.int64)).values.shape[0] == 0
    raises(ValueError, "not a .npy file", RegionProcessor(5).read, items)
    reads.clear()
    store, _ = RegionProcessor(5).read([lambda: b"" if reads else item(0)()])
    raises(OSError, "the features at position 0 can no longer be read", store.batch, np.array([0]))
