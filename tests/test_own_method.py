"""Losses, distances, methods and estimators of one's own: registered, imported by commands, and done without."""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.batches import MATCH, batch
from support.raising import failing, raises
from support.toy import make_toy

import sfumato as public
from sfumato import ESTIMATORS, LOSSES, GaussianEmbedding, imports, load_recipe, register_loss
from sfumato.distances import DISTANCES, register_distance
from sfumato.errors import UserError
from sfumato.losses.base import LossOptions, PairBlock, loss_of_block, option
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.models.run import load_run

GUIDE = (Path(__file__).parents[1] / "docs/guides/own-method.md").read_text()
OWN = re.search(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)[1]
TABLES = LOSSES, DISTANCES, ESTIMATORS


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    before = [dict(table) for table in TABLES]

    def forget_all():
        monkeypatch.setattr(imports, "_digests", {})
        monkeypatch.setattr(imports, "_given", {})
        for table, known in zip(TABLES, before, strict=True):
            for name in set(table) - set(known):
                del table[name]

    forget_all()
    yield forget_all
    forget_all()


@dataclass(frozen=True)
class PlainOptions(LossOptions):
    weight: float = option(2.0, "weight", gt=0)
    logit_scale: float = option(5.0, "scale", gt=0)
    logit_bias: float = option(5.0, "bias")


def plain_loss(image, text, match, options):
    logit = options.logit_bias - options.logit_scale * public.csd_matrix(image, text)
    return {"match": options.weight * torch.nn.functional.binary_cross_entropy_with_logits(logit, match)}


def test_a_plain_function_is_the_built_in_loss_which_starts_from_its_options_and_names_wrong_input():
    register_loss("plain", plain_loss, PlainOptions)
    built_in, found = LOSSES["pcmepp"](PCMEPPOptions(alpha=0, beta=0)).double(), []
    for loss in (LOSSES["plain"]().double(), built_in):
        leaves = [t.requires_grad_() for e in batch() for t in (e.mean, e.log_var)]
        output = loss(GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:]), MATCH)
        found.append((output.total, torch.autograd.grad(output.total, [*leaves, *loss.logits.parameters()])))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert LOSSES["plain"]().match_logits() == (5.0, 5.0)
    small = PairBlock.whole(*batch(), MATCH, "test")
    whole = loss_of_block(LOSSES["plain"]().double(), small, max_pairs=2)  # It is never split.
    torch.testing.assert_close(whole.total, found[0][0])
    options = PCMEPPOptions(logit_scale=3.0, logit_bias=1.0)
    explicit = pcmepp_loss(*batch(), MATCH, options, logit_scale=3.0, logit_bias=1.0)
    torch.testing.assert_close(pcmepp_loss(*batch(), MATCH, options).total, explicit.total)
    wrong = torch.zeros(4, 3)
    with pytest.raises(TypeError, match="pcmepp_loss: image must be a GaussianEmbedding, got Tensor; wrap means in"):
        pcmepp_loss(wrong, wrong, MATCH)
    raises(TypeError, "csd: x must be a GaussianEmbedding, got Tensor; wrap means in", public.csd_matrix, wrong, wrong)


def test_functions_are_checked_and_a_distance_of_ones_own_is_computed_in_blocks():
    register_loss("scalar", lambda image, text, match, options: (image.mean**2).mean())
    assert LOSSES["scalar"]()(*batch(), MATCH).terms.keys() == {"loss"}
    sums = lambda image, *_: {"a": image.mean.sum(1)}
    for name, function, message in (
        ("rows", sums, r"rows: term 'a' is \(4,\) torch.float64; expected a scal"),
        ("number", lambda *_: {"a": 1.0}, "number: term 'a' is float"),
        ("nothing", lambda *_: {}, "nothing: the loss has returned no term"),
    ):
        register_loss(name, function)
        raises(TypeError, message, LOSSES[name](), *batch(), MATCH)
    register_loss("pull", lambda image, text, match, options: image.mean.sum())
    register_loss("push", lambda image, text, match, options: image.mean.sum())
    made = lambda name: load_recipe(public.find_recipe("emoji-pixels"), [f"loss.name={name}"])
    first, other = made("pull"), made("push")
    assert first == made("pull") != other and first.loss.name == "pull"
    register_distance("l1", lambda x, y: (x.mean - y.mean).abs().sum(-1))
    x, y = batch()
    expected = torch.tensor([[(a - b).abs().sum() for b in y.mean] for a in x.mean], dtype=x.dtype)
    torch.testing.assert_close(public.get_distance("l1").matrix(x, y), expected)
    torch.testing.assert_close(public.get_distance("l1").row(x, y[:4]), expected.diagonal())
    torch.testing.assert_close(LOSSES["pcmepp"](PCMEPPOptions(distance="l1")).distance.matrix(x, y), expected)


class Undecorated(LossOptions):
    margin: float = 1.0


@dataclass(frozen=True)
class Bare(LossOptions):
    margin: float = 1.0


@dataclass(frozen=True)
class Biased(LossOptions):
    logit_bias: float = option(1.0, "bias")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: register_loss("pcme", plain_loss), ValueError, "there is a loss 'pcme' already"),
    (lambda: register_loss("a b", plain_loss), ValueError, "'a b' is not an identifier"),
    (lambda: register_loss("new", 3), TypeError, "expected a function"),
    (lambda: register_loss("new", plain_loss, dict), TypeError, "expected a dataclass derived from LossOptions"),
    (lambda: register_loss("new", plain_loss, Undecorated), TypeError, "option 'margin' of Undecorated is none"),
    (lambda: register_loss("new", plain_loss, Bare), TypeError, "the option 'margin' of Bare is none"),
    (lambda: register_loss("new", plain_loss, Biased), TypeError, "logit_bias is learnt with logit_scale"),
    (lambda: register_loss("new", LOSSES["pcme"], PlainOptions), TypeError, "needs its options as Options"),
    (lambda: register_distance("a b", max), ValueError, "'a b' is not an identifier"),
    (lambda: register_distance("new", 3), TypeError, "formula is 3"),
    (lambda: register_distance("csd", max), ValueError, "there is a distance 'csd' already"),
    (lambda: register_distance("nearest_of_2", max), ValueError, "already"),
    (lambda: register_distance("new", max, points="some"), ValueError, "points is 'some'"),
])  # fmt: skip
def test_wrong_registrations_are_refused(call, error, message):
    raises(error, message, call)


def test_a_corrected_definition_replaces_the_one_of_the_same_place(tmp_path, monkeypatch):
    one, own = GaussianEmbedding.point(torch.zeros(1, 1)), tmp_path / "mine.py"
    for factor in (1, 2):
        own.write_text(
            "from sfumato import register_distance, register_loss\n"
            "register_distance('own_pair', lambda x, y: x.mean.sum(-1) * y.mean.sum(-1))\n"
            f"register_loss('own_pair', lambda image, text, match, options: match.sum() * {factor})\n"
        )
        imports.import_own([str(own)])
        assert LOSSES["own_pair"]()(one, one, torch.ones(1, 1)).total == factor
    monkeypatch.syspath_prepend(tmp_path)
    imports.import_own(["mine"])
    assert sys.modules.pop("mine").__file__ == str(own)
    other = tmp_path / "other.py"
    other.write_text(own.read_text() + "# another file\n")
    raises(UserError, "there is a distance 'own_pair' already", imports.import_own, [str(other)])
    del LOSSES["own_pair"], DISTANCES["own_pair"]


def test_a_run_of_ones_own_loss_is_used_without_it(tmp_path, sfumato, monkeypatch, forget):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    recipe = ("train", make_toy(tmp_path / "toy"), "train.epochs=1", "loss.name=margin", "loss.weight=0.2")
    err = sfumato.refused(*recipe, "--out", "run")
    assert "loss.name: unknown 'margin'" in err and "--import FILE" in err and not Path("run").exists()
    sfumato.printed(*recipe, "--import", "mine.py", "--out", "run")
    assert {"loss/margin", "loss/match"} <= set(json.loads(Path("run/log.jsonl").read_text().splitlines()[0]))
    loaded = public.load("run")
    embedded = loaded.embed_texts(["a cat"])
    forget()
    shutil.move("mine.py", "own.py")
    again = public.load("run")
    torch.testing.assert_close(again.embed_texts(["a cat"]).mean, embedded.mean)
    assert (again.logit_scale, again.logit_bias) == (loaded.logit_scale, loaded.logit_bias)
    sfumato.printed("index", "run", "--split", "test", "--out", "i")
    for command in (("evaluate", "run", "run"), ("export", "run", "e"), ("search", "i", "a cat"), ("trust", "run")):
        sfumato.printed(*command)
    assert "margin" not in LOSSES  # Nothing of the run was executed.
    err = sfumato.refused("train", "run/recipe.toml", "--out", "next")
    assert "there is no file" in err and "--import FILE" in err and not Path("next").exists()
    assert "--import FILE" in sfumato.refused("evaluate", "run", "run", "--distance", "l1_means")
    assert "l1_means" in sfumato.printed("evaluate", "run", "run", "--distance", "l1_means", "--import", "own.py")


def test_training_goes_on_where_the_file_is_now(tmp_path, sfumato, monkeypatch, forget):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    recipe, text = tmp_path / "own.toml", make_toy(tmp_path / "toy").read_text()
    recipe.write_text('imports = ["mine.py"]\n' + re.sub(r"\[loss\]\n(.+\n)*", '[loss]\nname = "margin"\n', text))
    sfumato.printed("train", recipe, "train.epochs=1", "--out", "run")
    assert load_recipe("run/recipe.toml").imports == (str(tmp_path / "mine.py"),)
    shutil.move("mine.py", "moved.py")
    forget()
    sfumato.printed("train", "run/recipe.toml", "train.epochs=2", "--import", "moved.py", "--out", "run")
    assert "margin" in LOSSES


def test_a_loss_that_a_program_registered_leaves_a_run_that_opens(tmp_path, monkeypatch):
    register_loss("plain", plain_loss, PlainOptions)
    public.fit(load_recipe(make_toy(tmp_path / "toy"), ["train.epochs=1", "loss.name=plain"]), tmp_path / "run")
    before = public.load(tmp_path / "run").embed_texts(["a cat"])
    del LOSSES["plain"]
    with pytest.raises(UserError, match="unknown loss 'plain'.*--import FILE"):
        load_run(tmp_path / "run").loss(*batch(dtype=torch.float32), MATCH)
    torch.testing.assert_close(public.load(tmp_path / "run").embed_texts(["a cat"]).mean, before.mean)


@pytest.mark.parametrize(("content", "message"), [
    ("x = 1\nraise RuntimeError('no')\n", r"bad.py:2: RuntimeError: no"), ("def (:\n", r"bad.py:1: SyntaxError"),
    ("import sys\nsys.exit(3)\n", r"bad.py:2: SystemExit: 3"),
    ("import beside\n\nbeside.fail()\n", r"bad.py:3: ValueError: beside it"),
    ("import sfumato\nsfumato.register_loss('pcme', max)\n", r"bad.py:2: ValueError: register_loss: there is"),
])  # fmt: skip
def test_a_file_that_fails_is_named_with_its_line(tmp_path, monkeypatch, content, message):
    (tmp_path / "bad.py").write_text(content)
    (tmp_path / "beside.py").write_text("def fail():\n    raise ValueError('beside it')\n")
    monkeypatch.chdir(tmp_path)
    raises(UserError, message, imports.import_own, ["bad.py"])
    assert str(tmp_path) not in sys.path


def test_packages_are_found_by_their_entry_point_and_missing_files_are_named(monkeypatch, capsys, tmp_path):
    good = SimpleNamespace(value="good", load=lambda: register_loss("from_package", plain_loss, PlainOptions))
    entries = [SimpleNamespace(value="bad.module", load=failing(ImportError("broken"))), good]
    monkeypatch.setattr(imports, "entry_points", lambda group: entries if group == "sfumato" else [])
    imports.load_plugins.cache_clear()
    recipe = load_recipe(public.find_recipe("emoji-pixels"), ["loss.name=from_package", "loss.weight=3"])
    assert recipe.loss.options() == PlainOptions(weight=3.0)
    assert "bad.module" in capsys.readouterr().err and imports.load_plugins.cache_info().currsize == 1
    imports.load_plugins.cache_clear()
    raises(UserError, "cannot import .*none.py: there is no such file", imports.import_own, [str(tmp_path / "none.py")])
    for name in ("no_such_module", "./relative"):
        raises(UserError, f"cannot import the module '{name}'.*a file's path", imports.import_own, [name])
