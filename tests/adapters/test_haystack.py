"""Components of Haystack, on the real package. In an environment of its own:

    python -m venv env && env/bin/pip install -c constraints.txt -e '.[haystack]' pytest hypothesis
    env/bin/python -m pytest tests/adapters/test_haystack.py

Run with haystack-ai 3.4.1.
"""

import numpy as np
import pytest

pytest.importorskip("haystack", reason="haystack-ai is not installed")
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from sfumato.adapters.haystack import CalibratedScores, SfumatoRetriever


def test_documents_are_the_hits_of_the_gallery(index):
    answer = index.search("a red circle", k=5)
    found = SfumatoRetriever(index, k=5).run(query="a red circle")
    assert (found["verdict"], found["verdict_kind"]) == (answer.sentence, answer.verdict.kind)
    assert [one.id for one in found["documents"]] == [hit.id for hit in answer]
    for one, hit in zip(found["documents"], answer, strict=True):
        assert one.score == one.meta["match_probability"] == hit.match_probability and one.meta["id"] == hit.id
        assert one.meta["verdict"] == answer.sentence and one.meta["verdict_kind"] == answer.verdict.kind
        assert hit.payload.items() <= one.meta.items() and one.content == hit.name
    limit = answer[1].match_probability
    few = SfumatoRetriever(index, k=5, min_probability=limit).run(query="a red circle")
    assert len(few["documents"]) == 2 and few["verdict"]


def test_a_pipeline_of_bm25_gets_probabilities(calibrator):
    store = InMemoryDocumentStore()
    texts = ["a red bird", "a red car", "a bird on a red car", "blue water", "a dog at the water", "two dogs"]
    store.write_documents([Document(content=text, meta={"n": i}) for i, text in enumerate(texts)])
    pipeline = Pipeline()
    pipeline.add_component("bm25", InMemoryBM25Retriever(store, top_k=5))
    pipeline.add_component("calibrated", CalibratedScores(calibrator, k=2))
    pipeline.connect("bm25.documents", "calibrated.documents")
    scored = InMemoryBM25Retriever(store, top_k=5).run(query="red bird")["documents"]
    scores = [one.score for one in scored]
    found = pipeline.run({"bm25": {"query": "red bird"}})["calibrated"]
    assert [one.id for one in found["documents"]] == [one.id for one in scored[:2]]
    np.testing.assert_allclose([one.score for one in found["documents"]], calibrator.predict_proba(scores)[:2, 1])
    assert all(one.meta["match_probability"] == one.score and "n" in one.meta for one in found["documents"])
    assert found["nothing_probability"] == calibrator.nothing_matches(scores)[0]
    assert CalibratedScores(calibrator).run(documents=[]) == {"documents": [], "nothing_probability": 1.0}
