"""Retrievers of LangChain: a gallery's answers, and the results of any vector store with probabilities."""

from collections.abc import Sequence

from sfumato.adapters import calibrated, fields_of, text_of
from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.errors import need
from sfumato.search.searcher import Searcher

with need("langchain", "sfumato.adapters.langchain needs langchain-core"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import VectorStore


class SfumatoRetriever(BaseRetriever):
    """The hits of a gallery as documents. `metadata` has what :meth:`Searcher.search` says of each."""

    searcher: Searcher
    k: int = 10
    min_probability: float | None = None
    where: Sequence[str] = ()

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        answer = self.searcher.search(query, self.k, min_probability=self.min_probability, where=self.where)
        return [Document(text_of(hit), id=hit.id, metadata=fields_of(hit, answer)) for hit in answer]


class CalibratedRetriever(BaseRetriever):
    """Documents of a vector store with `match_probability` and `nothing_probability` in their metadata.

    `depth` documents are scored, as many as the lists have that the calibrator was fitted on; the best k are returned.
    """

    vectorstore: VectorStore
    calibrator: ScoreCalibrator
    k: int = 4
    depth: int = 100
    min_probability: float = 0.0

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found = self.vectorstore.similarity_search_with_score(query, k=self.depth)
        kept, nothing = calibrated(self.calibrator, [score for _, score in found], self.k, self.min_probability)
        documents = [(found[i][0], {"match_probability": p, "nothing_probability": nothing}) for i, p in kept]
        return [one.model_copy(update={"metadata": {**one.metadata, **said}}) for one, said in documents]
