"""The second stage: it learns what it is given, changes nothing but variances, and happens once."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.toy import make_toy

from sfumato.encoders.dual import Tower
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.processors import TokenProcessor, train_tokenizer
from sfumato.encoders.small import SmallTextEncoder
from sfumato.models.recipe import VarianceStageConfig, load_recipe
from sfumato.training.loop import fit, fit_variance_stage

WORDS = [f"{a} {b}" for a in ("red", "green", "blue", "pink") for b in ("circle", "square", "cross", "bar", "ring")]
SPREAD = torch.linspace(0, 0.9, len(WORDS))[torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(0))]
CONFIG = VarianceStageConfig(epochs=120, batch_size=7)


def tower(variance=True, **options):
    torch.manual_seed(0)
    tokenizer = train_tokenizer(WORDS, 100)
    encoder = SmallTextEncoder(tokenizer.get_vocab_size(), 48, 0.5)
    head = GaussianHead(encoder.channels, 32, HeadOptions(variance=variance, variance_mlp=True, **options))
    built = Tower(TokenProcessor(tokenizer, 8), encoder, head)
    store, _ = built.processor.read([lambda word=word: word for word in WORDS])
    return built, store


def test_it_learns_the_spreads_of_the_items_it_is_given_and_moves_no_mean():
    built, store = tower()
    before, state = built.embed(store), {k: v.clone() for k, v in built.state_dict().items()}
    index = np.arange(0, len(WORDS), 2)
    built.train()
    rank = fit_variance_stage(built, store, SPREAD, index, CONFIG, seed=1)
    after = built.embed(store)
    assert built.training and rank > 0.95
    torch.testing.assert_close(after.total_variance[::2], SPREAD[::2] + 0.02, rtol=0.3, atol=0.05)
    assert (after.total_variance[1::2] - SPREAD[1::2]).abs().mean() > 0.1  # Of which it was told nothing.
    assert torch.equal(before.mean, after.mean)
    changed = {k for k, v in built.state_dict().items() if not torch.equal(v, state[k])}
    assert changed and all(k.startswith("head.log_var.") for k in changed)


def test_local_attention_of_the_log_variance_learns_with_it():
    built, store = tower(local_attention=True)
    before, state = built.embed(store).mean, {k: v.clone() for k, v in built.state_dict().items()}
    fit_variance_stage(built, store, SPREAD, np.arange(len(WORDS)), VarianceStageConfig(epochs=2, batch_size=7), seed=1)
    changed = {k for k, v in built.state_dict().items() if not torch.equal(v, state[k])}
    assert {"head.log_var_local.linear.weight", "head.log_var_local.attention.0.weight"} <= changed
    assert all(k.startswith(("head.log_var.", "head.log_var_local.")) for k in changed)
    assert torch.equal(built.embed(store).mean, before)


def test_two_equal_fits_are_bitwise_equal_and_seeds_differ():
    results = []
    for seed in (1, 1, 2):
        built, store = tower()
        fit_variance_stage(
            built, store, SPREAD, np.arange(len(WORDS)), VarianceStageConfig(epochs=2, batch_size=7), seed=seed
        )
        results.append(built.embed(store).log_var)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_points_are_refused():
    built, store = tower(variance=False)
    with pytest.raises(ValueError, match="no log variance to fit"):
        fit_variance_stage(built, store, SPREAD, np.arange(len(WORDS)), CONFIG, seed=0)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_a_run_with_a_second_stage_differs_in_variances_alone_and_has_it_once(toy, capsys):
    files, own = [], ["data.equal_texts=separate", "loss.distance=squared_l2"]
    for name, changes in {"plain": [], "spread": ["spread.epochs=3"]}.items():
        folder = toy.parent / name
        recipe = load_recipe(toy, [*own, "loss.beta=0", "model.variance_mlp=true", *changes])
        fit(recipe, folder)
        files.append(load_file(folder / "model.safetensors"))
    plain, spread = files
    assert plain.keys() == spread.keys()
    differing = {key for key in plain if not torch.equal(plain[key], spread[key])}
    assert differing and all(".head.log_var." in key for key in differing)
    said = capsys.readouterr().err
    assert "fitted to the dispersion of their matches" in said and "each item has a single match" in said
    fit(recipe, folder)  # A finished run: nothing happens again.
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(spread[key], again[key]) for key in spread)
    assert "variances" not in capsys.readouterr().err


def test_a_run_without_validation_has_it_too(toy):
    changes = ["loss.distance=squared_l2", "loss.beta=0", "spread.epochs=2", "data.val_share=0", "train.epochs=1"]
    fit(load_recipe(toy, changes), toy.parent / "none")
    last, model = (load_file(toy.parent / "none" / f"{name}.safetensors") for name in ("last", "model"))
    differing = {key for key in model if not torch.equal(model[key], last[key])}
    assert differing and all(".head.log_var." in key for key in differing)
