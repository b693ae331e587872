"""Multiplicity: correlations against scipy, features against loops, the readers, and the commands on tiny files."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from support.pictures import encoded, noise
from support.raising import raises

from papers.multiplicity import data, ranking
from papers.multiplicity import features as module
from papers.multiplicity.data import CORRELATIONS, Captions, correlations, read_captions, read_split
from papers.multiplicity.estimate import ESTIMATORS, TAUGHT, Scene
from papers.multiplicity.features import COVERAGE, FEATURES, SHARPNESS, References
from papers.multiplicity.ranking import ranked
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.metrics.bootstrap import on_all
from sfumato.models.run import load_model

TEXTS = ["A man rides a wave", "A man rides a red wave", "two cats, one sofa", "a cat with a hat", "Waves and a man"]


def line(i: int, **other: object) -> str:
    values = {"clip_p10": i % 3 / 10, "blip2_p10": i % 4 / 10, "clip_rr": 1 / (1 + i), "blip2_rr": 0.5}
    row = {"id": i, "image_id": 10 * i, "caption": f"{TEXTS[i % 5]} and {i} birds", "relevant": list(range(i % 7))}
    return json.dumps(row | values | other) + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(map(line, range(24))))
    (tmp_path / "validation.jsonl").write_text("".join(map(line, range(24, 36))))
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"id": i, "caption": t}) + "\n" for i, t in enumerate(TEXTS))
    )
    return tmp_path


def test_correlations_and_their_resamples_are_those_of_scipy():
    random = np.random.default_rng(0)
    x, y = random.integers(6, size=40).astype(float), random.normal(size=40).round(1)
    y += 0.3 * x
    counts = random.multinomial(40, np.full(40, 1 / 40), size=3).astype(float)
    for name, slow in (("pearson", "pearsonr"), ("kendall", "kendalltau"), ("spearman", "spearmanr")):
        statistic, reference = CORRELATIONS[name](x, y), getattr(scipy.stats, slow)
        assert on_all(statistic, 40) == pytest.approx(reference(x, y).statistic)
        rows = [np.repeat(np.arange(40), own.astype(int)) for own in counts]
        np.testing.assert_allclose(statistic(counts), [reference(x[r], y[r]).statistic for r in rows])
    tau_c = scipy.stats.kendalltau(x, y, variant="c").statistic
    assert abs(on_all(CORRELATIONS["kendall"](x, y), 40) - tau_c) > 0.01
    constant = correlations(np.full(40, 0.1), y, n_resamples=5)
    assert {(value.value, value.low) for value in constant.values()} == {(None, None)}


def test_features_are_those_of_loops():
    vectors = np.random.default_rng(1).normal(size=(5, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    stems = [[module._stem(word) for word in re.findall("[a-z]+", text.lower())] for text in TEXTS]
    every = References(TEXTS, vectors).features()
    for i, asked in enumerate(stems):  # Each is placed among the others.
        known = stems[:i] + stems[i + 1 :]
        idf = {w: math.log(5 / (sum(w in s for s in known) + 0.5)) for w in asked}
        content = {w: idf[w] for w in asked if w not in ("a", "and", "with")}
        cosines = [float(vectors[i] @ v) for j, v in enumerate(vectors) if j != i]
        wanted = {"words": len(asked), "rarest word": max(idf.values()), "nearest": max(cosines)}
        wanted |= {"content words": len(content), "content idf": sum(content.values())}
        wanted["mean idf"] = sum(idf[w] for w in asked) / len(asked)
        for k in COVERAGE:
            lacks = [sum(v for w, v in content.items() if w not in s) for s in known]
            wanted[f"coverage {k:g}"] = math.log(sum(math.exp(-k * one) for one in lacks) + 0.01)
        for k in SHARPNESS:  # The caption itself counts as an opposite one.
            wanted[f"density {k}"] = math.log(sum(math.exp(k * (c - 1)) for c in [*cosines, -1]))
        pairs = [p for s in known for p in zip(["", *s], [*s, ""], strict=True)]
        logs = [
            math.log((pairs.count(p) + 0.5) / (sum(q[0] == p[0] for q in pairs) + 5))
            for p in zip(["", *asked], [*asked, ""], strict=True)
        ]
        wanted |= {"log probability": sum(logs), "mean log probability": sum(logs) / len(logs)}
        found = dict(zip(FEATURES, every[i], strict=True))
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5), TEXTS[i]


def test_the_readers_know_both_forms(folder):
    split = read_split(folder, "train")
    assert split.labels["log_relevant"][:8] == pytest.approx(np.log([1, 1, 2, 3, 4, 5, 6, 1]))
    assert split.labels["p10_mean"][:3] == pytest.approx([0, 0.1, 0.2]) and split.rows[2]["image_id"] == 20
    (folder / "own").mkdir()
    head = "id,image_id,best_caption,blip2_rr,clip_rr,blip2_pk,clip_pk\n"
    (folder / "own" / "train.csv").write_text(head + '7,8,"a, b",.5,1,.2,.4\n')
    published = read_split(folder / "own", "train")
    assert published.texts == ["a, b"] and "log_relevant" not in published.labels
    assert {k: float(v[0]) for k, v in published.labels.items()} == pytest.approx(
        {"p10_mean": 0.3, "rr_mean": 0.75, "clip_p10": 0.4, "blip2_p10": 0.2, "clip_rr": 1, "blip2_rr": 0.5}
    )
    assert set(Captions.joined(split, published).labels) == set(published.labels)
    for text, message in (
        ("", "holds no captions"),
        (line(0) + "{}", "bad.jsonl:2: caption: Field required"),
        (line(0) + "\n{", "bad.jsonl:3: the line: Invalid JSON"),
        (line(0, caption=" "), "bad.jsonl:1: caption"),
        (line(0) + json.dumps({"caption": "a"}), "only 1 of 2 captions have clip_p10"),
        (line(0, clip_rr="x"), "clip_rr: Input should be a valid number"),
        (line(0, clip_rr=float("nan")), "clip_rr"),
        (line(0, relevant="[1, 2]"), "relevant: Input should be a valid array"),
    ):
        (folder / "bad.jsonl").write_text(text)
        raises(UserError, re.escape(message), read_captions, folder / "bad.jsonl")
    (folder / "bad.csv").write_text("best_caption,clip_pk\na,.1\nb,.1,3\n")
    raises(UserError, "bad.csv:3: more values", read_captions, folder / "bad.csv")
    raises(UserError, "neither other.jsonl nor other.csv", read_split, folder, "other")


@pytest.fixture
def scene(folder):
    return Scene(
        read_split(folder, "train"), TEXTS, ["a bird on a roof", "two birds and a cat", TEXTS[0].upper() + " ."]
    )


def test_the_regression_is_that_of_loops_and_its_errors_those_without_a_caption(scene):
    n, c = scene._n_known, scene._states.shape[1]
    assert len(scene._texts) == n + len(TEXTS) + 2  # One of the others is asked, too.

    def likeness(i: int, j: int) -> float:
        squares = (float(((own[i] - own[j]) ** 2).sum()) for own in (scene._numbers, scene._vectors, scene._states))
        scales = 0.3 / len(FEATURES), 1.5, 0.5 / c
        numbers, vectors, states = (math.exp(-k * s) for k, s in zip(scales, squares, strict=True))
        line = float(scene._numbers[i] @ scene._numbers[j]) / len(FEATURES)
        return 0.3 * line + 0.5 * numbers + 0.4 * vectors + 0.4 * states

    kernel = np.array([[likeness(i, j) for j in range(n)] for i in range(n + len(TEXTS))])
    label = scene.known.log_relevant
    order = scipy.stats.rankdata(label)
    score = scipy.stats.norm.ppf((order - 0.5) / n)
    weights = np.linalg.solve(kernel[:n] + np.eye(n), score)
    errors = []
    for i in range(n):
        kept = np.delete(np.arange(n), i)
        without = np.linalg.solve(kernel[np.ix_(kept, kept)] + np.eye(n - 1), score[kept])
        errors.append(score[i] - kernel[i, kept] @ without)
    known = sorted(set(zip(score, label, strict=True)))
    for i, found in enumerate(scene.estimates(["regression"])["regression"]["log_relevant"]):
        about = kernel[n + i] @ weights + np.quantile(errors, (np.arange(100) + 0.5) / 100)
        wanted = np.interp(about, *zip(*known, strict=True)).mean()
        assert found == pytest.approx(wanted, abs=1e-4)


def test_taught_variances_follow_their_teacher_and_leave_the_means(scene):
    before, n = scene._tower().embed(scene._store), scene._n_known
    density = scene._numbers[:, FEATURES.index("density 30")]
    regression = scene._kernel(slice(None)) @ scene._fitted[1][:, 0]
    for name, teacher in zip(TAUGHT, (density, scene.known.log_relevant, regression), strict=True):
        after = scene.taught(name).embed(scene._store)
        assert np.array_equal(after.mean, before.mean)
        index = np.r_[:n, n + len(TEXTS) : len(before.mean)][: len(teacher)]  # Those asked teach nothing.
        total = after.total_variance[index]
        assert 0.7 < float(total.mean() / before.total_variance[index].mean()) < 1.4
        # Of 24 captions or more by chance .6 has a probability of .001.
        assert scipy.stats.spearmanr(total, teacher[index]).statistic > 0.6, name
    assert np.array_equal(scene._tower().embed(scene._store).log_var, before.log_var)


def test_images_on_disk_are_ranked_by_a_model(folder, papers, monkeypatch):
    random = np.random.default_rng(3)
    (folder / "images" / "val").mkdir(parents=True)
    for i in range(14):
        (folder / "images" / "val" / f"COCO_val2014_{i:012}.jpg").write_bytes(encoded(noise(16, 16, i), "JPEG"))
    lists = [random.choice(20, random.integers(1, 9), replace=False).tolist() for _ in range(12)]
    (folder / "validation.jsonl").write_text("".join(line(i, relevant=own) for i, own in enumerate(lists)))
    captions, model = read_split(folder, "validation"), load_model("small")
    files = sorted((folder / "images" / "val").iterdir())
    texts, images = model.embed_texts(captions.texts).numpy(), model.embed_images(files).numpy()
    order = get_distance(model.distance).matrix(texts, images).argsort(1).tolist()
    p10 = [len(set(first[:10]) & set(own)) / 10 for first, own in zip(order, lists, strict=True)]
    rr = [max([1 / (1 + of.index(i)) for i in own if i < 14] or [0]) for of, own in zip(order, lists, strict=True)]
    found = ranked(captions, "small", folder / "images")
    assert found["p10_own"] == pytest.approx(p10) and found["rr_own"] == pytest.approx(rr)
    printed = papers.printed(
        "multiplicity", "--data", folder, "--images", folder / "images", "--bootstrap", "0", "--estimator", "words"
    )
    assert f"small {np.mean(p10):.3f} {np.mean(rr):.3f}" in " ".join(printed.split()) and "rr_own" in printed
    # The divergence goes from an image to a text.
    monkeypatch.setattr(ranking, "load_model", lambda name: replace(model, distance="kl"))
    order = get_distance("kl").matrix(images, texts).T.argsort(1).tolist()
    p10 = [len(set(first[:10]) & set(own)) / 10 for first, own in zip(order, lists, strict=True)]
    assert ranked(captions, "small", folder / "images")["p10_own"] == pytest.approx(p10)
    (folder / "validation.jsonl").write_text("".join(line(i, relevant=[900 + i]) for i in range(12)))
    raises(UserError, "none of 14 images", ranked, read_split(folder, "validation"), "small", folder / "images")


def test_people_agree_on_captions_that_two_have(folder, monkeypatch):
    def truth(ids, totals):
        return SimpleNamespace(text_ids=ids, t2i=SimpleNamespace(totals=np.array(totals)))

    truths = {"cxc": truth(("1", "2", "3", "9"), [1, 3, 2, 5]), "eccv": truth(("2", "3", "9"), [8, 0, 4])}
    monkeypatch.setattr(data, "eccv_caption", lambda folder: truths)
    found = data.agreement(read_split(folder, "train"), folder)
    assert {name: n for name, (n, _) in found.items()} == {"cxc, eccv": 2, "cxc, pqpp": 4, "eccv, pqpp": 2}
    assert found["cxc, pqpp"][1].value == pytest.approx(scipy.stats.spearmanr([1, 3, 2, 5], [1, 2, 3, 2]).statistic)


def test_the_command_measures_and_predicts(folder, papers):
    every = [word for name in ESTIMATORS for word in ("--estimator", name)]
    found = papers.json("multiplicity", "--data", folder, "--bootstrap", "5", *every)
    assert tuple(found["estimators"]) == ESTIMATORS and found["n"] == 12
    value = found["estimators"]["regression"]["log_relevant"]["spearman"]
    assert value["low"] <= value["value"] <= value["high"] and found["published"]["p10_mean"]["kendall"][0] == 0.33
    assert len(found["estimates of log_relevant"]["density"]) == 12
    printed = papers.printed("multiplicity", "--data", folder, "--bootstrap", "0", "--estimator", "words")
    assert "rr_mean, validation" in printed and "published, test" in printed
    asked = ("multiplicity", "--data", folder, "--predict", "asked.jsonl")
    rows = papers.json(*asked)
    assert [row["caption"] for row in rows] == TEXTS and [row["id"] for row in rows] == list(range(5))
    for row in rows:
        assert 0 <= row["p10_mean"] <= 0.25 and 0.25 <= row["rr_mean"] <= 0.75  # What the labels' range is.
        assert 0 <= row["log_relevant"] <= math.log(6)
    (folder / "more.txt").write_text("a bird on a roof\n\ntwo birds and a cat\n")
    more = papers.json(*asked, "--captions", folder / "more.txt")
    assert [row["log_relevant"] for row in more] != [row["log_relevant"] for row in rows]
    assert "precision" in papers.printed(*asked)
    (folder / "train.csv").write_text("best_caption,clip_pk,blip2_pk,clip_rr,blip2_rr\n" + "a cat,.1,.2,1,.5\n" * 9)
    (folder / "validation.csv").write_text((folder / "train.csv").read_text())
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").unlink()
    assert "relevant" not in papers.printed(*asked[:3], "--predict", folder / "validation.csv")
    assert set(papers.json(*asked)[0]) >= {"caption", "p10_mean"}
    (folder / "train.jsonl").write_text("".join(json.dumps({"caption": t, "relevant": [1]}) + "\n" for t in TEXTS))
    for more in ((), asked[3:]):
        assert "no label in common" in papers.refused(*asked[:3], *more)
    (folder / "train.jsonl").unlink()
    for more in (("--images", folder), *(("--estimator", name) for name in TAUGHT[1:])):
        assert "have no relevant images" in papers.refused(*asked[:3], *more)
    assert "unknown estimator 'magic'; known: words" in papers.refused(*asked[:3], "--estimator", "magic")
    assert "--predict does not go with --estimator" in papers.refused(*asked, "--estimator", "words")
    assert "--predict does not go with --images" in papers.refused(*asked, "--images", folder)
