"""Retrievers of LangChain and LlamaIndex, components of Haystack, on the real packages, each in an environment of its
own: env/bin/pip install -c constraints.txt -e '.[langchain]' pytest hypothesis
Run with langchain-core 1.8.3, llama-index-core 0.14.25 and haystack-ai 3.4.1."""

import asyncio
import importlib
from importlib.util import find_spec

import numpy as np
import pytest

from sfumato import ScoreCalibrator
from sfumato.adapters import calibrated, fields_of, text_of
from sfumato.errors import UserError
from sfumato.search.answer import Answer, Hit, Verdict


def of_haystack(index, **options):
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from sfumato.adapters.haystack import SfumatoRetriever

    found = SfumatoRetriever(index, **options).run(query="a red circle")
    assert found["verdict"]
    for one in found["documents"]:
        assert one.score == one.meta["match_probability"]
        assert (found["verdict"], found["verdict_kind"]) == (one.meta["verdict"], one.meta["verdict_kind"])
    return [(one.id, one.content, one.meta) for one in found["documents"]]


def of_langchain(index, **options):
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    from langchain_core.runnables import RunnableLambda

    from sfumato.adapters.langchain import SfumatoRetriever

    retriever = SfumatoRetriever(searcher=index, **options)
    found = retriever.invoke("a red circle")
    assert asyncio.run(retriever.ainvoke("a red circle")) == found
    assert retriever.batch(["a red circle"] * 2) == [found, found]
    chain = retriever | RunnableLambda(lambda documents: [one.id for one in documents])
    assert chain.invoke("a red circle") == [one.id for one in found]
    return [(one.id, one.page_content, one.metadata) for one in found]


def of_llama_index(index, **options):
    pytest.importorskip("llama_index", reason="llama-index-core is not installed")
    from sfumato.adapters.llama_index import SfumatoRetriever

    retriever = SfumatoRetriever(index, **options)
    found, again = retriever.retrieve("a red circle"), asyncio.run(retriever.aretrieve("a red circle"))
    assert [one.node.metadata for one in again] == [one.node.metadata for one in found]
    assert [one.score for one in found] == [one.node.metadata["match_probability"] for one in found]
    return [(one.node.node_id, one.node.text, one.node.metadata) for one in found]


@pytest.mark.parametrize("documents", [of_haystack, of_langchain, of_llama_index])
def test_documents_are_the_hits_of_the_gallery(index, documents):
    answer = index.search("a red circle", k=5)
    for (id, text, told), hit in zip(documents(index, k=5), answer, strict=True):
        assert id == told["id"] == hit.id and text == hit.name and told["match_probability"] == hit.match_probability
        assert told["verdict"] == answer.sentence and told["verdict_kind"] == answer.verdict.kind
        assert hit.payload.items() <= told.items()
    assert len(documents(index, k=5, min_probability=answer[1].match_probability)) == 2


def test_a_haystack_pipeline_of_bm25_gets_probabilities(calibrator):
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from haystack import Document, Pipeline
    from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    from sfumato.adapters.haystack import CalibratedScores

    store = InMemoryDocumentStore()
    texts = ["a red bird", "a red car", "a bird on a red car", "blue water", "a dog at the water", "two dogs"]
    store.write_documents([Document(content=text, meta={"n": i}) for i, text in enumerate(texts)])
    pipeline = Pipeline()
    pipeline.add_component("bm25", InMemoryBM25Retriever(store, top_k=5))
    pipeline.add_component("calibrated", CalibratedScores(calibrator, k=2))
    pipeline.connect("bm25.documents", "calibrated.documents")
    scored = InMemoryBM25Retriever(store, top_k=5).run(query="red bird")["documents"]
    scores, found = [one.score for one in scored], pipeline.run({"bm25": {"query": "red bird"}})["calibrated"]
    assert [one.id for one in found["documents"]] == [one.id for one in scored[:2]]
    np.testing.assert_allclose([one.score for one in found["documents"]], calibrator.predict_proba(scores)[:2, 1])
    assert all(one.meta["match_probability"] == one.score and "n" in one.meta for one in found["documents"])
    assert found["nothing_probability"] == calibrator.nothing_matches(scores)[0]
    assert CalibratedScores(calibrator).run(documents=[]) == {"documents": [], "nothing_probability": 1.0}


def test_a_vector_store_of_langchain_gets_probabilities(calibrator):
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    from sfumato.adapters.langchain import CalibratedRetriever

    class Letters(Embeddings):
        def embed_query(self, text):
            return [text.count(letter) + 0.1 for letter in "abcdefgh"]

        def embed_documents(self, texts):
            return [self.embed_query(text) for text in texts]

    store, texts = InMemoryVectorStore(Letters()), ["aaab", "bbbc", "ccdd", "efgh", "gghh", "abcd"]
    store.add_documents([Document(text, metadata={"n": i}) for i, text in enumerate(texts)])
    scored = store.similarity_search_with_score("aab", k=5)
    probability = calibrator.predict_proba([score for _, score in scored])[:, 1]
    found = CalibratedRetriever(vectorstore=store, calibrator=calibrator, k=3, depth=5).invoke("aab")
    assert [one.page_content for one in found] == [one.page_content for one, _ in scored[:3]]
    np.testing.assert_allclose([one.metadata["match_probability"] for one in found], probability[:3])
    nothing = calibrator.nothing_matches([score for _, score in scored])[0]
    assert all(one.metadata["nothing_probability"] == nothing and "n" in one.metadata for one in found)
    assert all("match_probability" not in one.metadata for one, _ in store.similarity_search_with_score("aab"))
    certain = CalibratedRetriever(vectorstore=store, calibrator=calibrator, depth=5, min_probability=0.999999)
    assert certain.invoke("aab") == []
    assert CalibratedRetriever(vectorstore=InMemoryVectorStore(Letters()), calibrator=calibrator).invoke("a") == []


def test_scores_of_llama_index_become_probabilities(calibrator):
    pytest.importorskip("llama_index", reason="llama-index-core is not installed")
    from llama_index.core.schema import NodeWithScore, TextNode

    from sfumato.adapters.llama_index import CalibratedScores

    scores = [0.8, 0.4, 0.3, 0.35, 0.2]
    nodes = [NodeWithScore(node=TextNode(id_=f"{i}", text="t"), score=s) for i, s in enumerate(scores)]
    found = CalibratedScores(calibrator=calibrator, k=3).postprocess_nodes(nodes, query_str="q")
    assert [one.node.node_id for one in found] == ["0", "1", "3"]
    np.testing.assert_allclose([one.score for one in found], calibrator.predict_proba(scores)[:, 1][[0, 1, 3]])
    nothing = calibrator.nothing_matches(scores)[0]
    assert all(one.node.metadata["match_probability"] == one.score for one in found)
    assert all(one.node.metadata["nothing_probability"] == nothing for one in found)
    assert [one.score for one in nodes] == scores and not any(one.node.metadata for one in nodes)
    assert CalibratedScores(calibrator=calibrator).postprocess_nodes([], query_str="q") == []


def test_metadata_has_the_verdict_and_calibrated_hits_are_the_most_probable_ones():
    hit = Hit("a", 1, 0.5, 0.8, 0.1, {"path": "a.png", "label": "one", "id": "other", "_text": "hidden"})
    answer = Answer("q", "csd", True, 0.1, (hit,), verdict=Verdict("clear", "One clear match"), target="fits")
    found = {"path": "a.png", "label": "one", "id": "a", "distance": 0.5, "match_probability": 0.8}
    assert fields_of(hit, answer) == {**found, "verdict": "One clear match", "verdict_kind": "clear"}
    bare = fields_of(hit, Answer("q", "csd", False, 0.1, (hit,)))
    assert bare["match_probability"] is bare["verdict_kind"] is None and "not calibrated" in bare["verdict"]
    assert text_of(hit) == "one" and text_of(Hit("a", 1, 0.5, 0.8, 0.1, {}, best_text="a red bird")) == "a red bird"
    distances, calibrator = [0.9, 0.1, 0.8, 0.7, 0.75], ScoreCalibrator(prior="cosine", higher_is_better=False)
    probability = calibrator.predict_proba(distances)[:, 1]
    kept, nothing = calibrated(calibrator, distances, 2, 0.0)
    assert kept == [(1, probability[1]), (3, probability[3])]
    assert nothing == calibrator.nothing_matches(distances)[0] and 0 < nothing < 1
    assert calibrated(calibrator, distances, None, float(probability[3]))[0] == kept
    assert calibrated(calibrator, [], 2, 0.0) == ([], 1.0)


@pytest.mark.parametrize(("name", "module", "package"), [
    ("langchain", "langchain_core", "langchain-core"), ("llama_index", "llama_index", "llama-index-core"),
    ("haystack", "haystack", "haystack-ai"),
])  # fmt: skip
def test_an_absent_package_is_named(name, module, package):
    if find_spec(module) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"needs {package}: pip install .sfumato.{name.replace('_', '-')}."):
        importlib.import_module(f"sfumato.adapters.{name}")
