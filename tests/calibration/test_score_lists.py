"""Probabilities of the lists of any engine: against loops, scikit-learn, SQL, and simulated lists."""

import json
import math
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.raising import raises

from sfumato import ScoreCalibrator
from sfumato.calibration.logistic import SHAPE, ScoreFormula
from sfumato.errors import UserError


def simulated(q, seed, *, comparable=True, empty=0.2):
    """Lists of 3 to 30 scores of which the best may match; (scores, labels, queries)."""
    random, scores, labels, queries = np.random.default_rng(seed), [], [], []
    for i in range(q):
        n = int(random.integers(3, 31))
        own, match = random.normal(0, 1, n), np.zeros(n)
        if random.random() > empty:
            own[0] += random.exponential(2)
            match[0] = 1
        scale, shift = (1, 10) if comparable else (math.exp(random.normal()), random.normal(0, 20))
        scores += (own * scale + shift).tolist()
        labels += match.tolist()
        queries += [f"query {i}"] * n
    return np.array(scores), np.array(labels), np.array(queries)


def lists_of(queries):
    first, number = np.unique(queries, return_index=True, return_inverse=True)[1:]
    return [np.flatnonzero(number == place) for place in first.argsort()]


@pytest.fixture(scope="module")
def data():
    return simulated(150, 1)


@pytest.fixture(scope="module", params=[False, True])
def fitted(request, data):
    return ScoreCalibrator(comparable=request.param).fit(data[0], data[1], groups=data[2])


def by_loops(formula: ScoreFormula, scores):
    n, top = len(scores), max(scores)
    mean = math.fsum(scores) / n
    deviation = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / n)
    deviation, found = deviation if deviation > 1e-9 * abs(top) else 1.0, []
    for s in scores:
        features = {
            "gap": (s - top) / deviation, "order": -math.log(1 + sum(other > s for other in scores)),
            "lead": (top - sorted(scores)[-2]) / deviation if n > 1 else 0.0, "height": (top - mean) / deviation,
            "crowd": -math.log(math.fsum(math.exp((other - top) / deviation) for other in scores)),
        }  # fmt: skip
        if formula.knots is not None:
            low, high = formula.knots
            features |= {"low": min(s, low), "middle": min(max(s, low), high) - low, "high": max(s, high) - high}
        found.append(formula.intercept + math.fsum(formula.weights[name] * features[name] for name in formula.weights))
    return found


ODD = [[3.0], [2.0, 2.0], [5.0, 5.0, 5.0], [1.0, 4.0, 4.0, 2.0], [-1e6, -1e6 - 1e-3], [12.5, 11.0, 9.0, 10.0, 10.0]]


def test_logits_are_those_of_loops(fitted, data):
    scores, _, queries = data
    shuffled = np.random.default_rng(0).permutation(len(scores))
    found = fitted.decision_function(scores[shuffled], groups=queries[shuffled])
    for query in np.unique(queries)[::7]:
        inside = queries[shuffled] == query
        wanted = by_loops(fitted.formula_, scores[shuffled][inside].tolist())
        np.testing.assert_allclose(found[inside], wanted, rtol=0, atol=1e-9)
    for odd in ODD:
        np.testing.assert_allclose(fitted.decision_function(odd), by_loops(fitted.formula_, odd), rtol=1e-9, atol=1e-8)


@pytest.mark.filterwarnings("ignore:hits match more often")
@pytest.mark.parametrize("seed", range(2))
def test_a_higher_score_never_gets_a_lower_probability(seed):
    scores, labels, queries = simulated(40, seed)
    reversed_labels = 1 - labels if seed % 2 else labels
    for comparable in (True, False):
        made = ScoreCalibrator(comparable=comparable).fit(scores, reversed_labels, groups=queries)
        p = made.predict_proba(scores, groups=queries)[:, 1]
        for inside in lists_of(queries):
            assert (np.diff(p[inside][np.argsort(scores[inside], kind="stable")]) >= -1e-12).all()


def test_the_fit_is_that_of_scikit_learn_and_scores_are_used_as_such_where_they_are_comparable(data):
    """Labels are drawn by a formula whose weights are all positive, and every eleventh hit is not judged."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    scores, _, queries = data
    unit = {name: ScoreFormula({n: float(n == name) for n in SHAPE}, 0.0, None, (0, 0, 0)) for name in SHAPE}
    features, rank = np.empty((len(scores), 5)), np.empty(len(scores))
    for query in np.unique(queries):
        inside, own = queries == query, scores[queries == query].tolist()
        features[inside] = np.array([by_loops(unit[name], own) for name in SHAPE]).T
        rank[inside] = [1 + sum(other > s for other in own) for s in own]
    chance = 1 / (1 + np.exp(-(features @ [1.0, 0.7, 0.3, 0.2, 0.1])))
    labels = (np.random.default_rng(4).random(len(scores)) < chance).astype(float)
    labels[::11] = np.nan
    made = ScoreCalibrator(comparable=False, penalty=0.5).fit(scores, labels, groups=queries)
    assert all(made.formula_.weights[name] > 0 for name in ("gap", "order")), "else the constraint is at work"
    mean, deviation, known = features.mean(0), features.std(0), ~np.isnan(labels)
    reference = linear_model.LogisticRegression(C=2.0, tol=1e-10, max_iter=10_000)
    reference.fit((features[known] - mean) / deviation, labels[known], sample_weight=1 / rank[known])
    weights = reference.coef_[0] / deviation
    np.testing.assert_allclose(list(made.formula_.weights.values()), weights, rtol=1e-3, atol=1e-4)
    assert made.formula_.intercept == pytest.approx(reference.intercept_[0] - mean @ weights, abs=1e-3)
    for seed in range(3):
        random = np.random.default_rng(seed)
        same = np.repeat(random.normal(0, 3, 200), 2)  # Two hits: the shape says nothing, the height all.
        scores, queries = same + np.tile([1.0, 0.0], 200), np.repeat(np.arange(200), 2)
        labels = (random.random(400) < 1 / (1 + np.exp(-same))) * np.tile([1.0, 0.0], 200)
        assert ScoreCalibrator().fit(scores, labels, groups=queries).formula_.knots is not None
        labels = (random.random(400) < 0.4) * np.tile([1.0, 0.0], 200)
        assert ScoreCalibrator().fit(scores, labels, groups=queries).formula_.knots is None


def test_probabilities_and_their_sums_hold_on_new_lists():
    """Each mean within 4 standard errors: a right fit fails once in 5,000 times (2 lists of figures, 3 kinds)."""
    scores, labels, queries = simulated(800, 11)
    made = ScoreCalibrator().fit(scores, labels, groups=queries)
    scores, labels, queries = simulated(800, 12)
    p = made.predict_proba(scores, groups=queries)[:, 1]
    assert abs(p - labels).mean() < 0.2 and abs((p - labels).sum()) < 4 * math.sqrt((p * (1 - p)).sum())
    sums, own = made.expected_matches(scores, groups=queries), lists_of(queries)
    assert sums == pytest.approx([p[inside].sum() for inside in own])
    nothing = made.nothing_matches(scores, groups=queries)
    empty = np.array([labels[inside].max() == 0 for inside in own])
    assert abs((nothing - empty).sum()) < 4 * math.sqrt((nothing * (1 - nothing)).sum())
    assert (nothing <= 1 - np.array([p[inside].max() for inside in own]) + 1e-12).all()
    low, high = nothing < np.quantile(nothing, 0.3), nothing > np.quantile(nothing, 0.7)
    assert empty[high].mean() > 0.1 + empty[low].mean()
    independent = np.array([np.prod(1 - p[inside]) for inside in own])
    assert ((nothing - empty) ** 2).mean() <= ((independent - empty) ** 2).mean()


def test_a_prior_predicts_few_labels_move_it_and_further_evidence_is_fitted(data, tmp_path):
    scores, labels, queries = data
    prior = ScoreCalibrator(prior="bm25")
    before = prior.predict_proba(scores, groups=queries)
    assert before.shape == (len(scores), 2) and np.allclose(before.sum(1), 1)
    fitted = lambda **given: ScoreCalibrator(comparable=False, **given).fit(scores, labels, groups=queries)
    score = lambda made: made.score(scores, labels, groups=queries)
    strong, weak, plain = fitted(prior="bm25", penalty=1e9), fitted(prior="bm25", penalty=1e-6), fitted(penalty=1e-6)
    given = prior._known().weights
    assert list(strong.formula_.weights.values()) == pytest.approx(list(given.values()), abs=1e-4)
    assert score(weak) == pytest.approx(score(plain), abs=1e-6) and score(weak) > score(prior)
    plain.save(tmp_path / "mine.json")
    again = ScoreCalibrator(prior=tmp_path / "mine.json")
    np.testing.assert_array_equal(again.predict_proba(scores, groups=queries), plain.predict_proba(scores, queries))
    again.set_params(penalty=1e9, comparable=False).fit(scores, labels, groups=queries).save(tmp_path / "again.json")
    (tmp_path / "mine.json").unlink()
    loaded = ScoreCalibrator.load(tmp_path / "again.json")
    assert loaded.formula_.weights == pytest.approx(plain.formula_.weights, abs=1e-3)
    assert loaded.fit(scores, labels, groups=queries).formula_.weights == again.formula_.weights
    both = np.stack([scores, labels + np.random.default_rng(3).normal(0, 0.5, len(labels))], 1)
    plain, made = (ScoreCalibrator().fit(x, labels, groups=queries) for x in (scores, both))
    assert made.score(both, labels, groups=queries) > plain.score(scores, labels, groups=queries) + 0.02
    raises(ValueError, "0 columns of further evidence, and the fit had 1", made.predict_proba, scores, groups=queries)


def test_scikit_learn_takes_it(data):
    sklearn = pytest.importorskip("sklearn")
    from sklearn.model_selection import GridSearchCV, GroupKFold
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.utils.validation import check_is_fitted

    scores, labels, queries = data
    number = np.unique(queries, return_inverse=True)[1]
    X, made = np.stack([scores, number], axis=1), ScoreCalibrator(penalty=3.0, prior="cosine")
    copy = sklearn.base.clone(made)
    assert copy is not made and copy.get_params() == made.get_params() and repr(copy) == repr(made)
    assert copy.set_params(prior=None, penalty=2.0).get_params() == {**made.get_params(), "prior": None, "penalty": 2.0}
    search = GridSearchCV(ScoreCalibrator(), {"penalty": [1e-3, 1.0, 1e5]}, cv=GroupKFold(3))
    search.fit(X, labels, groups=number)
    assert search.best_params_["penalty"] < 1e5
    pipeline = Pipeline([("same", FunctionTransformer()), ("calibrator", ScoreCalibrator())]).fit(X, labels)
    wanted = ScoreCalibrator().fit(scores, labels, groups=queries).predict_proba(scores, groups=queries)
    np.testing.assert_allclose(pipeline.predict_proba(X), wanted, atol=1e-12)
    check_is_fitted(pipeline[-1])
    assert sklearn.base.is_classifier(made) and pipeline.predict(X).mean() < 0.5


def test_a_file_keeps_it_without_a_pickle(fitted, data, tmp_path):
    file = tmp_path / "calibrator.json"
    fitted.save(file)
    loaded = ScoreCalibrator.load(file)
    assert loaded.get_params() == fitted.get_params()
    found, wanted = (made.predict_proba(data[0], groups=data[2]) for made in (loaded, fitted))
    np.testing.assert_array_equal(found, wanted)
    values = json.loads(file.read_text())
    for change in ({"format": "x"}, {"formula": {}}, {"arguments": {"a": 1}}, {"arguments": {"penalty": -1}}):
        file.write_text(json.dumps(values | change))
        raises(ValueError, "no file of a score calibrator", ScoreCalibrator.load, file)
    file.write_text(json.dumps(values | {"format": 2}))
    raises(UserError, "later version of sfumato", ScoreCalibrator.load, file)
    file.write_bytes(b"\x80\x04")
    raises(ValueError, "no file of a score calibrator", ScoreCalibrator.load, file)


@pytest.mark.parametrize("prior", [None, "fusion"])
@pytest.mark.parametrize("kind, by_rank", [
    ("1 / rank", lambda r: 1 / r), ("1 / (60 + rank)", lambda r: 1 / (60 + r)), ("1000 - rank", lambda r: 1000 - r),
    ("all equal", lambda r: 0.1 + 0 * r),
])  # fmt: skip
def test_scores_that_are_ranks_say_the_same_of_lists_of_any_length(kind, by_rank, prior):
    random, rank, constant = np.random.default_rng(1), np.tile(np.arange(1.0, 21), 60), 7.3
    match = random.random(1200) < 0.6 / rank
    x = np.stack([by_rank(rank), np.full(1200, constant)], axis=1)
    made = ScoreCalibrator(prior=prior).fit(x, match, groups=np.repeat(np.arange(60), 20))
    said = []
    for n in (5, 19, 20, 21, 50):
        one = np.stack([by_rank(np.arange(1.0, n + 1)), np.full(n, constant)], axis=1)
        said.append(made.predict_proba(one, groups=np.zeros(n))[0, 1])
    expected = match.mean() if kind == "all equal" else match[rank == 1].mean()
    assert np.ptp(said) < 1e-9 and abs(said[0] - expected) < 0.1


def test_neither_order_nor_sign_nor_types_change_anything_and_distances_taken_for_scores_are_told(data):
    score, label, query = data
    order = np.random.default_rng(2).permutation(len(score))
    made = ScoreCalibrator(comparable=True).fit(score, label, groups=query)
    other = ScoreCalibrator(higher_is_better=False, comparable=np.True_, penalty=np.float32(1))
    other.fit(-score[order], label[order], groups=query[order])
    assert other.formula_.knots is not None
    np.testing.assert_allclose(other.predict_proba(-score, query), made.predict_proba(score, query), rtol=1e-6)
    with pytest.warns(UserWarning, match="smaller: .* give higher_is_better=False"):
        ScoreCalibrator().fit(-score, label, groups=query)
    for sign in (1, -1):
        with warnings.catch_warnings(action="error"):
            ScoreCalibrator(higher_is_better=sign > 0).fit(sign * score, label, groups=query)


def test_bad_input_and_prediction_needs_numpy_alone():
    made, prior = ScoreCalibrator(), ScoreCalibrator(prior="bm25")
    for message, function, *given in (
        ("got 2 labels for 3 hits", made.fit, [1, 2, 3], [0, 1]),
        ("got 2 groups for 3 hits", made.fit, [1, 2, 3], [0, 1, 0], [1, 1]),
        ("not finite", made.fit, [1, np.nan], [0, 1]), ("not 0, 1 or NaN", made.fit, [1, 2], [0, 2]),
        *(("all labels are equal", made.fit, [1, 2], labels) for labels in ([0, 0], [np.nan, np.nan])),
        ("X must be", made.fit, np.ones((2, 2, 2)), [0, 1]), ("above 1e\\+100", made.fit, [1e200, 2], [0, 1]),
        ("not fitted", made.predict_proba, [1, 2]),
        ("prior must be bm25", ScoreCalibrator(prior="dense").predict_proba, [1.0]),
        ("penalty must be", ScoreCalibrator(penalty=0).fit, [1, 2], [0, 1]),
        *(("comparable must be", ScoreCalibrator(comparable=one).fit, [1, 2], [0, 1]) for one in ("no", 1)),
        ("got 1 labels for 2 hits", prior.score, [1, 2], [1]),
        ("no label of y is 0 or 1", prior.score, [1, 2], [np.nan] * 2),
    ):  # fmt: skip
        raises(ValueError, message, function, *given)
    assert prior.predict_proba([]).shape == (0, 2)
    code = "import sys\nfrom sfumato import ScoreCalibrator\nScoreCalibrator(prior='bm25').predict_proba([3., 1.])\n"
    code += "print([m for m in ('torch', 'scipy', 'sklearn', 'pydantic', 'PIL', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("comparable, sign", [(False, 1), (True, 1), (True, -1)])
def test_the_sql_of_the_guide_in_sqlite(comparable, sign, data, tmp_path):
    scores, labels, queries = data
    made = ScoreCalibrator(comparable=comparable, higher_is_better=sign > 0).fit(sign * scores, labels, groups=queries)
    made.save(tmp_path / "calibrator.json")
    cases = [sign * scores[inside] for inside in lists_of(queries)[:25]]
    cases += [sign * np.array(odd) for odd in ODD if odd[0] > -1e6]
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "scores.md"
    printed = guide.read_text(encoding="utf-8").split("```sql\n")[1].partition("```")[0]
    rows = [(q, i, float(score)) for q, case in enumerate(cases) for i, score in enumerate(case)]
    with sqlite3.connect(":memory:") as connection:
        try:
            connection.execute("SELECT LN(2.0)")
        except sqlite3.OperationalError:
            pytest.skip("this SQLite has no mathematical functions")
        connection.execute("CREATE TABLE hits (query INTEGER, item INTEGER, score REAL)")
        connection.executemany("INSERT INTO hits VALUES (?, ?, ?)", rows)
        connection.execute("CREATE TABLE calibrator (json TEXT)")
        connection.execute("INSERT INTO calibrator VALUES (?)", [(tmp_path / "calibrator.json").read_text()])
        found = {(q, i): p for q, i, p in connection.execute(printed)}
    for q, case in enumerate(cases):
        wanted = made.predict_proba(case)[:, 1].tolist()
        assert [found[q, i] for i in range(len(case))] == pytest.approx(wanted, abs=1e-6)
