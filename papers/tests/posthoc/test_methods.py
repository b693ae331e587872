"""What holds for every method of the registry."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from papers.posthoc import METHODS, NOT_BUILT, AdapterMethod, FrozenPairs
from papers.posthoc.method import PosthocMethod
from papers.tests.posthoc.fixtures import small_pairs

ADAPTERS = {name for name, method in METHODS.items() if issubclass(method, AdapterMethod)}
OTHER = {"image": "text", "text": "image"}


def fitted(name, pairs, seed=0):
    if name not in ADAPTERS:
        return METHODS[name].fit(pairs, seed=seed)
    usual = METHODS[name].default
    small = replace(usual, widths=(8,) * len(usual.widths), epochs=2, batch_size=16)
    return METHODS[name].fit(pairs, seed=seed, training=small)


def asked(method, pairs, side, rows=slice(0, 9)):
    hidden = pairs.hidden(side)[rows] if method.needs_hidden else None
    gallery = pairs.embeddings(OTHER[side]) if method.needs_gallery else None
    return method.uncertainty(side, pairs.embeddings(side)[rows], gallery, hidden=hidden)


def test_the_registry_names_every_method():
    assert all(name == method.name and method.summary for name, method in METHODS.items())
    assert all(issubclass(method, PosthocMethod) for method in METHODS.values())
    assert {"probvlm", "asymvlm", "pfe", "pcmepp", "prolip"} <= ADAPTERS
    assert set(NOT_BUILT) == {"grove", "geoflowvlm", "repvlm"} and not set(NOT_BUILT) & set(METHODS)


@pytest.fixture(scope="module")
def pairs():
    return small_pairs(n=48, d=6, widths=(7, 5), dtype=torch.float32)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_repeatable_numbers_and_keeps_the_ranking(name, pairs):
    before = torch.get_rng_state()
    method, again = (fitted(name, pairs, seed=5) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert len(method.tensors()) == len(again.tensors()) and all(map(torch.equal, method.tensors(), again.tensors()))
    assert name not in ADAPTERS or not all(map(torch.equal, method.tensors(), fitted(name, pairs, 6).tensors()))
    read = pickle.loads(pickle.dumps(method))
    for side in method.sides:
        u = asked(method, pairs, side)
        assert u.shape == (9,) and torch.isfinite(u).all() and u.is_floating_point() and not u.requires_grad
        # A query's number is its own: it does not depend on the other queries.
        torch.testing.assert_close(asked(method, pairs, side, slice(4, 5)), u[4:5], rtol=1e-5, atol=1e-7)
        assert asked(method, pairs, side, slice(0, 0)).shape == (0,)
        torch.testing.assert_close(asked(read, pairs, side), u, rtol=0, atol=0)
    if method.per_item:
        found = [method.embed(s, pairs.embeddings(s), hidden=pairs.hidden(s)) for s in OTHER]
        cosine = functional.normalize(pairs.images, dim=1) @ functional.normalize(pairs.texts, dim=1).T
        of_means = functional.normalize(found[0].mean, dim=1) @ functional.normalize(found[1].mean, dim=1).T
        torch.testing.assert_close(of_means, cosine, rtol=1e-5, atol=1e-6)
        for side, embedding in zip(OTHER, found, strict=True):
            assert embedding.dtype == torch.float32 and not embedding.mean.requires_grad
            assert torch.isfinite(embedding.log_var).all() or side not in method.sides


def test_half_precision_is_read(pairs):
    layers = {side: (matrix.half(), None) for side, (matrix, _) in pairs.projections.items()}
    images, texts, *hidden = (x.half() for x in (pairs.images, pairs.texts, pairs.image_hidden, pairs.text_hidden))
    half = FrozenPairs(images, texts, pairs.pairs, 10.0, *hidden, layers)
    for name in METHODS:
        method = fitted(name, half)
        assert all(torch.isfinite(asked(method, half, side)).all() for side in method.sides), name
