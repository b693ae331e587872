"""Prompts and their pooling, the choice of K, where images get their classes from, and the command."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.raising import raises
from support.toy import COLOURS, SHAPES, make_toy
from support.words import folded, too_wide

from papers.studies.labelled import Labelled, data_labelled, emoji_labelled, read_class_folder, read_class_names
from papers.studies.prompts import (
    Classifier,
    LabelledEmbeddings,
    best_k,
    certain_prompts,
    halves,
    mixture_weights,
    points,
    pool_prompts,
    read_templates,
    verdict,
)
from papers.studies.zeroshot import evaluate_zeroshot
from sfumato import GaussianEmbedding, PairData, csd_matrix, load_emoji
from sfumato.errors import UserError
from sfumato.models.recipe import load_recipe
from sfumato.training.loop import fit


def gaussians(n, d, seed, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random, dtype=dtype)
    return GaussianEmbedding(mean, torch.randn(n, d, generator=random, dtype=dtype) - 1)


def test_csd_to_the_mixture_is_the_mean_csd_to_its_prompts_and_to_tempting_others_it_is_not():
    c, p, d = 3, 4, 5
    images, prompts, weights = gaussians(6, d, 3), gaussians(c * p, d, 4), torch.rand(c, p, dtype=torch.float64) + 0.1
    shares = weights / weights.sum(1, keepdim=True)
    expected = (csd_matrix(images, prompts).view(6, c, p) * shares).sum(2)
    torch.testing.assert_close(csd_matrix(images, pool_prompts(prompts, weights)), expected)
    mean = (shares.unsqueeze(2) * prompts.mean.view(c, p, d)).sum(1)
    for var in (
        (shares.unsqueeze(2) * prompts.var.view(c, p, d)).sum(1),  # without the spread of the means
        (shares.square().unsqueeze(2) * prompts.var.view(c, p, d)).sum(1),  # of the mean of independent draws
    ):
        assert (csd_matrix(images, GaussianEmbedding(mean, var.log())) - expected).abs().min() > 1e-3


def test_pooling_is_the_loops():
    c, p, d = 70, 3, 5  # More classes than a block of them.
    prompts, weights = gaussians(c * p, d, 1), torch.rand(c, p, generator=torch.Generator().manual_seed(2)) + 0.1
    for pooling in ("mixture", "unit"):
        pooled = pool_prompts(prompts, weights, pooling=pooling)
        for i in range(c):
            own, w = prompts[i * p : (i + 1) * p], (weights[i] / weights[i].sum()).double()
            mean = sum(w[k] * own.mean[k] for k in range(p))
            between = sum(w[k] * (own.mean[k] - mean) ** 2 for k in range(p)) if pooling == "mixture" else 0
            torch.testing.assert_close(pooled.mean[i], mean if pooling == "mixture" else mean / mean.norm())
            torch.testing.assert_close(pooled.var[i], sum(w[k] * own.var[k] for k in range(p)) + between)
    points = GaussianEmbedding.point(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
    alone = pool_prompts(points, torch.ones(2, 1))
    torch.testing.assert_close(alone.mean, points.mean)
    assert torch.isneginf(alone.log_var).all()


def test_the_most_certain_are_kept_and_equal_ones_in_their_order():
    uncertainty = torch.tensor([[3.0, 1.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert certain_prompts(uncertainty, 1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert certain_prompts(uncertainty, 2).tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]
    assert certain_prompts(uncertainty, torch.tensor([3, 2])).tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert certain_prompts(uncertainty, 4).tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    # Of equally good K the largest.
    assert best_k(np.array([[3, 4, 2], [1, 0, 2]])) == 3 and best_k(np.array([[3, 4, 2], [2, 0, 2]])) == 1


@pytest.mark.parametrize("grid", [False, True])
def test_a_k_for_each_class_is_the_slow_search(grid):
    """Class after class, every K recomputed in full; on a grid, where half the distances tie exactly."""
    c, p, d, n = 4, 2 if grid else 5, 2, 40
    images, prompts = gaussians(n, d, 6), gaussians(c * p, d, 7)
    if grid:
        images, prompts = (GaussianEmbedding(e.mean.round(), torch.zeros_like(e.log_var)) for e in (images, prompts))
    labels = np.random.default_rng(8).integers(c, size=n)
    uncertainty = torch.rand(c, p, generator=torch.Generator().manual_seed(9))
    shown = LabelledEmbeddings(images, labels)
    classifier = Classifier(prompts, uncertainty, "squared_l2" if grid else "csd")
    right = lambda k: classifier.right(shown, certain_prompts(uncertainty, torch.from_numpy(k)))[:, 0].sum()
    counts = classifier.right_by_k(shown)
    for k in range(p):
        assert counts[:, k].sum() == right(np.full(c, k + 1))
    start = np.full(c, best_k(counts))
    found = classifier.k_per_class(shown, start)
    slow = start.copy()
    for i in range(c):
        tried = []
        for k in range(1, p + 1):
            changed = slow.copy()
            changed[i] = k
            tried.append(right(changed))
        if max(tried) > right(slow):
            slow[i] = max(k for k in range(1, p + 1) if tried[k - 1] == max(tried))
    assert found.tolist() == slow.tolist()
    assert grid or found.tolist() != start.tolist()
    assert right(found) >= right(start)


def test_fitted_weights_are_the_loops():
    c, p, d = 2, 3, 2
    images, prompts, labels = gaussians(9, d, 10), gaussians(c * p, d, 11), np.array([0, 0, 0, 0, 0, 0, 0, 0, 1])
    labels[:2] = 1
    found = mixture_weights(images, labels, prompts, c, seed=12)
    generator = torch.Generator().manual_seed(12)
    for i in range(c):
        few = images[torch.from_numpy(np.flatnonzero(labels == i)[:5])]
        draws = few.sample(20, generator=generator).flatten(0, 1)
        own = prompts[i * p : (i + 1) * p]
        normals = [torch.distributions.Normal(m, (v + 0.02).sqrt()) for m, v in zip(own.mean, own.var, strict=True)]
        density = torch.stack([normal.log_prob(draws).sum(1) for normal in normals], dim=1).exp()
        weights = 1 / own.total_variance
        weights = weights / weights.sum()
        for _ in range(1000):
            share = density * weights
            weights = (share / share.sum(1, keepdim=True)).sum(0) + 2 - 1
            weights = weights / weights.sum()
        torch.testing.assert_close(found[i], weights)
    # A class without images keeps the start.
    found = mixture_weights(images[:1], np.array([1]), prompts, 2)
    inverse = 1 / prompts.total_variance[:3]
    torch.testing.assert_close(found[0], inverse / inverse.sum())


def test_the_closest_class_and_the_five_closest():
    """Six classes at 0, 1 ... 5; a tie goes to the earlier class; with five classes or fewer the five are all."""
    line = GaussianEmbedding.point(torch.arange(6.0).unsqueeze(1))
    images = GaussianEmbedding.point(torch.tensor([[0.1], [0.5], [0.5], [0.0], [0.0]]))
    right = lambda classes, *labels: Classifier(classes, torch.ones(classes.n, 1), "csd").right(
        LabelledEmbeddings(images, np.array(labels)), torch.ones(classes.n, 1)
    )
    assert right(line, 0, 0, 1, 4, 5).tolist() == [[1, 1], [1, 1], [0, 1], [0, 1], [0, 0]]
    assert right(line[:3], 0, 0, 1, 2, 2)[:, 1].tolist() == [1, 1, 1, 1, 1]


def test_halves_share_no_picture_and_every_class_is_in_both():
    labels = np.array([0] * 4 + [1] * 5 + [2])
    first, second = halves(labels, 3)
    assert sorted([*first, *second]) == list(range(10))
    assert np.bincount(labels[first], minlength=3).tolist() == [2, 2, 0]
    assert [a.tolist() for a in halves(labels, 3)] == [first.tolist(), second.tolist()]
    assert halves(labels, 4)[0].tolist() != first.tolist()


@dataclass
class Picture:
    mean: list[float] | None
    location: str = "an image"

    def read_bytes(self):
        if self.mean is None:
            raise ValueError("cannot be decoded")
        return self.mean


class Table:
    """A matcher whose images are their own means and whose texts are looked up: text -> (mean, variance)."""

    def __init__(self, texts, distance="squared_l2"):
        self.texts, self.distance = texts, distance
        self.model = SimpleNamespace(
            image=SimpleNamespace(processor=self, embed=self.embed), embed_texts=self.embed_texts
        )

    def read(self, items, *, progress=None, on_error=None):
        kept, means = [], []
        for i, item in enumerate(items):
            try:
                means.append(item())
                kept.append(i)
            except ValueError as error:
                on_error(i, error)
        return means, np.array(kept, int)

    def embed(self, store, progress=None):
        return GaussianEmbedding(torch.tensor(store), torch.full((len(store), len(store[0])), -3.0))

    def embed_texts(self, texts):
        mean, var = (torch.tensor([self.texts[t][i] for t in texts]).view(len(texts), -1) for i in (0, 1))
        return GaussianEmbedding(mean, var.log())


def labelled(pictures, classes=("a", "b")):
    """(mean or None, class number) of every image."""
    sources = tuple(Picture(None if m is None else [m], f"picture {i}") for i, (m, _) in enumerate(pictures))
    labels = np.array([label for _, label in pictures])
    return Labelled(sources, tuple(map(str, range(len(pictures)))), labels, tuple(classes), tuple(classes))


BOUNDARY = Table({"sure a": (0.0, 1.0), "vague a": (4.0, 2.0), "sure b": (10.0, 1.0), "vague b": (10.0, 2.0)})
"""With one prompt the border between a and b is at 5, with both at 6."""


def by_name(report):
    return {m["name"]: m for m in report["methods"]}


def test_k_is_chosen_on_other_pictures_and_only_the_oracle_sees_the_reported_ones():
    templates = ["sure {}", "vague {}"]
    held = labelled([(5.5, 0), (5.4, 0), (11.0, 1)])  # right with both prompts only
    reported = labelled([(0.0, 0), (5.5, 1), (5.6, 1)])  # right with one prompt only
    report = evaluate_zeroshot(
        BOUNDARY, reported, templates, filters=["global", "per-class", "oracle"], choose_on=held, n_resamples=50
    )
    rows = by_name(report)
    assert rows["K most certain"]["k"] == [2, 2] and rows["oracle, K most certain"]["k"] == [1, 1]
    assert rows["K most certain"]["top1"]["value"] == pytest.approx(1 / 3)
    assert rows["oracle, K most certain"]["top1"]["value"] == 1
    assert rows["oracle, K most certain"]["against_all"]["value"] == pytest.approx(2 / 3)
    assert rows["all 2 prompts"]["k"] == [2, 2] and rows["one prompt: sure {}"]["top1"]["value"] == 1
    assert (report["n_images"], report["n_chosen_on"]) == (3, 3)
    again = by_name(evaluate_zeroshot(BOUNDARY, labelled([(9.0, 0), (5.5, 1)]), templates, choose_on=held))
    for name in ("K most certain", "K most certain, per class"):
        assert again[name]["k"] == rows[name]["k"], "the choice depends on what is reported"


def test_accuracy_by_the_number_of_prompts_kept_counts_each_number_alone():
    """Figure C.2 of the PCME++ paper, by hand: class a is at 0 or, with both prompts, at 2, and class b at 10."""
    templates = ["sure {}", "vague {}"]
    held, reported = [(5.5, 0), (5.4, 0), (11.0, 1)], [(0.0, 0), (5.5, 1), (5.6, 1), (0.1, 1)]
    report = evaluate_zeroshot(
        BOUNDARY, labelled(reported), templates, filters=["none,global, oracle"], choose_on=labelled(held)
    )
    assert [one["images"] for one in report["prompts_kept"]] == ["others", "reported"]
    for one, pictures in zip(report["prompts_kept"], (held, reported), strict=True):
        right = [[int(abs(x - a) > abs(x - 10)) == label for x, label in pictures] for a in (0, 2)]
        assert one["top1"] == pytest.approx([np.mean(r) for r in right])
        for c in (0, 1):
            own = [sum(ok for ok, (_, label) in zip(r, pictures, strict=True) if label == c) for r in right]
            assert one["best_k"][c] == (2 if own[1] >= own[0] else 1)
        assert min(one["top1"]) <= min(one["random_top1"]) and max(one["random_top1"]) <= max(one["top1"])
    assert report["prompts_kept"][0]["best_k"] == [2, 2] and report["prompts_kept"][1]["best_k"] == [2, 1]
    nothing = evaluate_zeroshot(BOUNDARY, labelled([(0.0, 1), (0.0, 0)]), templates, filters=["oracle"])
    assert nothing["prompts_kept"][0]["best_k"] == [2, None] and nothing["prompts_kept"][0]["top1"] == [0.5, 0.5]


def test_the_halves_that_choose_are_not_reported():
    report = evaluate_zeroshot(BOUNDARY, labelled([(0.0, 0)] * 5 + [(10.0, 1)] * 4), ["sure {}", "vague {}"], seed=1)
    assert (report["n_images"], report["n_chosen_on"]) == (5, 4)
    alone = evaluate_zeroshot(BOUNDARY, labelled([(0.0, 0)] * 5), ["sure {}", "vague {}"], filters=["oracle"])
    assert (alone["n_images"], alone["n_chosen_on"], alone["n_empty"]) == (5, 0, 1)
    lone = labelled([(0.0, 0), (10.0, 1)])
    raises(UserError, "no class has two images", evaluate_zeroshot, BOUNDARY, lone, ["sure {}"])


def test_differences_are_paired_and_without_resamples_have_no_interval():
    pictures = labelled([(0.0, 0), (5.5, 1), (5.5, 0), (11.0, 1)])
    report = evaluate_zeroshot(BOUNDARY, pictures, ["sure {}", "vague {}"], filters=["none"], n_resamples=0)
    one, everything, weighted = report["methods"]
    assert (one["top1"]["value"], everything["top1"]["value"]) == (0.75, 0.75) and one["top1"]["low"] is None
    assert everything["against_all"]["value"] == 0 and one["against_random"] is None and one["top5"] is None
    assert report["template_top1"] == [0.75, 0.75] and report["certain_is_right"] is None
    assert weighted["k"] is None and report["best_alone"] is None and report["verdict"] == "Nothing was filtered."
    resampled = evaluate_zeroshot(BOUNDARY, pictures, ["sure {}", "vague {}"], filters=["none"])
    everything = resampled["methods"][1]
    assert (everything["against_all"]["low"], everything["against_all"]["high"]) == (0, 0)
    assert everything["top1"]["low"] < 0.75 < everything["top1"]["high"]
    assert resampled == evaluate_zeroshot(BOUNDARY, pictures, ["sure {}", "vague {}"], filters=["none"])


def test_whether_certain_templates_are_the_better_ones():
    """The vaguer the template, the nearer its a lies to b, and the more images of a it loses."""
    texts = {f"{i} {c}": (float(3 * i) if c == "a" else 10.0, 1.0 + i) for i in range(3) for c in "ab"}
    pictures = labelled([(0.0, 0), (3.0, 0), (5.5, 1), (6.2, 1), (9.0, 1)])
    report = evaluate_zeroshot(Table(texts), pictures, [f"{i} {{}}" for i in range(3)], filters=["none"])
    assert report["template_top1"] == pytest.approx([1.0, 0.6, 0.6])
    assert report["certain_is_right"] == pytest.approx(-(0.75**0.5))


def test_a_model_of_points_is_not_filtered():
    points = Table({"sure a": (0.0, 0.0), "sure b": (10.0, 0.0)})
    pictures = labelled([(0.0, 0), (0.0, 0), (10.0, 1), (10.0, 1)])
    raises(UserError, "no variances to filter prompts by", evaluate_zeroshot, points, pictures, ["sure {}"])
    report = evaluate_zeroshot(points, pictures, ["sure {}"], filters=["none"], choose_on=pictures)
    assert [m["top1"]["value"] for m in report["methods"]] == [1, 1]


def test_another_distance_may_decide():
    """By means alone 4 is closer to 0 than to 10; by csd the variance of 50 is in the way."""
    table = Table({"sure a": (0.0, 50.0), "sure b": (10.0, 1.0)}, distance="csd")
    for distance, share in ((None, 0.0), ("csd", 0.0), ("squared_l2", 1.0)):
        report = evaluate_zeroshot(table, labelled([(4.0, 0)]), ["sure {}"], filters=["none"], distance=distance)
        assert report["methods"][0]["top1"]["value"] == share and report["distance"] == (distance or "csd")


def test_the_templates_of_clip():
    templates = read_templates()
    assert len(templates) == len(set(templates)) == 80 and templates[0] == "a photo of a {}."
    assert all(t.count("{}") == 1 for t in templates)
    assert {"itap of my {}.", "a {} in a video game.", "a photo of the hard to see {}."} < set(templates)


def test_bad_templates(tmp_path):
    path = tmp_path / "templates.txt"
    for content, message in (
        ("a photo of a {}.\n{} and {}\n", "templates.txt:2: expected one {} for the class"),
        ("a {}\n\na {}\n", "the template 'a {}' occurs twice"),
    ):
        path.write_text(content)
        raises(UserError, message, read_templates, path)


def test_class_names(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("n01 tench, Tinca tinca\n\nn02 goldfish\n")
    assert read_class_names(path) == {"n01": "tench, Tinca tinca", "n02": "goldfish"}
    path.write_text("two words\tsomething else\nn02\ta {} name\n")
    assert read_class_names(path) == {"two words": "something else", "n02": "a {} name"}
    for content, message in (
        (b"n01\n", ":1: expected a class, a tab"),
        (b"\n", "names.txt holds no text"),
        (b"a \xff\n", "not UTF-8"),
    ):
        path.write_bytes(content)
        raises(UserError, message, read_class_names, path)


def test_class_folders(tmp_path):
    for name in ("polar_bear/1.png", "polar_bear/more/2.JPG", "polar_bear/notes.txt", "fox/1.png", ".hidden/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "1.png").touch()
    found = read_class_folder(tmp_path)
    assert found.classes == ("empty", "fox", "polar bear") and found.keys == ("empty", "fox", "polar_bear")
    assert found.ids == ("fox/1.png", "polar_bear/1.png", "polar_bear/more/2.JPG")
    assert found.labels.tolist() == [1, 2, 2]
    named = read_class_folder(tmp_path, {"polar_bear": "white bear", "absent": "yeti", "fox": "red fox"})
    assert named.classes == ("white bear", "yeti", "red fox") and named.labels.tolist() == [2, 0, 0]
    message = "there is no name for the class 'fox'; the first that have one: polar_bear"
    raises(UserError, message, read_class_folder, tmp_path, {"polar_bear": "white bear"})
    raises(UserError, "expected one for each class", read_class_folder, tmp_path / "empty")


def test_emoji_have_one_class_each():
    groups, subgroups = emoji_labelled("group"), emoji_labelled("subgroup", style="noto")
    assert len(groups.classes) == 10 and "animals & nature" in groups.classes
    assert len(subgroups.classes) == len(set(subgroups.classes)) == 99
    assert groups.ids == load_emoji()["style"].image_ids and all(i.endswith("/noto") for i in subgroups.ids)
    fox = groups.ids.index("1F98A/fluent3d")
    assert groups.classes[groups.labels[fox]] == "animals & nature"


def test_data_whose_only_text_of_a_picture_is_its_class():
    pictures = (Picture([0.0]),) * 3
    texts, pairs = ("fox", "owl", "fox"), np.array([[0, 0], [1, 1], [2, 2]])
    data = PairData(("x", "y", "z"), pictures, ("0", "1", "2"), texts, ("caption",) * 3, pairs)
    found = data_labelled(data)
    assert found.classes == ("fox", "owl") and found.labels.tolist() == [0, 1, 0]
    two = PairData(("x",), pictures[:1], ("0", "1"), ("fox", "owl"), ("caption",) * 2, np.array([[0, 0], [0, 1]]))
    raises(UserError, "image x has 2 texts; expected one each", data_labelled, two)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A trained run, and its images in folders: ROOT/red_circle/picture.png."""
    folder = tmp_path_factory.mktemp("zeroshot")
    recipe = make_toy(folder)
    fit(load_recipe(recipe), folder / "run")
    for k, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
        (folder / "classes" / f"{colour}_{shape}").mkdir(parents=True)
        for twin in range(2):
            target = folder / "classes" / f"{colour}_{shape}" / f"{twin}.png"
            target.write_bytes((folder / "data" / f"{k:02d}{twin}.png").read_bytes())
    (folder / "templates.txt").write_text("a {}\nsome {}\n{}\n")
    rows = [(f"data/{k:02d}0.png", SHAPES[k % 4]) for k in range(24)]
    (folder / "shapes.csv").write_text("image,caption,split\n" + "".join(f"{i},{s},test\n" for i, s in rows))
    return folder


def study(run, *settings):
    return "zeroshot", run, *(f"zeroshot.{setting}" for setting in settings)


def test_the_study_of_folders(work, papers, tmp_path):
    given = f"images={work / 'classes'}", f"templates={work / 'templates.txt'}", "filter=none,global,per-class,oracle"
    out = papers.printed(*study(work / "run", *given), "--bootstrap", 100, "--out", tmp_path / "out")
    words = folded(out)
    assert "24 images of 24 classes, K chosen on 24 others; by csd" in words
    for shown in (
        "one prompt: a {}", "all 3 prompts", "weighted by 1 / variance", "oracle, K most certain, per class",
        "always the most frequent class", "whether filtering helps cannot be told",
        "top-1 on the reported images by the number of prompts kept",
    ):  # fmt: skip
        assert shown in words
    assert not too_wide(out, tmp_path)
    written = json.loads((tmp_path / "out" / "zeroshot.json").read_text())
    report = written["report"]
    assert [len(one["top1"]) for one in report["prompts_kept"]] == [3, 3]
    assert report["total_variance"][0][1] > 0 and written["split"] == "test" and written["settings"]["style"]
    page = (tmp_path / "out" / "analysis.html").read_text()
    assert page.count("<svg") == 4 and "oracle, K most certain, per class" in page and "#zeroshot" in page


def test_the_study_of_emoji_and_of_a_split(work, papers, tmp_path):
    for k in range(24):
        target = tmp_path / "shapes" / SHAPES[k % 4] / f"{k}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((work / "data" / f"{k:02d}1.png").read_bytes())
    given = study(work / "run", f"templates={work / 'templates.txt'}", f"choose_on={tmp_path / 'shapes'}")
    data = "data.source=manifest", f"data.path={work / 'shapes.csv'}", "--data", work / "toy.toml"
    result = papers.json(*given, *data, "--out", tmp_path / "out")["zeroshot"]["report"]
    assert result["classes"] == sorted(SHAPES) and (result["n_images"], result["n_chosen_on"]) == (24, 24)
    assert result["methods"][0]["top5"] is None
    groups = sorted(set(emoji_labelled("group").keys) - {"flags"})
    (tmp_path / "names.txt").write_text("flags\ta flag\n" + "".join(f"{g}\t{g}\n" for g in groups))
    emoji = "emoji=group", "style=noto", f"classes={tmp_path / 'names.txt'}", "filter=none"
    found = papers.json(*study(work / "run", *emoji), "--bootstrap", 0, "--out", tmp_path / "out")["zeroshot"]["report"]
    assert found["classes"] == ["a flag", *groups] and found["n_chosen_on"] == 0


def test_the_study_leaves_out_what_it_cannot_read(work, papers, tmp_path):
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "0.png").write_bytes(b"no image")
    (tmp_path / "broken" / "a" / "1.png").write_bytes((work / "data" / "000.png").read_bytes())
    (tmp_path / "broken" / "b").mkdir()
    words = folded(papers.printed(*study(work / "run", f"images={tmp_path / 'broken'}", "filter=none")))
    assert "1 image of 2 classes" in words and "1 left out: " in words
    assert "which can only be wrong answers: 1" in words


def test_no_conclusion_is_drawn_from_methods_at_chance():
    """Twelve points more of something that a constant answer beats help nobody."""
    interval = lambda value, low, high: {"value": value, "low": low, "high": high}
    better = interval(0.12, 0.05, 0.19)
    judged = {"name": "K", "against_all": better, "against_random": better, "against_random_order": better}
    at, above = (verdict([judged | {"top1": interval(low + 0.1, low, low + 0.2)}], 1 / 3) for low in (0.3, 0.4))
    assert "cannot be told" in at and "helps" not in at.replace("filtering helps", "")
    assert "+12.0 [+5.0, +19.0] points against all prompts, which helps" in above
    both = verdict([judged | {"top1": interval(low + 0.1, low, low + 0.2)} for low in (0.3, 0.4)], 1 / 3).splitlines()
    assert both[0] == "K: not better than always answering the most frequent class." and both[1] == above
    assert verdict([judged | {"top1": better, "against_all": interval(-0.1, -0.2, -0.05)}], 0).count("which hurts") == 1
    assert points(None) == "–" and points(interval(0.1, None, None)) == "+10.0"


def test_a_bad_input_is_one_clear_message_and_status_2(work, papers):
    classes = f"images={work / 'classes'}"
    cases = [
        ([classes, "emoji=group"], "give one of zeroshot.images and zeroshot.emoji"),
        (["images=nowhere"], "there is no folder nowhere"),
        (["emoji=tag"], "group and subgroup, got 'tag'"),
        (["emoji=group", "style=oil"], "unknown style 'oil'"),
        ([classes, "filter=best"], "unknown filter 'best'"),
        ([classes, "pooling=sum"], "unknown pooling 'sum'"),
        ([classes, "distance=cds"], "did you mean 'csd'?"),
        ([classes, "templates=none.txt"], "there is no file none.txt"),
        ([classes, "classes=none.txt"], "there is no file none.txt"),
        ([classes, f"choose_on={work / 'classes'}"], "give another one, or zeroshot.filter=oracle"),
        ([classes, "prompts=3"], "expected zeroshot.KEY=VALUE with one of images, emoji"),
        ([], "texts; expected one each"),
    ]
    for settings, message in cases:
        assert message in folded(papers.refused(*study(work / "run", *settings)))
    assert "is for the command zeroshot" in papers.refused("analyse", work / "run", "zeroshot.emoji=group")
    assert "no config.json in it" in papers.refused(*study(work, "filter=none"))
