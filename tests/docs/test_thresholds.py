"""The guides about thresholds, adapters and adoption run as they are printed."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import architecture_of, import_open_clip, taught_clip, taught_open_clip, two_colours

import sfumato
from sfumato.models.run import load_model

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "thresholds.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_blocks_print_what_the_guide_says(tmp_path):
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("text") == 7
    code, expected = ("".join(text for language, text in blocks if language == one) for one in ("python", "text"))
    code = code.replace("docs/examples/score_lists.csv", LISTS.as_posix())
    code += "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


def block_with(word):
    guide = (GUIDE.parent / "adopt.md").read_text(encoding="utf-8")
    [block] = [code for _, code in BLOCK.findall(guide) if word in code]
    return block


def run_block(block, folder, monkeypatch, capsys):
    monkeypatch.setenv("SFUMATO_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    exec(block, {})
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_with_sentence_transformers_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    taught_clip(tmp_path / "model", two_colours(tmp_path))
    block = block_with("SentenceTransformer").replace('"clip-ViT-B-32"', '"model"')
    assert run_block(block, tmp_path, monkeypatch, capsys).count(".png") == 3
    assert load_model(tmp_path / "runs" / "adopted-st").calibration.logit_scale > 0


def test_the_lines_with_open_clip_run(tmp_path, monkeypatch, capsys):
    import_open_clip()
    taught = taught_open_clip(tmp_path / "model", two_colours(tmp_path))
    block = block_with("open_clip").replace('"ViT-B-32", "laion2b_s34b_b79k"', '"local-dir:model"')
    block = block.replace('("ViT-B-32", clip)', f'("{architecture_of(taught)}", clip)')
    assert run_block(block, tmp_path, monkeypatch, capsys).count(".png") == 3


LISTS = ROOT / "docs" / "examples" / "score_lists.csv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, rows = tmp_path_factory.mktemp("guide"), list(csv.DictReader(LISTS.open(encoding="utf-8")))
    score, match = (np.array([float(row[name]) for row in rows]) for name in ("cosine", "match"))
    sfumato.ScoreCalibrator().fit(score, match, groups=[row["query"] for row in rows]).save(place / "cut.json")
    return place


def run(title, folder, monkeypatch, capsys):
    guide = (GUIDE.parent / "adapters.md").read_text(encoding="utf-8")
    section = guide.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    [block] = [code for language, code in BLOCK.findall(section) if language == "python"]
    monkeypatch.chdir(folder)
    exec(block.replace("docs/examples/score_lists.csv", LISTS.as_posix()), {"__name__": "__main__"})
    return capsys.readouterr().out


FRAMEWORKS = [("LangChain", "langchain_core", 5), ("LlamaIndex", "llama_index", 5), ("Haystack", "haystack", 2)]


@pytest.mark.parametrize(("title", "module", "n"), FRAMEWORKS)
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
    ir_measures, ranx = (pytest.importorskip(one, reason=f"{one} is not installed") for one in ("ir_measures", "ranx"))
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
    # Items of equal scores may change places.
    assert all(found[m] == pytest.approx(known[m], abs=1e-3) for m in measures)
    qrels = ranx.Qrels({q: {i: m for i, m in own.items() if m} or {"-": 1} for q, own in truth.items()})
    score = ranx.evaluate(qrels, ranx.Run.from_file("run.trec", kind="trec"), "mrr")
    assert score == pytest.approx(ranx.evaluate(qrels, ranx.Run(by_score), "mrr"), abs=1e-3)
