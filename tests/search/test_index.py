import numpy as np
import pytest
import torch
from scipy.special import logit
from support.raising import raises
from support.references_metrics import csd_by_loops, order_of

from sfumato import DISTANCES, Calibration, GaussianEmbedding, GaussianIndex, QueryScores, csd_matrix
from sfumato.search.answer import SearchOptions


def clustered(n, d=16, *, seed, n_clusters=40):
    centres, random = np.random.default_rng(99).standard_normal((n_clusters, d)), np.random.default_rng(seed)
    mean = centres[random.integers(n_clusters, size=n)] + 0.4 * random.standard_normal((n, d))
    log_var = random.standard_normal((n, 1)) + 0.3 * random.standard_normal((n, d)) - 3
    return GaussianEmbedding(mean, log_var).to(np.float32)


ids_of = lambda n: [f"item {i}" for i in range(n)]


def test_hits_carry_everything_and_equal_distances_come_in_the_order_given():
    gallery, queries = clustered(211, seed=0), clustered(5, seed=1)
    payload = {"path": [f"{i}.jpg" for i in range(211)], "text": [str(i) for i in range(211)]}
    index = GaussianIndex.build(gallery, ids_of(211), logit_scale=2.0, logit_bias=3.0, payload=payload)
    results, matrix = index.search(queries, 7), csd_matrix(queries, gallery)
    assert len(index) == 211 and len(results) == 5
    for i, result in enumerate(results):
        assert len(result) == 7 and result.uncertainty == pytest.approx(float(queries.total_variance[i]))
        assert [h.rank for h in result] == list(range(1, 8))
        assert [h.distance for h in result] == sorted(h.distance for h in result)
        for hit in result:
            j = int(hit.id.split()[1])
            query, item = queries[i : i + 1], gallery[j : j + 1]
            loops = csd_by_loops(query.mean, query.var, item.mean, item.var)
            assert hit.distance == pytest.approx(float(loops[0, 0]), rel=2e-6)
            assert hit.distance == pytest.approx(float(matrix[i, j]), rel=1e-5)
            assert hit.match_probability == pytest.approx(1 / (1 + np.exp(2 * hit.distance - 3)), rel=1e-4)
            assert hit.uncertainty == pytest.approx(float(gallery.total_variance[j]))
            assert hit.payload == {"path": f"{j}.jpg", "text": str(j)}
    # The six closest are the same, scattered among others.
    others, place = clustered(300, seed=23), np.array([17, 40, 111, 150, 222, 290])
    mean, log_var = others.mean + 5, others.log_var.copy()
    mean[place], log_var[place] = np.arange(16) / 7, -1
    index = GaussianIndex.build(GaussianEmbedding(mean, log_var), ids_of(300))
    means = np.random.default_rng(1).standard_normal((50, 16)) / 9 + np.arange(16) / 7
    queries = GaussianEmbedding(means, np.zeros((50, 16)))
    for result in index.search(queries, 4):
        assert [h.id for h in result] == [f"item {i}" for i in place[:4].tolist()]
        assert len({h.distance for h in result}) == 1


@pytest.mark.parametrize("distance", [n for n, d in DISTANCES.items() if not d.sampled])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_exact_ranks_by_any_distance(distance, direction):
    gallery, queries = clustered(61, 4, seed=6, n_clusters=61), clustered(4, 4, seed=7, n_clusters=61)
    index = GaussianIndex.build(gallery, ids_of(61), distance=distance, direction=direction)
    x, y = queries.to(np.float64), gallery.to(np.float64)
    matrix = DISTANCES[distance].matrix(x, y) if direction == "i2t" else DISTANCES[distance].matrix(y, x).T
    found, position = index.nearest(queries, 61)
    np.testing.assert_allclose(found, np.take_along_axis(matrix, position, 1), rtol=2e-4, atol=1e-4)
    assert position[:, :3].tolist() == [order_of(row)[:3] for row in matrix.tolist()]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_kept_in_float32(dtype):
    gallery = clustered(30, seed=8).to(dtype)
    index = GaussianIndex.build(gallery, ids_of(30))
    assert index.embeddings.dtype == np.float32 and index.search(gallery[:1], 1)[0][0].id == "item 0"
    assert [type(each) for each in index.nearest(gallery, 3)] == [type(gallery.mean)] * 2


def calibrated(n_gallery=150, n_queries=400, seed=30):
    gallery, of = clustered(n_gallery, seed=seed, n_clusters=150), np.arange(2 * n_queries) % n_gallery
    random = np.random.default_rng(seed + 1)
    noise = 2 * random.random((2 * n_queries, 1), np.float32) * random.standard_normal((2 * n_queries, 16), np.float32)
    queries = GaussianEmbedding(gallery.mean[of] + noise, gallery.log_var[of])
    held_out, new = queries[:n_queries], queries[n_queries:]
    distance, match = csd_matrix(held_out, gallery), np.eye(n_gallery, dtype=int)[of[:n_queries]]
    return gallery, new, of[n_queries:].tolist(), Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))


def test_sets_are_within_the_radius_and_abstentions_by_the_risk():
    gallery, queries, _, calibration = calibrated()
    index = GaussianIndex.build(gallery, ids_of(150), calibration=calibration)
    results = index.search(queries, 3, SearchOptions(coverage=0.9))
    radius, matrix = calibration.t2i.conformal_radius(1 - 0.9), csd_matrix(queries, gallery)
    for i, result in enumerate(results):
        within = {f"item {j}" for j in np.flatnonzero(matrix[i] <= radius)}
        assert {h.id for h in result.conformal_set} == within
        assert [h.distance for h in result.conformal_set] == sorted(h.distance for h in result.conformal_set)
        assert [h.rank for h in result.conformal_set] == list(range(1, len(within) + 1))
        for a, b in zip(result, result.conformal_set, strict=False):
            assert (a.id, a.distance, a.uncertainty) == (b.id, b.distance, b.uncertainty)
            assert a.match_probability == pytest.approx(b.match_probability)
        assert len(result) == 3 and result.abstained is None
    sizes = [len(r.conformal_set) for r in results]
    assert max(sizes) > 3 and min(sizes) < max(sizes), "more than the hits, and no fixed number"
    everything = index.search(queries[:2], 3, SearchOptions(coverage=0.999))
    assert all(len(r.conformal_set) == 150 for r in everything), "400 queries vouch for no less"
    plain, asked = index.search(queries, 4), index.search(queries, 4, SearchOptions(max_risk=0.2, min_probability=0.3))
    limit = calibration.t2i.abstain_below(0.2)
    for result, same in zip(asked, plain, strict=True):
        assert same.abstained is None and same.conformal_set is None
        assert result.abstained == (same[0].match_probability <= limit)
        assert result.hits == tuple(h for h in same if h.match_probability >= 0.3)
        assert result.hidden == result.to_json()["hidden"] == 4 - len(result) and same.hidden == 0
    assert {r.abstained for r in asked} == {True, False}


def test_probabilities_know_the_size_of_the_gallery():
    gallery, queries, _, calibration = calibrated()
    larger = GaussianEmbedding.cat([gallery, clustered(1350, seed=40, n_clusters=150)])
    index, tenfold = (GaussianIndex.build(g, ids_of(g.n), calibration=calibration) for g in (gallery, larger))
    shift = np.log(1 / 1499) - np.log(1 / 149)
    for d in (0.5, 2.0, 8.0):
        few, many = (logit(i.match_probability(np.array(d))) for i in (index, tenfold))
        assert float(few) == pytest.approx(float(calibration.logit(np.array(d))), abs=1e-6)
        assert float(many - few) == pytest.approx(shift, abs=1e-6)
    hit = tenfold.search(queries[:1], 1)[0][0]
    expected = calibration.t2i.probability(np.array(hit.distance), n_gallery=1500)
    assert hit.match_probability == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("change", "message"), [
    ({"ids": ids_of(2)}, "2 ids for 3 embeddings"), ({"ids": ["a", "b", "a"]}, "'a' occurs 2 times"),
    ({"distance": "csb"}, "unknown distance 'csb'; did you mean 'csd'"),
    ({"distance": "average_l2"}, "is sampled at random"), ({"logit_scale": 0.0}, "logit_scale must be positive"),
    ({"logit_bias": float("nan")}, "logit_scale must be positive and finite"),
    ({"payload": {"text": ["a"]}}, "payload 'text' must be 3 strings"),
    ({"metadata": {"x": float("nan")}}, "not JSON compliant"),
    ({"embeddings": GaussianEmbedding(torch.full((3, 2), torch.nan), torch.zeros(3, 2))}, "embedding 0 holds NaN"),
    ({"embeddings": GaussianEmbedding(np.zeros((3, 2)), np.full((3, 2), 100.0))}, "overflows"),
    ({"embeddings": GaussianEmbedding.point(np.zeros((3, 2))), "distance": "kl"}, "needs positive variances"),
    ({"embeddings": GaussianEmbedding.point(np.zeros((0, 2))), "ids": []}, "got no embeddings"),
])  # fmt: skip
def test_mistakes_are_named(change, message):
    arguments = {"embeddings": GaussianEmbedding(np.zeros((3, 2)), np.zeros((3, 2))), "ids": ids_of(3)} | change
    raises(ValueError, message, GaussianIndex.build, arguments.pop("embeddings"), arguments.pop("ids"), **arguments)


def test_promises_that_nothing_vouches_for_and_mistakes_in_a_search_are_named():
    gallery, queries, _, calibration = calibrated()
    bare = GaussianIndex.build(gallery, ids_of(150))
    for asked in ("coverage", "max_risk"):
        told = rf"{asked}.* needs a calibration.*sfumato calibrate RUN.*build the index again"
        raises(ValueError, told, bare.search, queries, 3, SearchOptions(**{asked: 0.5}))
    assert len(bare.search(queries[:1], 3, SearchOptions(min_probability=0.0))[0]) == 3
    old = GaussianIndex.build(gallery, ids_of(150), calibration=Calibration(2.0, 1.0, 0.1))
    assert (old.logit_scale, old.logit_bias) == (2.0, 1.0)
    raises(ValueError, "no scores of held-out queries for t2i", old.search, queries, 3, SearchOptions(coverage=0.9))
    index = GaussianIndex.build(gallery, ids_of(150), calibration=calibration)
    raises(ValueError, "coverage must be between 0 and 1, got 90", index.search, queries, 3, SearchOptions(coverage=90))
    with pytest.raises(ValueError, match="min_probability must be between 0 and 1, got 1.5"):
        index.search(queries, 3, SearchOptions(min_probability=1.5))
    raises(ValueError, "no limit has a risk of at most 0.0001", index.search, queries, 3, SearchOptions(max_risk=1e-4))
    index = GaussianIndex.build(clustered(3, seed=0), ids_of(3))
    raises(ValueError, "k must be at least 1, got 0", index.search, clustered(1, seed=0), 0)
    raises(ValueError, "queries have 5 dimensions, the index has 16", index.search, clustered(1, 5, seed=0), 1)
    raises(ValueError, "holds NaN", index.search, GaussianEmbedding.point(np.full((1, 16), np.nan)), 1)
    raises(TypeError, "ids must be strings, got 7", GaussianIndex.build, clustered(1, seed=0), [7])
