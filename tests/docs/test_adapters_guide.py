"""The blocks of the guide about other search stacks run, each where its package is installed.

The packages of LangChain, LlamaIndex and Haystack stand in `tests/adapters`. The others, in an environment of its own:

    python -m venv env && env/bin/pip install -c constraints.txt -e . pytest hypothesis
    env/bin/pip install qdrant-client lancedb ir_measures ranx
    env/bin/python -m pytest tests/docs/test_adapters_guide.py

Run with qdrant-client 1.20.0, lancedb 0.40.0, ir-measures 0.4.3 and ranx 0.3.21.
"""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

import sfumato

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "adapters.md").read_text(encoding="utf-8")
LISTS = ROOT / "docs" / "examples" / "score_lists.csv"


def lists():
    """Scores, labels and queries of the examples."""
    rows = list(csv.DictReader(LISTS.open(encoding="utf-8")))
    return [np.array([kind(row[name]) for row in rows]) for name, kind in (("cosine", float), ("match", int))] + [
        [row["query"] for row in rows]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the calibrator of the guide."""
    place = tmp_path_factory.mktemp("guide")
    score, match, query = lists()
    sfumato.ScoreCalibrator().fit(score, match, groups=query).save(place / "cut.json")
    return place


def run(title, folder, monkeypatch, capsys):
    """What the block below a heading prints."""
    section = GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(folder)
    exec(block.replace("docs/examples/score_lists.csv", LISTS.as_posix()), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("title", "module", "n"),
    [("LangChain", "langchain_core", 5), ("LlamaIndex", "llama_index", 5), ("Haystack", "haystack", 2)],
)
def test_the_blocks_of_frameworks_run(title, module, n, folder, toy, monkeypatch, capsys):
    pytest.importorskip(module, reason=f"{title} is not installed")
    sfumato.load(toy / "run").index(toy / "data").save(folder / "runs" / "mine-index")
    assert len(run(title, folder, monkeypatch, capsys).splitlines()) == n


@pytest.mark.parametrize(("title", "module"), [("Qdrant", "qdrant_client"), ("LanceDB", "lancedb")])
def test_a_stored_vector_is_a_certain_match_of_itself(title, module, folder, monkeypatch, capsys):
    pytest.importorskip(module, reason=f"{title} is not installed")
    assert run(title, folder, monkeypatch, capsys).startswith("[(7, ")


def test_the_answer_of_elasticsearch_gets_probabilities(folder, monkeypatch, capsys):
    printed = run("Elasticsearch and OpenSearch", folder, monkeypatch, capsys)
    found = [float(p) for p in re.findall(r"(\d\.\d+)\)", printed)]
    assert len(found) == 4 and found == sorted(found, reverse=True) and found[0] > 10 * found[1]


def test_evaluation_packages_read_a_run_of_probabilities_in_the_same_order(folder, monkeypatch, capsys):
    for module in ("ir_measures", "ranx"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    import ir_measures
    import ranx

    run("TREC runs", folder, monkeypatch, capsys)
    rows = list(csv.DictReader(LISTS.open(encoding="utf-8")))
    plain = lambda text: text.replace(" ", "_")
    by_score, truth = {}, {}
    for row in rows:
        by_score.setdefault(plain(row["query"]), {})[plain(row["item"])] = float(row["cosine"])
        truth.setdefault(plain(row["query"]), {})[plain(row["item"])] = int(row["match"])
    read, ours = list(ir_measures.read_trec_run("run.trec")), {query: {} for query in by_score}
    for one in read:
        ours[one.query_id][one.doc_id] = one.score
    assert len(read) == sum(map(len, by_score.values()))
    for query, own in ours.items():
        scores = [by_score[query][item] for item in sorted(own, key=own.get, reverse=True)]
        assert scores == sorted(scores, reverse=True)
    measures = [ir_measures.nDCG @ 10, ir_measures.RR]
    found, known = (ir_measures.calc_aggregate(measures, truth, one) for one in (ours, by_score))
    assert all(
        found[m] == pytest.approx(known[m], abs=1e-3) for m in measures
    )  # Items of equal scores may change places.
    qrels = ranx.Qrels({q: {i: m for i, m in own.items() if m} or {"-": 1} for q, own in truth.items()})
    score = ranx.evaluate(qrels, ranx.Run.from_file("run.trec", kind="trec"), "mrr")
    assert score == pytest.approx(ranx.evaluate(qrels, ranx.Run(by_score), "mrr"), abs=1e-3)
