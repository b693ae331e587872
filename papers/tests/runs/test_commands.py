"""`python -m papers runs`: strategies, comparisons of single queries, and published figures."""

import json

import pytest
from support.words import folded


def test_strategies_rank_what_evaluate_ranks(toy, sfumato, papers):
    pytest.importorskip("faiss", reason="the extra faiss is not installed")
    run = toy / "run"
    plain = sfumato.json("evaluate", "run", run)
    found = papers.json("runs", "strategies", run, "--engine", "exact")
    assert list(found) == ["mean", "wasserstein2", "csd", "faiss_mean", "faiss_rerank", "faiss_lifted"]
    for direction in ("i2t", "t2i"):
        csd, lifted = (found[name]["truths"]["test"][direction] for name in ("csd", "faiss_lifted"))
        assert csd["map@r"] == plain[direction]["map@r"] == lifted["map@r"] and "mean_rank" not in lifted
    chosen = ("runs", "strategies", run, "--strategies", "csd,faiss_mean", "--engine", "exact")
    words = folded(papers.printed(*chosen))
    assert "FAISS (mean only)" in words and "i2t" in words
    assert "unknown strategy 'fiass'; known: all, pcme, mean" in papers.refused(*chosen[:4], "fiass")


def test_single_queries_are_compared(toy, sfumato, papers, tmp_path):
    files = {}
    for name in ("csd", "squared_l2"):
        files[name] = tmp_path / f"{name}.csv"
        files[name, "figures"] = sfumato.json(
            "evaluate", "run", toy / "run", "--distance", name, "--per-query", files[name]
        )
    found = papers.json("runs", "compare", files["csd"], files["squared_l2"])["differences"]
    for d in found:
        assert d["first"] == pytest.approx(files["csd", "figures"][d["direction"]][d["metric"]])
        assert d["second"] == pytest.approx(files["squared_l2", "figures"][d["direction"]][d["metric"]])
    assert {d["metric"] for d in found} == {"recall@1", "recall@5", "recall@10", "r_precision", "map@r"}
    words = folded(papers.printed("runs", "compare", files["csd"], files["csd"]))
    assert "compared with" in words and "+0.00" in words and "queries in" in words
    of_means = papers.json("runs", "strategies", toy / "run", "--strategies", "mean")["mean"]["truths"]["test"]
    assert of_means["i2t"]["map@r"] == files["squared_l2", "figures"]["i2t"]["map@r"]
    assert "no results of single queries at" in papers.refused("runs", "compare", tmp_path / "x.csv", files["csd"])


FIGURES = {
    "flickr30k": {"i2t": {"recall@1": 0.5, "recall@5": 0.75}, "t2i": {"recall@1": 0.25, "recall@5": 0.5}, "rsum": 4.0}
}


def test_published_figures_stand_beside_those_of_a_file(papers, tmp_path):
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps({"truths": FIGURES, "uncertainty": None, "total_variance": None}))
    found = papers.json("runs", "published", file)
    assert {row["table"] for row in found["rows"]} == {"3"}
    assert found["own"]["flickr30k rsum"] == pytest.approx(400) and found["own"]["i2t flickr30k recall@5"] == 75
    words = folded(papers.printed("runs", "published", file))
    assert "beside PVSE++, table 3 (Flickr30k" in words and "VSRN ours" in words and "69.2" in words
    words = folded(papers.printed("runs", "published", file, "--tables", "PVSE++ 7"))
    assert "beside PVSE++, table 7" in words and "372.48" in words
    assert "no figures for table 'PCME++ 9'" in papers.refused("runs", "published", file, "--tables", "PCME++ 9")
    for values, message in (
        ({"i2t": {}}, "no figures of a benchmark"),
        ({"truths": {"mine": FIGURES["flickr30k"]}}, "no published table has figures of mine"),
    ):
        file.write_text(json.dumps(values))
        assert message in papers.refused("runs", "published", file)
