"""What holds for every method of the registry."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from sfumato.posthoc import METHODS, NOT_BUILT, FrozenPairs, load_method, save_method
from sfumato.posthoc.adapter_method import AdapterMethod
from sfumato.posthoc.method import PosthocMethod

ADAPTERS = {name for name, method in METHODS.items() if issubclass(method, AdapterMethod)}
OTHER = {"image": "text", "text": "image"}


def pairs_of(n=48, d=6, widths=(7, 5), dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)
    latent = draw(n, 4)
    hidden = [latent @ draw(4, p) + 0.4 * draw(n, p) for p in widths]
    matrices = [draw(d, p) for p in widths]
    images, texts = (h @ w.T for h, w in zip(hidden, matrices, strict=True))
    return FrozenPairs(images, texts, torch.arange(n).repeat(2, 1).T, 10.0, None, *hidden, *matrices)


def small_training(name, epochs=2):
    widths = (8,) * len(METHODS[name].default.widths)
    return replace(METHODS[name].default, widths=widths, epochs=epochs, batch_size=16)


def fitted(name, pairs, seed=0):
    options = {}
    if name in ADAPTERS:
        options["training"] = small_training(name)
    return METHODS[name].fit(pairs, seed=seed, **options)


def asked(method, pairs, side, rows=slice(0, 9)):
    hidden = pairs.hidden(side)[rows] if method.needs_hidden else None
    gallery = pairs.embeddings(OTHER[side]) if method.needs_gallery else None
    return method.uncertainty(side, pairs.embeddings(side)[rows], gallery, hidden=hidden)


def test_the_registry_names_every_method():
    assert all(name == method.name and method.summary for name, method in METHODS.items())
    assert all(issubclass(method, PosthocMethod) for method in METHODS.values())
    assert {"probvlm", "asymvlm", "pfe", "pcmepp", "prolip"} <= ADAPTERS
    assert set(NOT_BUILT) == {"grove"} and not set(NOT_BUILT) & set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_number_for_every_query(name):
    pairs = pairs_of()
    method = fitted(name, pairs)
    for side in method.sides:
        u = asked(method, pairs, side)
        assert u.shape == (9,) and torch.isfinite(u).all() and u.is_floating_point() and not u.requires_grad
        # A query's number is its own: it does not depend on the other queries.
        torch.testing.assert_close(asked(method, pairs, side, slice(4, 5)), u[4:5], rtol=1e-5, atol=1e-7)
        assert asked(method, pairs, side, slice(0, 0)).shape == (0,)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].per_item])
def test_the_means_rank_as_the_frozen_model(name):
    pairs = pairs_of()
    method = fitted(name, pairs)
    found = [method.embed(s, pairs.embeddings(s), hidden=pairs.hidden(s)) for s in OTHER]
    cosine = functional.normalize(pairs.images, dim=1) @ functional.normalize(pairs.texts, dim=1).T
    of_means = functional.normalize(found[0].mean, dim=1) @ functional.normalize(found[1].mean, dim=1).T
    torch.testing.assert_close(of_means, cosine, rtol=1e-5, atol=1e-6)
    for side, embedding in zip(OTHER, found, strict=True):
        assert embedding.dtype == torch.float32 and not embedding.mean.requires_grad
        assert torch.isfinite(embedding.log_var).all() or side not in method.sides


@pytest.mark.parametrize("name", METHODS)
def test_equal_seeds_give_equal_methods_and_leave_the_global_generator_alone(name):
    pairs = pairs_of()
    before = torch.get_rng_state()
    first, second = (fitted(name, pairs, seed=5).state() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    if name in ADAPTERS:
        third = fitted(name, pairs, seed=6).state()
        assert any(not torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("name", METHODS)
def test_a_file_gives_the_method_back(name, tmp_path):
    pairs = pairs_of()
    method = fitted(name, pairs)
    save_method(tmp_path / "method.safetensors", method)
    read = load_method(tmp_path / "method.safetensors")
    assert type(read) is type(method)
    for side in method.sides:
        torch.testing.assert_close(asked(read, pairs, side), asked(method, pairs, side), rtol=0, atol=0)


@pytest.mark.parametrize("name", METHODS)
def test_an_incomplete_state_is_refused(name):
    state = fitted(name, pairs_of()).state()
    for key in state:
        with pytest.raises(ValueError, match=name):
            METHODS[name].from_state({k: v for k, v in state.items() if k != key})


STATE_OPTIONS = {
    "adversarial_margin": {"search": "linear"},
    "laplace": {"damping": "exact", "pseudo_data": 3.0},
    "probvlm": {"variance": "clipped", "text_order": "inverted"},
    "asymvlm": {"distribution": "power_spherical", "keep_mean": False},
    "pfe": {"units": "raw"},
}


@pytest.mark.parametrize("name", STATE_OPTIONS)
def test_options_survive(name):
    options = dict(STATE_OPTIONS[name])
    pairs = pairs_of()
    if name in ADAPTERS:
        options["training"] = small_training(name, epochs=1)
    method = METHODS[name].fit(pairs, **options)
    read = METHODS[name].from_state(method.state())
    for side in method.sides:
        torch.testing.assert_close(asked(read, pairs, side), asked(method, pairs, side), rtol=0, atol=0)


def test_files_that_are_no_methods(tmp_path):
    with pytest.raises(FileNotFoundError, match="no fitted method"):
        load_method(tmp_path / "none")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="not a fitted post-hoc method"):
        load_method(tmp_path / "other")
    save_file({"x": torch.zeros(1)}, tmp_path / "new", {"format": "sfumato-posthoc-1", "method": "newer"})
    with pytest.raises(ValueError, match="unknown method 'newer'; known: top1"):
        load_method(tmp_path / "new")
    (tmp_path / "bad").write_bytes(b"bad")
    with pytest.raises(ValueError, match="damaged"):
        load_method(tmp_path / "bad")


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_read(name):
    pairs = pairs_of()
    half = FrozenPairs(
        pairs.images.half(),
        pairs.texts.half(),
        pairs.pairs,
        10.0,
        None,
        *(x.half() for x in (pairs.image_hidden, pairs.text_hidden, pairs.image_projection, pairs.text_projection)),
    )
    method = fitted(name, half)
    for side in method.sides:
        assert torch.isfinite(asked(method, half, side)).all()
