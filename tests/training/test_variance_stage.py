"""Towers, and the second stage: it learns what it is given, changes nothing but variances, and happens once."""

import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import references
from support.raising import raises
from support.tiny_models import tiny_resnet
from support.toy import assert_same_runs, fit_until, make_toy
from torch.distributions import Independent, Normal

from sfumato import GaussianEmbedding, Relevance, fit, load_recipe
from sfumato.calibration.logits import fit_logits
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.processors import TokenProcessor, train_tokenizer
from sfumato.encoders.scratch import SmallTextEncoder, WordEncoder
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Query
from sfumato.metrics.bootstrap import spearman
from sfumato.models.build import Tower
from sfumato.models.process_group import ProcessGroup
from sfumato.models.run import load_run
from sfumato.models.sections import VarianceStageConfig
from sfumato.training import saving
from sfumato.training import step as learner
from sfumato.training import validation as variance_stage
from sfumato.training.step import DivergedError, build_optimiser, set_learning_rate
from sfumato.training.validation import dispersion_loss, fit_variance_stage, match_dispersion, teacher_values

WORDS = [f"{a} {b}" for a in ("red", "green", "blue", "pink") for b in ("circle", "square", "cross", "bar", "ring")]
SPREAD = torch.linspace(0, 0.9, len(WORDS))[torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(0))]
CONFIG, SHORT = (VarianceStageConfig(epochs=n, batch_size=7) for n in (120, 2))


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
    built.train()
    rank = fit_variance_stage(built, store, SPREAD, np.arange(0, len(WORDS), 2), CONFIG, seed=1)
    after = built.embed(store)
    assert built.training and rank > 0.95
    torch.testing.assert_close(after.total_variance[::2], SPREAD[::2] + 0.02, rtol=0.3, atol=0.05)
    assert (after.total_variance[1::2] - SPREAD[1::2]).abs().mean() > 0.1  # Of which it was told nothing.
    assert torch.equal(before.mean, after.mean)
    changed = {k for k, v in built.state_dict().items() if not torch.equal(v, state[k])}
    assert changed and all(k.startswith("head.log_var.") for k in changed)


@pytest.mark.parametrize("option, value, learn", [
    ("local_attention", True, ("head.log_var.", "head.log_var_local.linear.", "head.log_var_local.attention.")),
    ("variance_hidden", 32, ("head.log_var.", "head.log_var_hidden.")),
])  # fmt: skip
def test_what_belongs_to_the_log_variance_learns_with_it_and_nothing_else(option, value, learn):
    built, store = tower(**{option: value})
    before, state = built.embed(store).mean, {k: v.clone() for k, v in built.state_dict().items()}
    random_state = torch.get_rng_state()
    fit_variance_stage(built, store, SPREAD, np.arange(len(WORDS)), SHORT, seed=1)
    assert torch.equal(torch.get_rng_state(), random_state) and torch.equal(built.embed(store).mean, before)
    changed = {k for k, v in built.state_dict().items() if not torch.equal(v, state[k])}
    assert all(any(k.startswith(part) for k in changed) for part in learn)
    assert all(k.startswith(learn) for k in changed)


def test_equal_fits_are_equal_and_only_estimators_of_a_gallery_can_teach(monkeypatch):
    results = []
    for seed in (1, 1, 2):
        built, store = tower()
        fit_variance_stage(built, store, SPREAD, np.arange(len(WORDS)), SHORT, seed=seed)
        results.append(built.embed(store).log_var)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    message = "known: dispersion, listed_matches, expected_matches, match_entropy,"
    for name in ("total_variance", "best"):
        raises(UserError, message, teacher_values, VarianceStageConfig(teacher=name), Query("t2i", *related()))
    taught = lambda: teacher_values(VarianceStageConfig(teacher="top1_mismatch"), Query("t2i", *related()), seed=1)
    whole = taught()
    monkeypatch.setattr(variance_stage, "_N_GALLERY", 50)
    part = taught()
    assert not torch.equal(whole, part)
    assert spearman(whole.numpy(), part.numpy()) > 0.3


def related(seed=0, n=120, m=80):
    """Texts with 1 to 20 matching images: their means are near the mean of these."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.normal(size=(m, 16))).float()
    lists = [random.choice(m, size=k, replace=False) for k in random.integers(1, 20, size=n)]
    means = torch.stack([images[torch.from_numpy(own)].sum(0) / len(own) ** 0.5 for own in lists])
    return GaussianEmbedding.point(means), GaussianEmbedding.point(images), Relevance.from_lists(lists, n_gallery=m)


@pytest.mark.parametrize("teacher", ["listed_matches", "expected_matches", "match_entropy"])
def test_a_teacher_gives_its_value_over_the_training_gallery_scaled_to_1(teacher):
    texts, images, relevance = related()
    found = teacher_values(VarianceStageConfig(teacher=teacher), Query("t2i", texts, images, relevance)).numpy()
    distance = torch.cdist(texts.mean.double(), images.mean.double()).square()
    scale, bias = fit_logits(distance, torch.from_numpy(relevance.to_dense()))
    logit = bias - scale * distance
    slow = {"listed_matches": torch.from_numpy(relevance.counts).log()}
    slow |= {"expected_matches": torch.sigmoid(logit).sum(1).log()}
    slow = (slow | {"match_entropy": -(logit.softmax(1) * logit.log_softmax(1)).sum(1)})[teacher].numpy()
    low, high = np.quantile(slow, [0.01, 0.99])
    np.testing.assert_allclose(found, np.clip((slow - low) / (high - low), 0, 1), atol=1e-4)


def test_a_run_with_a_second_stage_differs_in_variances_alone_and_has_it_once(tmp_path, capsys):
    toy, files, own = make_toy(tmp_path), [], ["data.equal_texts=separate", "loss.distance=squared_l2"]
    for name, changes in {"plain": [], "spread": ["variance_stage.epochs=3"]}.items():
        folder = tmp_path / name
        recipe = load_recipe(toy, [*own, "loss.beta=0", "model.variance_mlp=true", *changes])
        fit(recipe, folder)
        files.append(load_file(folder / "model.safetensors"))
    plain, spread = files
    assert plain.keys() == spread.keys()
    differing = {key for key in plain if not torch.equal(plain[key], spread[key])}
    assert differing and all(".head.log_var." in key for key in differing)
    said = capsys.readouterr().err
    assert "fitted to dispersion" in said and "as with a single match" in said
    fit(recipe, folder)  # A finished run: nothing happens again.
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(spread[key], again[key]) for key in spread)
    assert "variances" not in capsys.readouterr().err


ITEM, PARTNER = torch.tensor([3, 0, 1, 0, 3, 1, 0, 3]), torch.tensor([6, 2, 0, 5, 1, 4, 0, 2])


def partners(n=7, d=5, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def test_dispersion_is_the_loops_and_whitened_it_does_not_depend_on_axes_or_scales():
    x = partners()
    dispersion, count = match_dispersion(x, ITEM, PARTNER, 5, whiten=False)
    own = [[x[j].tolist() for i, j in zip(ITEM, PARTNER, strict=True) if i == k] for k in range(5)]
    expected = [*map(references.match_dispersion, own)]
    assert dispersion.tolist() == pytest.approx(expected, rel=1e-12) and count.tolist() == [3, 2, 0, 3, 0]
    assert dispersion[2] == dispersion[4] == 0
    x = partners(40)
    change = partners(5, 5, seed=1) @ torch.diag(torch.tensor([1.0, 20.0, 0.1, 3.0, 1.0], dtype=torch.float64))
    item, partner = torch.arange(40) // 5, torch.arange(40).flip(0)
    whitened, moved = (match_dispersion(y, item, partner, 8, shrinkage=1e-12)[0] for y in (x, x @ change + 2))
    torch.testing.assert_close(whitened, moved, rtol=1e-5, atol=1e-5)
    plain, moved = (match_dispersion(y, item, partner, 8, whiten=False)[0] for y in (x, x @ change + 2))
    assert (plain - moved).abs().max() > 0.1
    crowd = torch.eye(8, dtype=torch.float64) + 10
    item, partner = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    assert match_dispersion(crowd, item, partner, 1, whiten=False)[0] < 0.01
    assert match_dispersion(crowd, item, partner, 1)[0] > 1 - 1 / 4
    # Fewer partners than dimensions, in half precision.
    dispersion, _ = match_dispersion(partners(7, 20).half(), ITEM, PARTNER, 4)
    assert dispersion.dtype == torch.float32 and dispersion.isfinite().all() and (dispersion[[0, 1, 3]] > 0.1).all()


def test_the_loss_is_the_likelihood_of_the_matches_and_least_at_their_dispersion():
    x = torch.nn.functional.normalize(partners(), dim=1)
    dispersion, count = match_dispersion(x, ITEM, PARTNER, 4, whiten=False)
    kept = count > 0

    def loss(shift):
        log_var = ((dispersion + 0.1) / 5).log()[:, None].expand(-1, 5) + shift
        return dispersion_loss(log_var[kept], dispersion[kept], floor=0.1)

    def negative_log_likelihood(shift):
        values = []
        for k in torch.arange(4)[kept]:
            own = x[PARTNER[k == ITEM]]
            deviation = ((dispersion[k] + 0.1) / 5 * math.exp(shift)).sqrt().expand(5)
            per_match = -Independent(Normal(own.mean(0), deviation), 1).log_prob(own).mean()
            values.append((per_match - 5 * math.log(2 * math.pi) / 2) / 5 + 0.1 / 10 / deviation[0] ** 2)
        return torch.stack(values).mean()

    for shift in (-0.5, 0.0, 0.7):
        torch.testing.assert_close(loss(shift), negative_log_likelihood(shift))
    assert loss(0.0) < loss(0.02) and loss(0.0) < loss(-0.02)


GRU = 'model.text={ kind = "gru", width = 3, hidden = 8, bidirectional = true }'
RED, SOME = [0.5, -0.25, 1.0], [2.0, 4.0, 8.0]


def vectors_file(folder):
    path = folder / "glove.3d.txt"
    path.write_text("".join(f"{word} {' '.join(map(str, v))}\n" for word, v in (("red", RED), ("some", SOME))))
    return path


def test_a_run_needs_its_file_of_word_vectors_once_and_refuses_what_has_no_effect(tmp_path, capsys):
    toy, path = make_toy(tmp_path), vectors_file(tmp_path)
    changes = [GRU, f"model.text.vectors={path}", "model.text.freeze=true", "train.epochs=1", "train.ema_decay=0.5"]
    fit(load_recipe(toy, changes), tmp_path / "run")
    # Twelve words: six colours, four shapes, "a", "in", "some".
    assert f"2 of 13 words of the training texts start from {path}" in capsys.readouterr().err
    path.unlink()
    model = load_run(tmp_path / "run").model
    id_of = model.text.processor.tokenizer.token_to_id
    vectors = model.text.encoder.words.weight
    torch.testing.assert_close(vectors[[id_of("red"), id_of("some")]], torch.tensor([RED, SOME]), rtol=0, atol=0)
    stage = "optim.first_stage_epochs"
    points = ["model.local_attention=true", "model.embeddings=2", "model.variance=false", "loss.beta=0"]
    for overrides, message in (
        ([f"{stage}=3"], f"{stage}=3 leaves no epoch of train.epochs=3 for the second stage"),
        ([f"{stage}=1", "optim.freeze_image_epochs=1"], "leave out optim.freeze_image_epochs"),
        (points, "leave out model.local_attention"),
        (["model.image.kind=frozen", "augment.erase=0.2"], "augment.erase changes pixels"),
        (["model.text.kind=frozen", "augment.drop_words=0.2"], "augment.drop_words changes the texts"),
    ):  # fmt: skip
        raises(UserError, message, load_recipe, toy, overrides)


def test_several_processes_average_running_statistics_and_no_word_vectors(monkeypatch):
    """(3 x + 3) / 3 in the place of a sum over three processes."""
    monkeypatch.setattr(ProcessGroup, "total", lambda process_group, value: 3 * value + 3)
    model = torch.nn.ModuleDict({"words": WordEncoder(9, 4, 3, freeze=True), "norm": torch.nn.BatchNorm1d(4)})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ProcessGroup(0, 3, torch.device("cpu")).average_buffers(model)
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert "words.words.weight" in before and changed == {"norm.running_mean", "norm.running_var"}


def pcme(folder, *overrides):
    """A small PCME: residual network, two-way GRU from files, local attention, and two stages, the first one epoch."""
    tiny_resnet(folder / "resnet")
    image = f'model.image={{ kind = "resnet", weights = "{folder / "resnet"}", size = 32, augment = "none" }}'
    words = [GRU, f"model.text.vectors={vectors_file(folder)}", "model.pooling=average", "model.local_attention=true"]
    optim = ["optim.name=adamp", "optim.lr=1e-2", "optim.warmup_epochs=0", "optim.first_stage_epochs=1"]
    changes = ["loss.name=pcme", "augment.erase=0.2", "augment.drop_words=0.1", *overrides]
    return load_recipe(make_toy(folder), [image, *words, *optim, *changes])


def resting(state):
    names = [n for n in state if n.startswith("image.encoder.") or n == "text.encoder.words.weight"]
    assert len(names) > 20 and any(n.endswith("running_mean") for n in names)
    return names


def test_in_the_first_stage_backbone_and_word_vectors_rest_and_in_the_second_all_learn(tmp_path, monkeypatch):
    states, factors = [], []

    def spy_on_the_start(model, loss, config):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return build_optimiser(model, loss, config)

    def spy_on_the_end(path, modules, optimiser, about):
        if path.name == "last.safetensors":
            states.append({name: value.clone() for name, value in modules["model"].state_dict().items()})
            factors.append([])

    def spy_on_the_factor(optimiser, factor):
        (factors[-1] if factors else factors.append([]) or factors[0]).append(factor)
        set_learning_rate(optimiser, factor)

    monkeypatch.setattr(learner, "build_optimiser", spy_on_the_start)
    monkeypatch.setattr(saving, "save_state", spy_on_the_end)
    monkeypatch.setattr(learner, "set_learning_rate", spy_on_the_factor)
    fit(pcme(tmp_path, "data.val_fraction=0"), tmp_path / "run")
    start, first, second, third = states
    assert all(torch.equal(start[n], first[n]) for n in resting(start))
    learns = [n for n, p in start.items() if n not in resting(start) and p.is_floating_point()]
    assert {"text.encoder.mean_gru.weight_hh_l0", "image.head.log_var_local.attention.0.weight"} <= set(learns)
    assert not [n for n in learns if torch.equal(start[n], first[n])]
    still = [n for n in resting(start) if torch.equal(first[n], second[n]) and not n.endswith("num_batches_tracked")]
    assert not still and not torch.equal(second["text.encoder.words.weight"], third["text.encoder.words.weight"])
    steps = len(factors[0])
    assert [len(f) for f in factors[:3]] == [steps] * 3 and steps > 2
    cosine = lambda share: (1 + np.cos(np.pi * share)) / 2
    assert factors[0] == pytest.approx([cosine(k / 2 / steps) for k in range(steps)])  # As long as the second.
    assert factors[1] + factors[2] == pytest.approx([0.1 * cosine(k / 2 / steps) for k in range(2 * steps)])


def test_a_run_interrupted_between_its_stages_resumes_to_the_same_bits(tmp_path):
    recipe = pcme(tmp_path)
    fit(recipe, tmp_path / "whole")
    fit_until(recipe, tmp_path / "parts", lambda about: about["epoch"] == 0)
    shutil.rmtree(tmp_path / "resnet")
    (tmp_path / "glove.3d.txt").unlink()
    fit(recipe, tmp_path / "parts")
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


def test_without_a_validation_split_a_run_states_probabilities_of_csd(tmp_path):
    changes = "data.val_fraction=0", "train.epochs=2", "loss.logit_scale=15", "loss.logit_bias=15"
    fit(pcme(tmp_path, *changes), tmp_path / "run")
    run = load_run(tmp_path / "run")
    a, b = (float(getattr(run.loss.logits, name).detach()) for name in ("logit_scale", "logit_bias"))
    assert run.distance == "csd" and not run.calibrated
    assert (run.logit_scale, run.logit_bias) == pytest.approx((a**2 / (2 * b), b / 2))
    assert abs(run.logit_bias - b) > 5


def test_infonce_keeps_its_scale_below_the_largest_and_a_free_scale_that_crosses_zero_stops_the_run(tmp_path):
    toy = make_toy(tmp_path)
    given = ["loss.infonce_weight=1", "loss.infonce_scale=5", "loss.infonce_largest_scale=5.001"]
    fit(load_recipe(toy, [*given, "optim.logits_lr_multiplier=100", "train.epochs=2"]), tmp_path / "run")
    assert load_run(tmp_path / "run").loss.infonce.logits.logit_scale <= 5.0011
    recipe = load_recipe(toy, ["loss.free_scale=true", "optim.logits_lr_multiplier=1e4"])
    raises(DivergedError, r"epoch 1, step \d+: the free scale of the match logits is -", fit, recipe, tmp_path / "free")
