"""A retriever and a postprocessor of LlamaIndex, on the real package. In an environment of its own:

    python -m venv env && env/bin/pip install -c constraints.txt -e '.[llama-index]' pytest hypothesis
    env/bin/python -m pytest tests/adapters/test_llama_index.py

Run with llama-index-core 0.14.25.
"""

import asyncio

import numpy as np
import pytest

pytest.importorskip("llama_index", reason="llama-index-core is not installed")
from llama_index.core.schema import NodeWithScore, TextNode

from sfumato.adapters.llama_index import CalibratedScores, SfumatoRetriever


def test_nodes_are_the_hits_of_the_gallery(index):
    answer = index.search("a red circle", k=5)
    retriever = SfumatoRetriever(index, k=5)
    found = retriever.retrieve("a red circle")
    assert [one.node.node_id for one in found] == [hit.id for hit in answer] and len(found) == 5
    for one, hit in zip(found, answer, strict=True):
        said = one.node.metadata
        assert one.score == said["match_probability"] == hit.match_probability and said["id"] == hit.id
        assert said["verdict"] == answer.sentence and said["verdict_kind"] == answer.verdict.kind
        assert hit.payload.items() <= said.items() and one.node.text == hit.name
    again = asyncio.run(retriever.aretrieve("a red circle"))
    assert [one.node.metadata for one in again] == [one.node.metadata for one in found]
    limit = answer[1].match_probability
    assert len(SfumatoRetriever(index, k=5, min_probability=limit).retrieve("a red circle")) == 2


def test_scores_become_probabilities(calibrator):
    scores = [0.8, 0.4, 0.3, 0.35, 0.2]
    nodes = [NodeWithScore(node=TextNode(id_=f"{i}", text="t"), score=s) for i, s in enumerate(scores)]
    probability = calibrator.predict_proba(scores)[:, 1]
    found = CalibratedScores(calibrator=calibrator, k=3).postprocess_nodes(nodes, query_str="q")
    assert [one.node.node_id for one in found] == ["0", "1", "3"]
    np.testing.assert_allclose([one.score for one in found], probability[[0, 1, 3]])
    nothing = calibrator.nothing_matches(scores)[0]
    assert all(one.node.metadata["match_probability"] == one.score for one in found)
    assert all(one.node.metadata["nothing_probability"] == nothing for one in found)
    assert [one.score for one in nodes] == scores and not any(one.node.metadata for one in nodes)
    assert CalibratedScores(calibrator=calibrator).postprocess_nodes([], query_str="q") == []
