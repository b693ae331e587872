"""For LlamaIndex: a retriever of a gallery's answers, and a postprocessor that makes scores probabilities."""

from collections.abc import Sequence

from sfumato.adapters import calibrated, fields_of, text_of
from sfumato.calibration.score_lists import ScoreCalibrator
from sfumato.errors import need
from sfumato.search.searcher import Searcher

with need("llama-index", "sfumato.adapters.llama_index needs llama-index-core"):
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class SfumatoRetriever(BaseRetriever):
    """The hits of a gallery as nodes; the score is the match probability. `metadata` has what is known of each."""

    def __init__(
        self, searcher: Searcher, *, k: int = 10, min_probability: float | None = None, where: Sequence[str] = ()
    ) -> None:
        self.searcher, self.k, self.min_probability, self.where = searcher, k, min_probability, where
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = query_bundle.query_str
        answer = self.searcher.search(query, self.k, min_probability=self.min_probability, where=self.where)
        nodes = [TextNode(id_=hit.id, text=text_of(hit), metadata=fields_of(hit, answer)) for hit in answer]
        return [NodeWithScore(node=node, score=node.metadata["match_probability"]) for node in nodes]


class CalibratedScores(BaseNodePostprocessor):
    """Nodes of any retriever, their scores replaced by match probabilities, which stand in `metadata` too.

    It needs whole lists: place it first, behind a retriever of as many nodes as the calibrator was fitted on.
    """

    calibrator: ScoreCalibrator
    k: int | None = None
    min_probability: float = 0.0

    @classmethod
    def class_name(cls) -> str:
        """The name in files of LlamaIndex."""
        return "CalibratedScores"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        kept, nothing = calibrated(self.calibrator, [one.score for one in nodes], self.k, self.min_probability)
        result = []
        for i, p in kept:
            node = nodes[i].node.model_copy()
            node.metadata = {**node.metadata, "match_probability": p, "nothing_probability": nothing}
            result.append(NodeWithScore(node=node, score=p))
        return result
