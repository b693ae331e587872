"""Benchmarks on scenes whose answer is known, protocols by loops, and people's verdicts: samples and estimates."""

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from math import comb

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises
from support.references_metrics import csd_by_loops, metrics_by_definition

from sfumato import DISTANCES, GaussianEmbedding, RecallByUncertainty, Relevance, measure_trust
from sfumato.errors import UserError
from sfumato.evaluation import judgements, trust
from sfumato.evaluation.estimators import ESTIMATORS, Matching, estimate_uncertainty, usable_estimators
from sfumato.evaluation.protocols import EvaluationOptions, evaluate_retrieval, table_rows
from sfumato.metrics.bootstrap import balanced_spearman, on_all
from sfumato.metrics.reliability import calibration_error_statistic, expected_calibration_error

N, M, D = 41, 29, 4
MATCHING = Matching("csd", 0.8, 1.0, direction="t2i")
QUICK = {"n_resamples": 20}
ONE = judgements.Judgement("a dog", "x y.jpg", 1, "ann", "2025-01-01T10:00:00+00:00", "rank 1", 0.7, 2.0)
by_pairs = lambda low, high: np.mean([(b > a) + 0.5 * (a == b) for a, b in itertools.product(low, high)])


def scene(seed=0):
    """Queries near the mean of their true items; a fifth of them has none; some have many."""
    random = np.random.default_rng(seed)
    ground_truth = random.random((N, M)) < random.choice([0.04, 0.1, 0.4], size=(N, 1))
    ground_truth[::5] = False
    generator = torch.Generator().manual_seed(seed)
    items = 2 * torch.randn(M, D, generator=generator)
    share = torch.from_numpy(ground_truth / np.maximum(ground_truth.sum(1, keepdims=True), 1)).float()
    mean = share @ items + torch.randn(N, D, generator=generator)
    queries = GaussianEmbedding(mean, torch.randn(N, D, generator=generator) - 1)
    gallery = GaussianEmbedding(items, torch.randn(M, D, generator=generator) - 1)
    return queries, gallery, Relevance.from_pairs(*np.nonzero(ground_truth), n_queries=N, n_gallery=M), ground_truth


def test_every_figure_of_every_estimator_by_loops():
    queries, gallery, relevance, ground_truth = scene()
    has = ground_truth.any(1)
    distance = csd_by_loops(gallery.mean.numpy(), gallery.var.numpy(), queries.mean.numpy(), queries.var.numpy()).T
    hit = ground_truth[np.arange(N), distance.argmin(1)][has].astype(float)
    assert 0.2 < hit.mean() < 0.8
    result = measure_trust(queries, gallery, relevance, MATCHING, multiplicity=True, **QUICK)
    scores = estimate_uncertainty(queries[torch.from_numpy(has)], gallery, MATCHING)
    assert (result.n_queries, result.n_gallery) == (has.sum(), M) and result.recall.value == pytest.approx(hit.mean())
    order = np.sort(1 - hit)
    assert result.risk_best.value == pytest.approx((np.cumsum(order) / np.arange(1, len(hit) + 1)).mean())
    ten = ground_truth[np.arange(N)[:, None], distance.argsort(1)[:, :10]][has].mean(1)
    level = {"true": ten, "predicted": 1 - scores["expected_misses"], "chance": ground_truth[has].mean(1)}
    for name, values in level.items():
        found = result.precision[name]
        assert found.value == pytest.approx(values.mean()) and found.low < found.value < found.high, name
    enough = M - ground_truth[has].sum(1) >= 10
    assert result.n_out_of_gallery == enough.sum()
    rests = {i: gallery[torch.from_numpy(~ground_truth[i])] for i in np.flatnonzero(has)[enough]}
    absent = [estimate_uncertainty(queries[i : i + 1], rest, MATCHING) for i, rest in rests.items()]
    for name, u in scores.items():
        figures = result.estimators[name]
        assert figures["wrong_auroc"].value == pytest.approx(by_pairs(u[hit == 1], u[hit == 0])), name
        sorted_error = (1 - hit)[np.argsort(u)]
        risks = np.cumsum(sorted_error) / np.arange(1, len(hit) + 1)
        assert figures["wrong_aurc"].value == pytest.approx(risks.mean()), name
        assert figures["wrong_excess_aurc"].value == pytest.approx(risks.mean() - result.risk_best.value), name
        gain = (1 - hit.mean() - risks.mean()) / (1 - hit.mean() - result.risk_best.value)
        assert figures["wrong_gain"].value == pytest.approx(gain), name
        assert figures["risk_at_half"].value == pytest.approx(risks[int(np.ceil(len(hit) / 2)) - 1]), name
        expected = vars(RecallByUncertainty.of(u, hit))
        assert figures["misses"].value == pytest.approx(scipy.stats.spearmanr(u, 1 - ten).statistic), name
        assert figures["deciles"].value == pytest.approx(expected["correlation"]), name
        assert result.deciles[name] == pytest.approx([b["recall"] for b in expected["bins"]]), name
        counts = ground_truth[has].sum(1)
        assert figures["multiplicity"].value == pytest.approx(scipy.stats.spearmanr(u, counts).statistic), name
        assert figures["multiplicity_balanced"].value == pytest.approx(balanced_spearman(u, counts)), name
        assert ("out_of_gallery" in figures) == ESTIMATORS[name].needs_gallery
        if ESTIMATORS[name].needs_gallery:
            expected = by_pairs(u[enough], [each[name][0] for each in absent])
            assert figures["out_of_gallery"].value == pytest.approx(expected, abs=0.01), name
        for figure, interval in figures.items():
            assert figure in trust.FIGURES and interval.low <= interval.high, (name, figure)


def test_the_precision_at_10_by_hand():
    """Twelve items at 0, 1, ..., 11 of a line; without the farthest three there are fewer than ten."""
    items = GaussianEmbedding.point(torch.arange(12.0)[:, None])
    log_var = torch.tensor([[2.0], [1.0], [0.0], [3.0]])
    queries = GaussianEmbedding(torch.tensor([[0.0], [11.0], [0.0], [5.0]]), log_var)
    relevance = Relevance.from_lists([[0, 1, 10], [11, 1], range(11), []], n_gallery=12)
    result = measure_trust(queries, items, relevance, MATCHING, texts=np.array(["a", "b", "c", "d"]), **QUICK)
    for texts in (["a", "b"], list("abcdefg")):
        message = f"{len(texts)} texts for 4 queries"
        raises(ValueError, message, measure_trust, queries, items, relevance, MATCHING, texts=texts, **QUICK)
    # Of the ten best 2, 1 and 10 match; the last query has no match. Misses have the ranks 2, 3 and 1.
    assert {name: result.precision[name].value for name in ("true", "perfect", "chance")} == pytest.approx(
        {"true": 13 / 30, "perfect": (3 + 2 + 10) / 30, "chance": (3 + 2 + 11) / 36}
    )
    assert result.estimators["total_variance"]["misses"].value == pytest.approx(0.5)
    assert "text_misses" in result.estimators and "precision" not in trust.FIGURES
    few = Relevance.from_lists([[0, 1], [1], [0, 3, 4], []], n_gallery=9)
    result = measure_trust(queries, items[:9], few, MATCHING, **QUICK)
    assert result.precision == {} and set(result.estimators) == set(usable_estimators())
    assert all("misses" not in figures for figures in result.estimators.values())


def test_kl_goes_from_image_to_text_whoever_asks():
    texts, images, relevance, ground_truth = scene(6)
    has, matrix = ground_truth.any(1), DISTANCES["kl"].matrix(images, texts).numpy().T
    chosen = {"nearest_mean": ESTIMATORS["nearest_mean"]}
    found = measure_trust(texts, images, relevance, Matching("kl", 1, 0, "t2i"), estimators=chosen, **QUICK)
    assert found.recall.value == pytest.approx(ground_truth[np.arange(N), matrix.argmin(1)][has].mean())
    other = measure_trust(texts, images, relevance, Matching("kl", 1, 0, "i2t"), estimators=chosen, **QUICK)
    assert other.right_pairs.value != found.right_pairs.value
    # The pairs are drawn with the same seed: true and random distances from the matrix of the right direction.
    pairs = trust.random_pairs(relevance.select_queries(np.flatnonzero(has)), np.random.default_rng(0))
    own = matrix[has]
    assert ground_truth[has][pairs[:, 0], pairs[:, 1]].all() and not ground_truth[has][pairs[:, 0], pairs[:, 2]].any()
    expected = by_pairs(own[pairs[:, 0], pairs[:, 1]], own[pairs[:, 0], pairs[:, 2]])
    assert found.right_pairs.value == pytest.approx(expected, abs=0.002)


def test_proxies_of_captions_are_judged_by_spearman():
    queries, gallery, relevance, ground_truth = scene(3)
    values = np.random.default_rng(0).random(N)
    values[[1, 2]] = np.nan
    result = measure_trust(queries, gallery, relevance, MATCHING, proxies={"caption_words": values}, **QUICK)
    use = ground_truth.any(1) & ~np.isnan(values)
    u, found = queries.total_variance.numpy()[use], result.estimators["total_variance"]["caption_words"]
    assert found.value == pytest.approx(scipy.stats.spearmanr(u, values[use]).statistic)
    assert "multiplicity" not in result.estimators["total_variance"]
    relevance = Relevance.from_lists([[0, 1, 2], [3, 4], [5], []], n_gallery=6)
    mean = torch.tensor([[0.0, 0], [3, 4], [0, 1], [1, 1], [1, 1], [9, 9]])
    found = trust.caption_distance(GaussianEmbedding(mean, torch.zeros(6, 2)), relevance)
    np.testing.assert_allclose(found, [(25 + 1 + 18) / 3, 0, np.nan, np.nan])
    words = ["A red dog.", "a dog", "the dog runs", "Two men", "two  men!", "alone"]
    expected = 1 - (2 / 3 + 1 / 5 + 1 / 4) / 3
    np.testing.assert_allclose(trust.caption_words(words, relevance), [expected, 0, np.nan, np.nan])


def test_equal_seeds_give_equal_figures_and_points_have_no_variance_to_judge():
    everything = Relevance.from_lists([list(range(12))] * 9, n_gallery=12)
    gallery, queries = (GaussianEmbedding(torch.eye(n, 2), torch.zeros(n, 2)) for n in (12, 9))
    result = measure_trust(queries, gallery, everything, MATCHING, **QUICK)
    assert result.right_pairs.value is None and result.n_out_of_gallery == 0
    queries, gallery, relevance, _ = scene(4)
    options = QUICK | {"estimators": {name: ESTIMATORS[name] for name in ("margin", "nearest_mean")}}
    results = [measure_trust(queries, gallery, relevance, MATCHING, seed=s, **options) for s in (0, 0, 1)]
    assert results[0] == results[1] != results[2]
    nothing = Relevance.from_lists([[]] * N, n_gallery=M)
    raises(ValueError, "no query has a true item", measure_trust, queries, gallery, nothing, MATCHING, **options)
    queries, gallery, relevance, _ = scene(7)
    queries, gallery = (GaussianEmbedding.point(x.mean) for x in (queries, gallery))
    usable = usable_estimators(queries, gallery)
    result = measure_trust(queries, gallery, relevance, MATCHING, estimators=usable, multiplicity=True, **QUICK)
    silent = {name for name, figures in result.estimators.items() if not figures}
    assert silent == {"total_variance"}
    report = trust.TrustReport("test", "csd", False, M, N, 20, 0.95, 0, trust.described(usable), {"t2i": result}, [])
    again = json.loads(json.dumps(report.to_json(), allow_nan=False))
    value = again["directions"]["t2i"]["estimators"]["margin"]["wrong_auroc"]
    assert value["low"] <= value["value"] <= value["high"] and again["estimators"]["margin"]["kind"] == "both"


def test_groups_widen_the_intervals_where_texts_have_one_image():
    # Five equal queries for each of 25 things: drawn together, the interval of the recall is about sqrt(5) as wide.
    generator = torch.Generator().manual_seed(5)
    items = torch.randn(25, 3, generator=generator)
    noisy = (items + 0.8 * torch.randn(25, 3, generator=generator)).repeat_interleave(5, 0)
    queries = GaussianEmbedding(noisy, torch.zeros(125, 3))
    gallery = GaussianEmbedding(items, torch.zeros(25, 3))
    ground_truth, widths = Relevance.from_lists([[i // 5] for i in range(125)], n_gallery=25), []
    for groups in (None, np.arange(125) // 5):
        r = measure_trust(queries, gallery, ground_truth, MATCHING, groups=groups, n_resamples=1000).recall
        widths.append(r.high - r.low)
    assert widths[1] / widths[0] == pytest.approx(np.sqrt(5), rel=0.2)
    few = Relevance.from_lists([[0, 1], [2], *[[k] for k in range(3, 11)]], n_gallery=11)
    many = Relevance.from_lists([[0, 1], [1, 2], *[[k] for k in range(3, 9)]], n_gallery=9)
    groups = np.arange(10)
    assert trust.resampled_together(few, groups, True).tolist() == [0, 0, 1, *range(2, 10)]
    shared = Relevance.from_lists([[0, 1], [1], *[[k] for k in range(2, 11)]], n_gallery=11)
    assert trust.resampled_together(shared, groups, True).tolist() == [0, 1, *range(2, 11)]
    assert trust.resampled_together(many, groups, True) is None
    assert trust.resampled_together(many, groups, False) is groups


PROTOCOLS_N, PROTOCOLS_M, PROTOCOLS_D = 23, 31, 4
KINDS = ["name"] * 23 + ["tag"] * 6 + ["rumour"] * 2


def protocols_scene(seed=0):
    """Each image has its own name; tags match about a third of the images; rumours match nothing."""
    random, ground_truth = np.random.default_rng(seed), np.zeros((PROTOCOLS_N, PROTOCOLS_M), bool)
    ground_truth[np.arange(PROTOCOLS_N), np.arange(PROTOCOLS_N)] = True
    ground_truth[:, 23:29] = random.random((PROTOCOLS_N, 6)) < 0.3
    ground_truth[0, 23:29] = True
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(PROTOCOLS_N, PROTOCOLS_D, generator=generator)
    text = torch.cat([image, torch.randn(PROTOCOLS_M - PROTOCOLS_N, PROTOCOLS_D, generator=generator)])
    text += 0.8 * torch.randn(PROTOCOLS_M, PROTOCOLS_D, generator=generator)
    log_vars = [torch.randn(n, PROTOCOLS_D, generator=generator) - 1 for n in (PROTOCOLS_N, PROTOCOLS_M)]
    relevance = Relevance.from_pairs(*np.nonzero(ground_truth), n_queries=PROTOCOLS_N, n_gallery=PROTOCOLS_M)
    return GaussianEmbedding(image, log_vars[0]), GaussianEmbedding(text, log_vars[1]), relevance, ground_truth


def assert_metrics(ours, distance, ground_truth):
    for name, value in metrics_by_definition(distance, [np.flatnonzero(row) for row in ground_truth]).items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


def test_every_figure_by_loops():
    images, texts, relevance, ground_truth = protocols_scene()
    csd = csd_by_loops(images.mean.numpy(), images.var.numpy(), texts.mean.numpy(), texts.var.numpy())
    for name, distance in (("csd", csd), ("kl", DISTANCES["kl"].matrix(images, texts).numpy())):
        result = evaluate_retrieval(images, texts, relevance, text_kinds=KINDS, distance=name)
        assert (result.distance, result.n_images, result.n_texts) == (name, PROTOCOLS_N, PROTOCOLS_M)
        assert_metrics(result.i2t, distance, ground_truth)
        assert_metrics(result.t2i, distance.T, ground_truth.T)
        for kind in ("name", "tag"):
            columns = [j for j, k in enumerate(KINDS) if k == kind]
            assert_metrics(result.t2i_by_kind[kind], distance.T[columns], ground_truth.T[columns])
            assert_metrics(result.i2t_by_kind[kind], distance[:, columns], ground_truth[:, columns])
    assert result.t2i["n_queries"] == 29 and result.t2i["n_without_positives"] == 2
    assert result.rsum == pytest.approx(sum(d[f"recall@{k}"] for d in (result.i2t, result.t2i) for k in (1, 5, 10)))
    assert list(result.t2i_by_kind) == list(result.i2t_by_kind) == ["name", "tag"]
    assert result.total_variance["text"] == pytest.approx(float(texts.var.sum(1).mean()), rel=1e-5)
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["i2t"]["recall@1"] == result.i2t["recall@1"]
    names = "image -> text", "text -> image", "image -> name", "image -> tag", "name -> image", "tag -> image"
    assert tuple(name for name, _ in table_rows(result)) == names


@pytest.mark.parametrize("measure, by_paper", [
    ("total_variance", lambda log_var: np.exp(log_var).sum(1)),
    ("geometric_std", lambda log_var: np.exp(log_var / 2).prod(1) ** (1 / PROTOCOLS_D)),
    ("log_det", lambda log_var: np.log(np.array([np.linalg.det(np.diag(v)) for v in np.exp(log_var)]))),
])  # fmt: skip
def test_recall_is_binned_by_the_uncertainty_of_the_paper_that_is_asked_for(measure, by_paper):
    images, texts, relevance, ground_truth = protocols_scene(6)
    distance = csd_by_loops(images.mean.numpy(), images.var.numpy(), texts.mean.numpy(), texts.var.numpy())
    result = evaluate_retrieval(images, texts, relevance, uncertainty=measure)
    assert result.uncertainty_measure == measure
    for name, embeddings, d, t in (("i2t", images, distance, ground_truth), ("t2i", texts, distance.T, ground_truth.T)):
        has = t.any(1)
        hit = t[np.arange(len(t)), d.argmin(1)][has]
        values = by_paper(embeddings.log_var.double().numpy())[has]
        parts, found = np.array_split(np.argsort(values), 10), result.uncertainty[name]
        assert [b["recall"] for b in found["bins"]] == pytest.approx([hit[p].mean() for p in parts])
        assert [b["uncertainty"] for b in found["bins"]] == pytest.approx([values[p].mean() for p in parts], rel=1e-4)
        assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(values, hit).statistic)
        recalls = [hit[p].mean() for p in parts]
        assert found["correlation"] == pytest.approx(scipy.stats.pearsonr(range(10), recalls).statistic)
    expected = scipy.stats.spearmanr(values, ground_truth.sum(0)[has]).statistic
    assert result.multiplicity["all"] == pytest.approx(expected) and result.multiplicity["n_texts"] == 29
    assert -1 <= result.multiplicity["balanced"] <= 1


def test_points_and_one_to_one_truth_leave_out_what_has_no_meaning():
    images, texts, relevance, _ = protocols_scene(6)
    message = "unknown uncertainty 'entropy'; known: total_variance, geometric_std"
    raises(ValueError, message, evaluate_retrieval, images, texts, relevance, uncertainty="entropy")
    raises(UserError, "--samples 0: give at least 1", EvaluationOptions, 0)
    images, texts, relevance, _ = protocols_scene(4)
    result = evaluate_retrieval(GaussianEmbedding.point(images.mean), texts, relevance, uncertainty="log_det")
    assert {b["uncertainty"] for b in result.uncertainty["i2t"]["bins"]} == {None}
    assert result.uncertainty["i2t"]["correlation"] is result.uncertainty["i2t"]["spearman"] is None
    assert result.uncertainty["t2i"]["correlation"] is not None
    json.dumps(result.to_json(), allow_nan=False)
    images, texts, _, _ = protocols_scene(3)
    names, one_to_one = texts[: images.n], Relevance.from_lists([[i] for i in range(images.n)], n_gallery=images.n)
    points = evaluate_retrieval(GaussianEmbedding.point(images.mean), GaussianEmbedding.point(names.mean), one_to_one)
    assert points.uncertainty is points.multiplicity is None and points.total_variance == {"image": 0.0, "text": 0.0}
    spread = evaluate_retrieval(images, names, one_to_one, text_kinds=["name"] * PROTOCOLS_N)
    assert spread.uncertainty is not None and spread.multiplicity is None
    assert spread.t2i_by_kind == {} and spread.i2t_by_kind == {}


def test_what_ranks_no_better_than_chance_is_told_apart():
    """False alarms: a random model passes three deviations of either direction with a probability of about 1 in 400."""
    generator = torch.Generator().manual_seed(0)
    relevance = Relevance.from_lists([[2 * i, 2 * i + 1] for i in range(60)], n_gallery=120)
    images, texts = (GaussianEmbedding.point(torch.randn(n, 8, generator=generator)) for n in (60, 120))
    random = evaluate_retrieval(images, texts, relevance)
    assert not random.above_chance
    by_chance = sum(1 - comb(118, k) / comb(120, k) + k / 60 for k in (1, 5, 10))
    assert random.chance_rsum == pytest.approx(by_chance)
    near = GaussianEmbedding.point(images.mean.repeat_interleave(2, 0) + torch.randn(120, 8, generator=generator))
    assert evaluate_retrieval(images, near, relevance).above_chance
    # Among eight images every recall@10 is 1; recall@1 tells.
    few = Relevance.from_lists([[i] for i in range(8)], n_gallery=8)
    assert evaluate_retrieval(images[:8], images[:8], few).above_chance
    assert not evaluate_retrieval(images[:8], texts[:8], few).above_chance


@pytest.mark.parametrize(("wrong", "said"), [
    ({"yes": 2}, "yes is 2, expected 0 or 1"), ({"yes": True}, "yes is True"), ({"query": ""}, "query is ''"),
    ({"when": "yesterday"}, "yesterday"), ({"yes": 1.0}, "yes is 1.0"), ({"weight": 0}, "weight is 0"),
    ({"weight": 10**400}, "weight is 1000"), ({"weight": math.nan}, "weight is nan"),
    ({"target": 3}, "target is 3"), ({"probability": 1.5}, "probability is 1.5"),
    ({"probability": "high"}, "probability is 'high'"), ({"who": "me"}, "unknown field 'who'"),
])  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path, wrong, said):
    judgements.write_judgements(path := tmp_path / "a.jsonl", [ONE])
    path.write_text(path.read_text() + "\n" + json.dumps(asdict(ONE) | wrong) + "\n")
    with pytest.raises(UserError, match="line 3: .*correct the line") as error:
        judgements.read_judgements(path)
    assert said in str(error.value)
    path.write_text("[1]\n")
    raises(UserError, "line 1: got list, expected an object", judgements.read_judgements, path)
    raises(UserError, "cannot read", judgements.read_judgements, tmp_path / "none.jsonl")


def test_the_latest_verdict_of_one_judge_counts_and_files_and_qrels_come_back(tmp_path):
    all_of_them = [ONE, replace(ONE, id="ü", yes=0, probability=None), replace(ONE, judge="bob", weight=1.5)]
    judgements.write_judgements(tmp_path / "a.jsonl", all_of_them)
    assert judgements.read_judgements(tmp_path / "a.jsonl") == all_of_them
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["judge"] == "ann"
    file = judgements.JudgementFile(tmp_path / "b.jsonl")
    assert file.read() == [] and file.change(lambda kept: [*kept, ONE]) == ([], [ONE])
    assert file.read() is file.read() and judgements.read_judgements(file.path) == [ONE], "read once"
    judgements.write_judgements(file.path, all_of_them)  # By another program.
    assert file.change(lambda kept: kept[1:]) == (all_of_them, all_of_them[1:]) and file.read() == all_of_them[1:]
    later = replace(ONE, yes=0, when="2025-01-01T09:30:00-01:00")  # 10:30 in UTC.
    other = replace(ONE, yes=0, judge="bob", when="2024-01-01T00:00:00")
    assert judgements.merged([later], [ONE]) == judgements.merged([ONE, later]) == [later]
    assert judgements.merged([ONE], [replace(ONE, yes=0)])[0].yes == 0, "the last of equally late ones"
    assert {(one.judge, one.yes) for one in judgements.merged([ONE], [other])} == {("ann", 1), ("bob", 0)}
    (both,) = judgements.pair_verdicts([ONE, replace(other, weight=4.0)])
    assert (both.yes, both.weight) == (0.5, 3.0)
    others = [replace(ONE, judge=name, yes=yes) for name, yes in (("bob", 0), ("eve", 1))]
    second = replace(ONE, query="100% ü", id="b", yes=0)
    (tmp_path / "q").write_text(judgements.qrels_of([ONE, *others, second]))
    lines = (tmp_path / "q").read_text().splitlines()
    assert lines[0] == "a%20dog 0 x%20y.jpg 1" and all(len(line.split()) == 4 for line in lines)
    back = judgements.read_qrels(tmp_path / "q")
    verdicts = [("a dog", "x y.jpg", 1, "imported"), ("100% ü", "b", 0, "imported")]
    assert [(b.query, b.id, b.yes, b.judge) for b in back] == verdicts
    assert [b.pair for b in judgements.read_verdicts(tmp_path / "q")] == [b.pair for b in back]
    (tmp_path / "q").write_text("301\tQ0\tdoc\t2\n301 0 spam -2\n")
    assert [(b.query, b.id, b.yes) for b in judgements.read_qrels(tmp_path / "q")] == [("301", "doc", 1)]
    (tmp_path / "q").write_text("301 0 doc 1\n301 0 doc\n")
    raises(UserError, "line 2: '301 0 doc' is no line of TREC qrels", judgements.read_qrels, tmp_path / "q")


def lists(n_queries=30, k=12, seed=0):
    draw = random.Random(seed)
    shown = lambda q, i: judgements.ShownHit(f"q{q}", f"i{i}", i + 1, round(draw.uniform(0.2, 1) * 0.85**i, 6))
    hits = [shown(q, i) for q in range(n_queries) for i in range(k)]
    return hits, {hit.pair: int(draw.random() < 0.8 * hit.probability) for hit in hits}


def test_a_sample_has_known_probabilities():
    hits, _ = lists()
    for n in (1, 2, 5, 40, 200, 1000):
        found = judgements.sample_hits(hits, n)
        assert len(found) == min(n, len(hits)) == len({hit.pair for hit in found})
        assert sum(hit.weight for hit in found) == pytest.approx(len(hits))
    forty = judgements.sample_hits(hits, 40)
    assert forty == judgements.sample_hits(hits[::-1], 40) != judgements.sample_hits(hits, 40, seed=1)
    strata = {hit.why: hit.weight for hit in judgements.sample_hits(hits, 60)}
    assert "rank 1, probability 0.9-1" in strata and strata["rank 4-10, probability 0.1-0.5"] > 2
    assert {hit.pair for hit in forty} <= {hit.pair for hit in judgements.sample_hits(hits, 80)}
    assert judgements.sample_hits([], 5) == []
    bare = [replace(hit, probability=None) for hit in hits]
    assert {hit.why for hit in judgements.sample_hits(bare, 60)} == {"rank 1", "rank 2-3", "rank 4-10", "rank 11-"}


@pytest.mark.slow
def test_estimates_are_unbiased():
    """Over 100 samples of 40 of 360 hits. A false alarm has z = 4.5: seven in a million for each of three."""
    hits, yes = lists()
    whole, p = np.mean(list(yes.values())), np.mean([hit.probability for hit in hits])
    first = np.mean([yes[hit.pair] for hit in hits if hit.rank == 1])
    found, unweighted = [], []
    for seed in range(100):
        sample = judgements.sample_hits(hits, 40, seed=seed)
        given = [replace(ONE, query=h.query, id=h.id, yes=yes[h.pair], weight=h.weight) for h in sample]
        figures = judgements.judged_figures(hits, given, n_resamples=0)
        found.append((figures.precision.value, figures.excess.value, figures.first.value))
        unweighted.append(np.mean([yes[h.pair] for h in sample]))
    for values, truth in zip(np.array(found).T, (whole, p - whole, first), strict=True):
        assert abs(values.mean() - truth) < 4.5 * values.std() / 10
    assert abs(np.mean(unweighted) - whole) > 5 * np.std(unweighted) / 10, "without the weights it is biased"


def test_figures_by_hand_unjudged_hits_and_the_calibration_error_with_weights():
    hits = [
        judgements.ShownHit(*hit)
        for hit in (("a", "1", 1, 0.9), ("a", "2", 2, 0.5), ("a", "3", 3, 0.4), ("b", "1", 1, 0.2))
    ]
    given = [replace(ONE, query=q, id=i, yes=y, weight=w) for q, i, y, w in (("a", "1", 0, 1), ("a", "3", 1, 3))]
    found = judgements.judged_figures(hits, [*given, replace(ONE, query="gone")], n_resamples=50)
    assert found.n == 2 and found.n_queries == 1 and found.judged == 0.5
    assert found.precision.value == 0.75 and found.first.value == 0
    assert found.said.value == pytest.approx((0.9 + 3 * 0.4) / 4) and found.excess.value == pytest.approx(0.525 - 0.75)
    assert found.ndcg.value == pytest.approx(1 / math.log2(3)), "the one between is not there"
    assert judgements.condensed_ndcg([1, 0, 1]) == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)))
    assert judgements.condensed_ndcg([1, 1, 0]) == 1 and math.isnan(judgements.condensed_ndcg([0, 0]))
    assert found.calibration_error.value == pytest.approx(0.225), "one bin"
    bare = judgements.judged_figures([replace(hit, probability=None) for hit in hits], given)
    assert bare.calibration_error.value is None and bare.precision == found.precision
    raises(UserError, "none of the hits was judged", judgements.judged_figures, hits, [replace(ONE, query="gone")])
    # Intervals are over queries: ten hits of one query that agree say less than ten of ten queries.
    many = [judgements.ShownHit(f"q{q}", f"{i}", i + 1, 0.5) for q in range(20) for i in range(10)]
    given = [replace(ONE, query=h.query, id=h.id, yes=int(h.query[1:]) % 2, weight=1.0) for h in many]
    found = judgements.judged_figures(many, given).precision
    assert found.value == 0.5 and 0.3 < found.high - found.low < 0.6, "20 cases, not 200"
    generator = torch.Generator().manual_seed(0)
    p, w = torch.rand(60, generator=generator).double(), torch.randint(1, 4, (60,), generator=generator).double()
    y = torch.bernoulli(p / 2, generator=generator)
    plain = on_all(calibration_error_statistic(p, y, torch.ones(60), n_bins=6), 60)
    assert plain == pytest.approx(expected_calibration_error(p, y, n_bins=6))
    order, total = p.argsort(), 0.0
    for rows in order.split(10):
        total += abs(sum(float(w[i] * (p[i] - y[i])) for i in rows))
    assert on_all(calibration_error_statistic(p, y, w, n_bins=6), 60) == pytest.approx(total / float(w.sum()))
