"""The audit against slow loops and on made-up data; tables of embeddings; both commands on a tiny run."""

import csv
import json
import os
import shutil
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.raising import raises
from support.references_metrics import csd_by_loops
from support.toy import make_toy, make_two_methods
from support.words import folded, too_wide

from sfumato import GaussianCollection, GaussianEmbedding, PairData, Problems, Relevance, audit_pairs, fit, load_recipe
from sfumato.data.images import MemoryImage
from sfumato.data.splits import images_of_part, parse_part, without_part
from sfumato.errors import UserError
from sfumato.evaluation import pair_scores
from sfumato.models.embed import embed_folder, evaluate_run, load_splits
from sfumato.models.run import load_model, load_run
from sfumato.reports.evaluation import runs_latex, runs_table
from sfumato.reports.report import print_audit, wrong_pairs
from sfumato.reports.tables import tex
from sfumato.search.folder import is_collection
from sfumato.workflows.audit import varied
from sfumato.workflows.evaluation import OverSeeds, Row, over_seeds
from sfumato.workflows.index import RowEmbedder, is_embedded


def embeddings(n, d, seed, *, points=False):
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random)
    return GaussianEmbedding.point(mean) if points else GaussianEmbedding(mean, torch.randn(n, d, generator=random))


def loop(distance, listed):
    result = []
    n, m = distance.shape
    for i in range(n):
        for t in range(m):
            if not listed[i, t]:
                continue
            of_image = sorted(distance[i, j] for j in range(m) if not listed[i, j])
            of_text, d = sorted(distance[k, t] for k in range(n) if not listed[k, t]), distance[i, t]
            nearest = [np.mean(some[: pair_scores.NEIGHBOURS]) if some else d for some in (of_image, of_text)]
            result.append((i, t, d, d - sum(nearest) / 2, *[sum(x < d for x in some) for some in (of_image, of_text)]))
    return np.array(result)


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("memory_mb", [64.0, 1e-4])
def test_scores_are_those_of_slow_loops(points, memory_mb):
    images, texts = embeddings(17, 5, 0, points=points), embeddings(29, 5, 1, points=points)
    chosen = np.random.default_rng(2).permutation(17 * 29)[:60]
    listed = Relevance.from_pairs(chosen // 29, chosen % 29, n_queries=17, n_gallery=29)
    scores, missing = audit_pairs(images, texts, listed, memory_mb=memory_mb)
    distance = csd_by_loops(images.mean, images.var.numpy(), texts.mean, texts.var.numpy())
    names = "image", "text", "distance", "excess", "text_rank", "image_rank"
    found = np.stack([getattr(scores, name) for name in names], axis=1)
    np.testing.assert_allclose(found, loop(distance, listed.to_dense()), rtol=1e-5, atol=1e-4)
    rest = np.where(listed.to_dense(), np.inf, distance)
    np.testing.assert_array_equal(scores.better_text, rest.argmin(1)[scores.image])
    np.testing.assert_array_equal(scores.better_image, rest.argmin(0)[scores.text])
    np.testing.assert_allclose(scores.better_text_distance, rest.min(1)[scores.image], rtol=1e-5)
    near = {(i, t) for i in range(17) for t in rest[i].argsort()[: pair_scores.NEIGHBOURS]}
    near |= {(i, t) for t in range(29) for i in rest[:, t].argsort()[: pair_scores.NEIGHBOURS]}
    assert set(zip(missing.image.tolist(), missing.text.tolist(), strict=True)) == near
    np.testing.assert_allclose(missing.distance, np.sort([rest[pair] for pair in near]), rtol=1e-5)
    for k in range(len(missing)):
        row, column = rest[missing.image[k]], rest[:, missing.text[k]]
        for rank, others in ((missing.text_rank[k], row), (missing.image_rank[k], column)):
            true = (others < rest[missing.image[k], missing.text[k]]).sum()
            assert rank == (true if true < pair_scores.NEIGHBOURS else -1)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_fraction_of_wrong_pairs_is_estimated(share):
    random = np.random.default_rng(0)
    wrong = random.random(200_000) < share
    x = random.normal(size=200_000) + 2.0 * wrong
    log_odds = 2.0 - 2.0 * x  # log N(x; 0, 1) - log N(x; 2, 1)
    found = pair_scores.wrong_fraction(log_odds)
    assert found == pytest.approx(wrong.mean(), abs=0.015)
    p = pair_scores.wrong_probability(log_odds, found)
    assert p.mean() == pytest.approx(found, abs=6e-4)
    for low in (0.0, 0.3, 0.6):
        some = (p >= low) & (p < low + 0.3)
        assert not some.any() or p[some].mean() == pytest.approx(wrong[some].mean(), abs=0.04)
    low, high = pair_scores.wrong_fraction_interval(log_odds[:860])
    assert 0 <= low <= wrong[:860].mean() <= high <= 1 and high - low < 0.12
    np.testing.assert_array_equal(pair_scores.wrong_probability(log_odds, 0.0), 0)
    np.testing.assert_array_equal(pair_scores.wrong_probability(log_odds, 1.0), 1)


def test_equal_distances_wordings_and_bad_input():
    same = GaussianEmbedding.point(torch.zeros(4, 3))
    scores, missing = audit_pairs(same, same, Relevance.from_lists([[0], [1], [2], [3]], n_gallery=4))
    np.testing.assert_array_equal(scores.excess, 0)
    np.testing.assert_array_equal(scores.text_rank, [0, 1, 2, 3])
    assert len(missing) == 12 and (missing.distance == 0).all()
    scores, missing = audit_pairs(same, same, Relevance.from_lists([[0, 1, 2, 3]] * 4, n_gallery=4))
    assert len(scores) == 16 and not len(missing)
    np.testing.assert_array_equal(scores.excess, 0)
    assert (scores.better_text == -1).all() and np.isinf(scores.better_image_distance).all()
    images = GaussianEmbedding.point(torch.tensor([[0.0], [5.0]]))
    texts = GaussianEmbedding.point(torch.tensor([[0.0], [0.1], [0.3], [0.2]]))
    listed = Relevance.from_lists([[0], []], n_gallery=4)
    _, missing = audit_pairs(images, texts, listed, wording=["A dog", "a  DOG", "a cat", "a cat "])
    assert list(zip(missing.image, missing.text, strict=True)) == [(0, 3), (1, 2), (1, 1)]
    assert len(audit_pairs(images, texts, listed)[1]) == 7
    images, texts = embeddings(3, 2, 0), embeddings(4, 2, 1)
    with pytest.raises(ValueError, match="3 images and 4 texts, but a list of 4 by 3"):
        audit_pairs(images, texts, Relevance.from_lists([[0]] * 4, n_gallery=3))
    raises(ValueError, "no pair is listed", audit_pairs, images, texts, Relevance.from_lists([[]] * 3, n_gallery=4))
    with pytest.raises(ValueError, match="got 1 wordings for 4 texts"):
        audit_pairs(images, texts, Relevance.from_lists([[0]] * 3, n_gallery=4), wording=["a"])
    broken = GaussianEmbedding(torch.full((3, 2), torch.nan), torch.zeros(3, 2))
    raises(ValueError, "NaN", audit_pairs, broken, texts, Relevance.from_lists([[0]] * 3, n_gallery=4))


def test_parts_keep_groups_whole_and_what_is_shown_is_varied():
    data = PairData(
        tuple(map(str, range(9))), (MemoryImage("x", b""),) * 9, tuple("abc"), tuple("abc"), ("tag",) * 3,
        np.array([[i, i % 3] for i in range(9)]), np.array([0, 0, 1, 1, 2, 2, 3, 3, 4]),
    )  # fmt: skip
    parts = [images_of_part(data, k, 2) for k in range(2)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9)) and all(len(p) >= 3 for p in parts)
    assert not set(data.groups[parts[0]]) & set(data.groups[parts[1]])
    assert without_part(data, 0, 2).image_ids == tuple(str(i) for i in parts[1]) and parse_part("1/3") == (1, 3)
    for text in ("", "1", "2/2", "0/1", "-1/2", "a/b"):
        raises(ValueError, "a part I/K", parse_part, text)
    raises(ValueError, "5 groups of images cannot be divided into 6 parts", images_of_part, data, 0, 6)
    image, text = np.array([0, 0, 0, 0, 1, 2, 3, 4]), np.array([0, 1, 2, 3, 0, 0, 0, 5])
    scores = pair_scores.MissingScores(image, text, np.zeros(8), np.zeros(8), np.zeros(8))
    assert varied(scores, 9) == [0, 1, 2, 4, 5, 7] and varied(scores, 2) == [0, 1] and varied(scores, 0) == []
    figures = {"n_pairs": 860, "wrong_share": 0.48, "wrong_share_interval": [0.44, 0.52], "suspects": 258}
    first, second = wrong_pairs(figures)
    assert "about 413 of 860 are wrong" in first and "258 of them are more likely wrong than right" in second
    assert wrong_pairs(figures | {"suspects": 0})[1] == "no single pair is more likely wrong than right"
    (vague,) = wrong_pairs(figures | {"wrong_share_interval": [0.1, 1.0]})
    assert "cannot be estimated" in vague and "between 10% and 100%" in vague


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    recipe = make_toy(folder, n_each=4)  # Parts of a cross-fit learn too.
    options = 'noise_rate = 0.25\nequal_texts = "separate"\ntest_fraction'
    # It must learn, because an audit by a model at chance is refused: without augmentation and dropout in 20 epochs.
    learning = recipe.read_text().replace("epochs = 3", "epochs = 20\nevaluate_every = 20").replace("2e-3", "1e-2")
    learning = learning.replace("augment = true", "augment = false").replace("dropout = 0.1", "dropout = 0.0")
    recipe.write_text(learning.replace("test_fraction", options))
    fit(load_recipe(recipe), folder / "run")
    return folder


@pytest.mark.slow
def test_the_command_writes_tables_and_a_page(work, sfumato, capsys):
    pair_columns = [
        *("image", "text_id", "text", "excess", "wrong_probability", "distance", "text_rank", "image_rank"),
        *("better_text_id", "better_text", "better_text_distance", "better_image", "better_image_distance"),
    ]
    result, folder = sfumato.json("audit", work / "run", "--top", 3), work / "run" / "audit-test"
    assert result.pop("out") == str(folder) and result == json.loads((folder / "audit.json").read_text())
    pairs, missing = (list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("pairs", "missing"))
    assert len(pairs) == result["n_pairs"] == 2 * result["n_images"] and len(result["pairs"]) == 3
    assert list(pairs[0]) == [*pair_columns, "image_file"] and Path(pairs[0]["image_file"]).is_file()
    assert list(missing[0]) == [*pair_columns[:3], "match_probability", *pair_columns[5:8], "image_file"]
    assert [float(row["excess"]) for row in pairs] == sorted((float(row["excess"]) for row in pairs), reverse=True)
    chance = [float(row["match_probability"]) for row in missing]
    assert chance == sorted(chance, reverse=True) and len(chance) == result["candidates"]
    assert 0 <= result["wrong_share"] <= 1 and result["cross_fit"] == 0 and result["notes"] == []
    assert {k: str(v) for k, v in result["pairs"][0].items() if k != "excess"}["text"] == pairs[0]["text"]
    page = (folder / "audit.html").read_text()
    assert page.count('<li class="card">') == 6 and "data:image/webp;base64," in page and pairs[0]["text"] in page
    assert "http" not in page and "<script" not in page
    splits = load_splits(load_run(work / "run").recipe.data, Problems())
    others = {name: len(one.image_ids) for name, one in splits.items() if name != "test"}
    assert result["other_splits"] == others and {"train", "val"} <= set(others)
    for probabilities, shown in (((0.0031, 0.00002), "nothing is suspicious"), ((0.31, 0.00002), " 31% ")):
        print_audit(result | {"pairs": [result["pairs"][0] | {"wrong_probability": p} for p in probabilities]})
        lines = capsys.readouterr().out
        assert shown in folded(lines) and not too_wide(lines)
        assert all(f"--split {name} ({n} images)" in folded(lines) for name, n in others.items())


def test_uncalibrated_models_other_data_and_a_split_of_the_training(work, sfumato, tmp_path, capsys, monkeypatch):
    shutil.copytree(work / "run", tmp_path / "run")
    (tmp_path / "run" / "calibration.json").unlink()
    result = sfumato.json("audit", tmp_path / "run")
    print_audit(result)
    lines = folded(capsys.readouterr().out)
    assert "are wrong" not in lines and "more likely" not in lines and "the closest of" in lines
    page = (tmp_path / "run" / "audit-test" / "audit.html").read_text()
    assert "wrong · excess" not in page and ">–<" not in page and ">excess" in page
    assert result["wrong_share"] is None and result["pairs"][0]["wrong_probability"] is None
    assert "not calibrated" in result["notes"][0]
    distance = [row["distance"] for row in result["missing"]]
    assert distance == sorted(distance)
    monkeypatch.chdir(tmp_path)
    printed = sfumato.printed("audit", work / "run", "data.test_fraction=0.25", "--data", work / "toy.toml")
    assert "nothing is suspicious" in folded(printed) and (tmp_path / "audit-test" / "audit.html").is_file()
    sfumato.printed("export", work / "run", tmp_path / "moved")
    moved = sfumato.json("audit", tmp_path / "moved", "--data", work / "toy.toml", "--out", tmp_path / "a")
    result = sfumato.json("audit", work / "run", "--split", "train", "--top", 500)
    assert moved["model"] == "moved" and "may have memorised" in result["notes"][0]
    noise = np.load(work / "run" / "noise.npy")
    rows = csv.DictReader((work / "run" / "audit-train" / "pairs.csv").open())
    shown = {row["text_id"]: row["image"] for row in rows}
    assert len(shown) == len(noise)  # The noisy pairs are audited, not those of the file.
    assert sum(text.split("#")[0] != image for text, image in shown.items()) == round(0.25 * len(noise))


@pytest.mark.slow
def test_cross_fitting_trains_on_the_other_parts(work, sfumato, tmp_path):
    arguments = "audit", work / "run", "--cross-fit", 2, "--out", tmp_path / "c", "--top", 500
    result = sfumato.json(*arguments)
    assert result["cross_fit"] == 2 and result["split"] == "train"
    logs = [tmp_path / "c" / f"part-{k}" / "log.jsonl" for k in range(2)]
    assert all(f'leave_out = "{k}/2"' in (logs[k].parent / "recipe.toml").read_text() for k in range(2))
    tables = [(tmp_path / "c" / f"{name}.csv").read_text().splitlines() for name in ("pairs", "missing")]
    assert len(tables[0]) - 1 == result["n_pairs"] == len(np.load(work / "run" / "noise.npy"))
    before = [log.read_text() for log in logs]
    assert sfumato.json(*arguments) == result
    assert before == [log.read_text() for log in logs], "seconds and all: nothing was trained again"


def test_models_that_cannot_be_audited_are_named(work, sfumato, tmp_path):
    shutil.copytree(work / "run", tmp_path / "run", ignore=shutil.ignore_patterns("audit-*"))
    path, generator = tmp_path / "run" / "model.safetensors", torch.Generator().manual_seed(0)
    shuffled = lambda value: value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: shuffled(value) for name, value in load_file(path).items()}, path, metadata)
    assert "no better than chance" in sfumato.refused("audit", tmp_path / "run")
    assert not (tmp_path / "run" / "audit-test").exists()
    run = work / "run"
    for arguments, expected in (
        ((tmp_path,), "is not a run folder"), ((tmp_path, "--cross-fit", 2), "is not a run folder"),
        ((run, "--cross-fit", 1), "at least 2 parts, got 1"), ((run, "--split", "none"), "has no split 'none'"),
        ((run, "--data", "no-recipe"), "no-recipe"),
    ):  # fmt: skip
        assert expected in sfumato.refused("audit", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture(scope="module")
def table_work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    make_two_methods(folder)
    return folder


@pytest.mark.slow
def test_figures_are_those_of_evaluate(table_work, sfumato):
    runs, columns = sorted((table_work / "runs").iterdir()), "rsum,t2i.recall@1,i2t.map@r,i2t.median_rank"
    made = sfumato.json("evaluate", "table", *runs, "--group", "loss.name", "--metrics", columns)
    assert [row["label"] for row in made] == [{"loss.name": "infonce"}, {"loss.name": "pcmepp"}]
    assert [row["runs"] for row in made] == [[str(r) for r in runs[:2]], [str(r) for r in runs[2:]]]
    for row in made:
        found = [evaluate_run(load_run(run), "test")[0] for run in row["runs"]]
        for column, values in {
            "rsum": [f.rsum for f in found], "t2i.recall@1": [f.t2i["recall@1"] for f in found],
            "i2t.median_rank": [f.i2t["median_rank"] for f in found],
        }.items():  # fmt: skip
            assert row["figures"][column]["values"] == pytest.approx(values)
            assert row["figures"][column]["mean"] == pytest.approx(mean(values))
            assert row["figures"][column]["deviation"] == pytest.approx(stdev(values))
    (one,) = sfumato.json("evaluate", "table", *runs[:2])
    assert one["label"] == {} and list(one["figures"]) == ["rsum", "t2i.recall@1", "i2t.recall@1"]
    assert "all runs" in sfumato.printed("evaluate", "table", *runs[:2])
    assert r"\begin{tabular}{lrrr}" in sfumato.printed("evaluate", "table", *runs, "--group", "loss.name", "--latex")


def test_what_is_there_is_taken_unless_older_than_the_weights_and_nonsense_refused(table_work, sfumato, tmp_path):
    shutil.copytree(table_work / "runs", tmp_path / "runs")
    for file in (tmp_path / "runs").glob("*/*-test-*"):
        file.unlink()
    command = ("evaluate", "table", *sorted((tmp_path / "runs").iterdir()), "--group", "loss.name", "--json")
    status, out, err = sfumato(*command)
    again = sfumato(*command)
    assert status == 0 and "evaluating" in err and again[1] == out and "evaluating" not in again[2]
    file = tmp_path / "runs/pcmepp-0/evaluation-test-csd.json"
    file.write_text(file.read_text().replace('"rsum": ', '"rsum": 1'))
    later = file.stat().st_mtime + 5
    os.utime(tmp_path / "runs/pcmepp-0/model.safetensors", (later, later))
    _, repaired, err = sfumato(*command)
    assert repaired == out and err.count("evaluating") == 1 and "pcmepp-0" in err
    runs = table_work / "runs"
    a, b, c = runs / "pcmepp-0", runs / "pcmepp-1", runs / "infonce-0"
    shutil.copytree(a, table_work / "copy")
    for words, said in (
        (
            (a, b, c),
            [f"{a} and {c} differ in more than train.seed", "loss.name (pcmepp, infonce)", "--group loss.name"],
        ),
        ((a, b, c, "--group", "loss.nam"), ["no recipe of these runs has this key; did you mean 'loss.name'?"]),
        ((a, b, "--metrics", "t2i.recall@2"), ["has no metric 't2i.recall@2'; did you mean t2i.recall@"]),
        ((a, a), [f"{a} and {a} are the same run; give it once"]),
        ((a, table_work / "copy"), ["the same recipe and the same train.seed=0, so they are not two seeds"]),
        ((table_work / "nowhere",), ["nowhere is not a trained run (no recipe.toml in it)"]),
    ):
        status, out, err = sfumato("evaluate", "table", *words)
        assert status == 2 and not out and all(one in folded(err) for one in said), (words, err)


LATEX = r"""\begin{table}
\centering
\begin{tabular}{llrr}
\toprule
loss.name & loss.alpha & RSUM & t2i R@1 \\
\midrule
a\_b & 0.1 & 250.0 $\pm$ 1.2 & 30.0 $\pm$ 1.0 \\
50\% & -- & 200.0 & 29.9 \\
\bottomrule
\end{tabular}
\caption{Split test; per cent, RSUM of 600; mean $\pm$ standard deviation over 1 to 2 seeds.}
\end{table}
"""


def test_over_seeds_and_latex_by_hand():
    rows = [
        Row(("a_b", 0.1), ("r0", "r1"), {"rsum": OverSeeds(2.5, 0.0125, ()), "t2i.recall@1": OverSeeds(0.3, 0.01, ())}),
        Row(("50%", None), ("r2",), {"rsum": OverSeeds(2.0, None, ()), "t2i.recall@1": OverSeeds(0.299, None, ())}),
    ]
    assert runs_latex(runs_table(rows, ["loss.name", "loss.alpha"], "Split test", tex)) == LATEX
    found = over_seeds([{"a": 1.0, "b": None, "c": 5.0}, {"a": 2.0, "b": None, "d": 1.0}, {"a": 6.0, "c": 5.0}])
    assert list(found) == ["a", "c", "d"]
    # Deviations from 3 are 2, 1, 3: (4 + 1 + 9) / 2 = 7.
    assert (found["a"].mean, found["a"].deviation, found["a"].values) == (3, pytest.approx(7**0.5), (1, 2, 6))
    assert str(found["a"]) == "3.00 ± 2.65" and str(found["c"]) == "5.00 ± 0.00"
    assert found["d"].deviation is None and str(found["d"]) == "1.00" and over_seeds([]) == {}


pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
rows_of = lambda folder, names: {"id": names, "bytes": [(folder / name).read_bytes() for name in names]}


@pytest.fixture(scope="module")
def embedded(toy, tmp_path_factory):
    folder, embed = tmp_path_factory.mktemp("embedded"), RowEmbedder(str(toy / "run"))
    names = sorted(path.name for path in (toy / "data").glob("*.png"))
    for number, part in enumerate((names[:30], names[30:])):
        batch = rows_of(toy / "data", part) | {"captions": [f"picture {name}" for name in part]}
        parquet.write_table(pyarrow.table(embed(batch)), folder / f"{number}.parquet")
    return folder


def test_a_batch_is_embedded_as_a_folder_is_and_what_cannot_be_is_left_out(toy):
    model = load_model(toy / "run")
    expected, ids, _ = embed_folder(model, toy / "data")
    batch = RowEmbedder(str(toy / "run"))(rows_of(toy / "data", ids[:7]))
    assert set(batch) == {"id", "mean", "log_var", "model"} and batch["id"] == ids[:7] and len(set(batch["model"])) == 1
    for name in ("mean", "log_var"):
        found = torch.from_numpy(np.stack(batch[name]))
        torch.testing.assert_close(found, getattr(expected, name)[:7], rtol=1e-5, atol=1e-6)
    of_texts = RowEmbedder(str(toy / "run"), modality="texts")({"id": ["1"], "text": ["a red circle"]})
    expected = model.model.embed_texts(["a red circle"]).mean
    torch.testing.assert_close(torch.from_numpy(np.stack(of_texts["mean"])), expected)
    assert of_texts["text"] == ["a red circle"]
    embed, batch = RowEmbedder(str(toy / "run")), rows_of(toy / "data", ["000.png", "001.png"])
    batch = {name: [*values, other] for (name, values), other in zip(batch.items(), ("broken", b"no"), strict=True)}
    with pytest.warns(UserWarning, match="broken is left out"):
        assert embed(batch)["id"] == ["000.png", "001.png"]
    with pytest.warns(UserWarning, match="broken is left out"):
        assert embed({"id": ["broken"], "bytes": [b"no"]})["id"] == []
    raises(UserError, "no column id; got bytes", embed, {"bytes": []})


def test_a_gallery_of_rows_answers_as_one_of_images(toy, embedded, sfumato, tmp_path):
    run, data, asked = toy / "run", toy / "data", ("a red circle", "--target", "listed")
    sfumato.printed("index", run, "--images", data, "--store", "file:", "--out", tmp_path / "plain")
    given = ("--data", embedded, "--images", data, "--store", "file:", "--out")
    assert "48 images" in folded(sfumato.printed("index", run, *given, tmp_path / "rows"))
    half = ("--data", embedded / "0.parquet", "--store", "file:", "--out", tmp_path / "half")
    assert "30 images" in folded(sfumato.printed("index", run, *half))
    hits = lambda folder: sfumato.json("search", tmp_path / folder, *asked)[0]["hits"]
    plain, rows = ({hit["id"]: hit["distance"] for hit in hits(folder)} for folder in ("plain", "rows"))
    assert list(rows) == list(plain) and rows == pytest.approx(plain, rel=1e-4)
    with GaussianCollection.open(tmp_path / "rows") as collection:
        assert collection.get(["000.png"]).payloads[0]["captions"] == "picture 000.png"
        assert collection.metadata["pictures"] == {"folder": str(data.resolve())}


def test_rows_of_another_model_and_damaged_rows_are_refused(toy, embedded, sfumato, tmp_path):
    run, out, table = toy / "run", tmp_path / "out", parquet.read_table(embedded / "0.parquet")

    def refused(changed):
        parquet.write_table(changed, tmp_path / "rows.parquet")
        return sfumato.refused("index", run, "--data", tmp_path / "rows.parquet", "--store", "file:", "--out", out)

    names = table.column_names
    assert "by another model" in refused(table.set_column(names.index("model"), "model", [["x"] * 30]))
    assert "no column id" in refused(table.drop_columns("id"))
    means = table.column("mean").to_pylist()
    for wrong, message in (([float("nan")] * 16, "NaN"), ([1.0] * 15, "differ in length"), (None, "some are missing")):
        changed = pyarrow.array([wrong, *means[1:]], pyarrow.list_(pyarrow.float32()))
        assert message in refused(table.set_column(names.index("mean"), "mean", changed))
    assert not out.exists() or not is_collection(out)
    assert not is_embedded(tmp_path / "none.parquet") and not is_embedded(toy / "data")
    shutil.copy(toy / "toy.toml", tmp_path / "no.parquet")
    told = sfumato.refused("index", run, "--data", tmp_path / "no.parquet", "--out", out)
    assert "not a complete Parquet file" in told
