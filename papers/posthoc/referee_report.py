"""The file of the referee (RUN-seedN.json): what stands in it, and its JSON Schema."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from papers.uncertainty.binned_recall import BinnedRecall, RecallBinning
from sfumato.ids import Direction
from sfumato.metrics.bootstrap import Interval

FORMAT = 2
"""Version of the JSON files; files of another one are made anew."""


@dataclass(frozen=True)
class ContestantFigures:
    """The figures of a contestant for the queries of one direction; intervals over queries."""

    n_queries: int  # number of queries with a match
    n_galleries: int  # number of galleries that the split was dealt into
    recall: Interval  # recall@1 of the frozen cosine
    recall_after: float | None  # recall@1 by the cosine of the contestant's means; None without Gaussians
    recall_csd: float | None  # recall@1 by csd of the contestant's Gaussians; None without
    wrong_auroc: Interval  # AUROC of wrong against right first hits
    wrong_aurc: Interval
    wrong_excess_aurc: Interval
    wrong_gain: Interval
    log_loss: Interval  # mean negative log probability of what the first hit is, in nats (NLPD)
    ece: float  # calibration error of this probability, in 15 bins of equally many hits
    ece_by_chance: float  # what perfect probabilities of these hits would show
    platt: tuple[float, float] | None
    absent_auroc: float
    ambiguity: Interval | None
    minus_s_r2: dict[RecallBinning, BinnedRecall]
    ms_per_query: float | None  # time of the uncertainties, the whole gallery at once; None where they were given
    query_megabytes: float | None


@dataclass(frozen=True)
class CorruptionFigures:
    """The response of a contestant to one corruption of some queries."""

    direction: Direction  # "t2i" for texts that are corrupted, "i2t" for images
    n_queries: int  # number of corrupted queries
    strengths: tuple[float, ...]  # ascending from 0, the clean inputs
    recall: list[float]  # recall@1 of the frozen cosine at each strength
    spearman: Interval
    rises: Interval
    monotone: Interval
    auroc: Interval


@dataclass(frozen=True)
class FittedMethod:
    """What was measured of one contestant."""

    summary: str  # what its uncertainty is
    fit_seconds: float | None  # None for a method that was added, like the other costs
    fit_megabytes: float | None
    bytes: int | None  # size of what is stored of the fit
    needs_gallery: bool
    tests: dict[str, dict[Direction, ContestantFigures]]  # by the name of the split
    corruptions: dict[str, CorruptionFigures]  # by the name of the corruption; none of a method that was added
    added: str | None = None  # the file with the uncertainties of a method that was added


@dataclass(frozen=True)
class UnavailableMethod:
    """A contestant that cannot be fitted on this model."""

    unavailable: str  # why


@dataclass(frozen=True)
class SplitSizes:
    """Numbers of items of a split."""

    images: int
    texts: int
    pairs: int
    d: int  # dimension of the embeddings


@dataclass(frozen=True)
class Machine:
    """Where the report was begun."""

    processor: str
    threads: int
    python: str
    torch: str
    sfumato: str


@dataclass(frozen=True)
class RefereeReport:
    """A report of the referee on one model with one seed."""

    format: int
    model: str
    seed: int
    digest: str  # SHA-256 of the embeddings and pairs
    options: dict[str, Any]  # on which figures depend
    sizes: dict[str, SplitSizes]  # by the name of the split; train and val are not measured
    notes: list[str]
    not_built: dict[str, str]  # methods that nobody wrote for sfumato, and why
    about: dict[str, Any]  # what the caller says
    machine: Machine
    methods: dict[str, FittedMethod | UnavailableMethod]


class _WithoutTitles(GenerateJsonSchema):
    """Titles of fields would repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def report_schema() -> str:
    """The JSON Schema of a report, as papers/docs/referee.schema.json has it."""
    schema = TypeAdapter(RefereeReport).json_schema(schema_generator=_WithoutTitles)
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect} | schema, indent=1) + "\n"
