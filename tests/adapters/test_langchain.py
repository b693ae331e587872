"""Retrievers of LangChain, on the real package. In an environment of its own:

    python -m venv env && env/bin/pip install -c constraints.txt -e '.[langchain]' pytest hypothesis
    env/bin/python -m pytest tests/adapters/test_langchain.py

Run with langchain-core 1.8.3.
"""

import asyncio

import numpy as np
import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from sfumato.adapters.langchain import CalibratedRetriever, SfumatoRetriever


def test_documents_are_the_hits_of_the_gallery(index):
    answer = index.search("a red circle", k=5)
    retriever = SfumatoRetriever(searcher=index, k=5)
    found = retriever.invoke("a red circle")
    assert [one.id for one in found] == [hit.id for hit in answer] and len(found) == 5
    for one, hit in zip(found, answer, strict=True):
        assert one.metadata["match_probability"] == hit.match_probability and one.metadata["id"] == hit.id
        assert one.metadata["verdict"] == answer.sentence and one.metadata["verdict_kind"] == answer.verdict.kind
        assert hit.payload.items() <= one.metadata.items() and one.page_content == hit.name
    assert asyncio.run(retriever.ainvoke("a red circle")) == found
    assert retriever.batch(["a red circle"] * 2) == [found, found]
    chain = retriever | RunnableLambda(lambda documents: [one.id for one in documents])
    assert chain.invoke("a red circle") == [hit.id for hit in answer]
    limit = answer[1].match_probability
    assert len(SfumatoRetriever(searcher=index, k=5, min_probability=limit).invoke("a red circle")) == 2


class Letters(Embeddings):
    """Counts of letters."""

    def embed_query(self, text):
        return [text.count(letter) + 0.1 for letter in "abcdefgh"]

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]


def test_a_vector_store_gets_probabilities(calibrator):
    store = InMemoryVectorStore(Letters())
    texts = ["aaab", "bbbc", "ccdd", "efgh", "gghh", "abcd"]
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
