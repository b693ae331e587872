"""The fitted formula of a score calibrator, and the same in other languages: a few lines with its constants.

SQL, JavaScript, Python and Rust take whole lists. Painless (Elasticsearch, OpenSearch) and Vespa compute one hit at a
time, so they take what describes its list as parameters.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHAPE = ("gap", "order", "lead", "height", "crowd")
"""Features of a hit in its list."""

SEGMENTS = ("low", "middle", "high")
"""The score below the first knot, between the knots, and above the second."""


@dataclass(frozen=True)
class ScoreFormula:
    """A fitted formula: the logit is the intercept plus the weighted features."""

    weights: Mapping[str, float]  # by feature: of SHAPE, of SEGMENTS, and "evidence 1", ...
    intercept: float
    knots: tuple[float, float] | None  # of SEGMENTS; None if scores of different queries are not comparable
    nothing: tuple[float, float, float]  # intercept, and weights of the first hit's logit and of log(expected matches)

    @property
    def n_evidence(self) -> int:
        """Number of further columns."""
        return sum(name.startswith("evidence") for name in self.weights)

    def logit(self, features: Floats) -> Floats:
        """(n,) logits. features (n, f)."""
        found: Floats = self.intercept + features @ np.array(list(self.weights.values()))
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "weights": dict(self.weights),
            "intercept": self.intercept,
            "knots": self.knots,
            "nothing": self.nothing,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ScoreFormula":
        """The reverse; it raises an error if the values are not such."""
        weights = {str(name): float(weight) for name, weight in values["weights"].items()}
        knots = None if values["knots"] is None else (float(values["knots"][0]), float(values["knots"][1]))
        own = [name for name in weights if not name.startswith("evidence")]
        if own != [*SHAPE, *(SEGMENTS if knots else ())]:
            raise ValueError(f"unknown features {own}")
        a, b, c = map(float, values["nothing"])
        numbers = (*weights.values(), *(knots or ()), float(values["intercept"]), a, b, c)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a number is not finite")
        return cls(weights, float(values["intercept"]), knots, (a, b, c))


@dataclass(frozen=True)
class _Language:
    """How a language writes what the formula needs."""

    less: str  # the smaller of two numbers
    more: str  # the larger
    text: Callable[[str, str, str], str]  # the code, from lines of features, the logit and the score with its sign
    line: str = "{name} = {value}"  # the definition of a feature


def _number(value: float) -> str:
    """A float64 literal that every language reads as one."""
    text = format(value, ".17g")
    return text if any(sign in text for sign in ".e") else text + ".0"


def written(formula: ScoreFormula, language: str, *, higher_is_better: bool) -> str:
    """The code of a formula."""
    if language not in _LANGUAGES:
        raise ValueError(f"formula: language must be {', '.join(_LANGUAGES)}, got {language!r}")
    if formula.n_evidence:
        raise ValueError("formula: further evidence has no formula; fit on scores alone")
    made, used = _LANGUAGES[language], {name: weight for name, weight in formula.weights.items() if weight}
    lines = [made.line.format(name=name, value=value) for name, value in _segments(formula, made) if name in used]
    terms = [f" {'-' if weight < 0 else '+'} {_number(abs(weight))} * {name}" for name, weight in used.items()]
    return made.text("\n".join(lines), _number(formula.intercept) + "".join(terms), "" if higher_is_better else "-")


def _segments(formula: ScoreFormula, made: _Language) -> list[tuple[str, str]]:
    if formula.knots is None:
        return []
    low, high = map(_number, formula.knots)
    inner = made.less.format(a=made.more.format(a="s", b=low), b=high)
    values = made.less.format(a="s", b=low), f"{inner} - {low}", f"{made.more.format(a='s', b=high)} - {high}"
    return list(zip(SEGMENTS, values, strict=True))


def _indented(lines: str, by: int) -> str:
    return "".join(f"\n{' ' * by}{line}" for line in lines.split("\n") if line)


def _python(lines: str, logit: str, sign: str) -> str:
    return f'''import math


def match_probabilities(scores):
    """The match probability of each hit, from the scores of all hits of one query."""
    scores = [{sign}s for s in scores]
    n, top = len(scores), max(scores)
    mean = sum(s - top for s in scores) / n
    deviation = math.sqrt(sum((s - top - mean) ** 2 for s in scores) / n)
    deviation = deviation if deviation > 1e-9 * abs(top) else 1.0
    lead = (top - sorted(scores)[-2]) / deviation if n > 1 else 0.0
    height = -mean / deviation
    crowd = -math.log(sum(math.exp((s - top) / deviation) for s in scores))
    found = []
    for s in scores:
        gap = (s - top) / deviation
        order = -math.log(1 + sum(other > s for other in scores)){_indented(lines, 8)}
        logit = {logit}
        found.append(1 / (1 + math.exp(-logit)))
    return found'''


def _javascript(lines: str, logit: str, sign: str) -> str:
    return f"""// The match probability of each hit, from the scores of all hits of one query.
function matchProbabilities(given) {{
  const scores = given.map((s) => {sign}s), n = scores.length, top = Math.max(...scores);
  const mean = scores.reduce((sum, s) => sum + s - top, 0) / n;
  const dispersion = Math.sqrt(scores.reduce((sum, s) => sum + (s - top - mean) ** 2, 0) / n);
  const deviation = dispersion > 1e-9 * Math.abs(top) ? dispersion : 1;
  const lead = n > 1 ? (top - [...scores].sort((a, b) => b - a)[1]) / deviation : 0;
  const height = -mean / deviation;
  const crowd = -Math.log(scores.reduce((sum, s) => sum + Math.exp((s - top) / deviation), 0));
  return scores.map((s) => {{
    const gap = (s - top) / deviation;
    const order = -Math.log(1 + scores.filter((other) => other > s).length);{_indented(lines, 4)}
    const logit = {logit};
    return 1 / (1 + Math.exp(-logit));
  }});
}}"""


def _rust(lines: str, logit: str, sign: str) -> str:
    return f"""/// The match probability of each hit, from the scores of all hits of one query.
#[allow(unused_variables)]
fn match_probabilities(given: &[f64]) -> Vec<f64> {{
    let scores: Vec<f64> = given.iter().map(|&s| {sign}s).collect();
    let n = scores.len() as f64;
    let top = scores.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
    let mean = scores.iter().map(|s| s - top).sum::<f64>() / n;
    let dispersion = (scores.iter().map(|s| (s - top - mean).powi(2)).sum::<f64>() / n).sqrt();
    let deviation = if dispersion > 1e-9 * top.abs() {{ dispersion }} else {{ 1.0 }};
    let mut sorted = scores.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let lead = if sorted.len() > 1 {{ (top - sorted[1]) / deviation }} else {{ 0.0 }};
    let height = -mean / deviation;
    let crowd = -scores.iter().map(|s| ((s - top) / deviation).exp()).sum::<f64>().ln();
    scores.iter().map(|&s| {{
        let gap = (s - top) / deviation;
        let order = -(1.0 + scores.iter().filter(|&&other| other > s).count() as f64).ln();{_indented(lines, 8)}
        let logit: f64 = {logit};
        1.0 / (1.0 + (-logit).exp())
    }}).collect()
}}"""


def _sql(lines: str, logit: str, sign: str) -> str:
    segments = "".join(f",{_indented(line, 4)}" for line in lines.split("\n") if line)
    return f"""-- The match probability of each row of hits(query, item, score), from all rows of its query.
WITH ranked AS (
  SELECT query, item, {sign}score AS s, MAX({sign}score) OVER (PARTITION BY query) AS top,
    CAST(RANK() OVER (PARTITION BY query ORDER BY {sign}score DESC) AS double precision) AS place,
    ROW_NUMBER() OVER (PARTITION BY query ORDER BY {sign}score DESC) AS number
  FROM hits
), centred AS (
  SELECT *, AVG(s - top) OVER (PARTITION BY query) AS mean,
    COALESCE(MAX(CASE WHEN number = 2 THEN s END) OVER (PARTITION BY query), top) AS second
  FROM ranked
), scaled AS (
  SELECT *, SQRT(AVG((s - top - mean) * (s - top - mean)) OVER (PARTITION BY query)) AS dispersion FROM centred
), divided AS (
  SELECT *, CASE WHEN dispersion > 1e-9 * ABS(top) THEN dispersion ELSE 1.0 END AS deviation FROM scaled
), described AS (
  SELECT query, item, s, (s - top) / deviation AS gap, -LN(place) AS "order", (top - second) / deviation AS lead,
    -mean / deviation AS height, -LN(SUM(EXP((s - top) / deviation)) OVER (PARTITION BY query)) AS crowd{segments}
  FROM divided
)
SELECT query, item, 1 / (1 + EXP(-({logit.replace("* order", '* "order"')}))) AS match_probability FROM described"""


_OF_LIST = (
    "top, the mean and the standard deviation of the scores of its query's hits; lead, (top - the second score) /"
    " deviation; crowd, -log of the sum of exp((score - top) / deviation); and rank"
)


def _painless(lines: str, logit: str, sign: str) -> str:
    return f"""// The match probability of a hit. Parameters: {_OF_LIST}.
double s = {sign}_score;
double gap = (s - params.top) / params.deviation;
double order = -Math.log(params.rank);
double lead = params.lead;
double height = (params.top - params.mean) / params.deviation;
double crowd = params.crowd;{_indented(lines, 0)}
double logit = {logit};
return 1 / (1 + Math.exp(-logit));"""


def _vespa(lines: str, logit: str, sign: str) -> str:
    named = (line.split(" = ", 1) for line in lines.split("\n") if line)
    own = "".join(f"function {name}() {{ expression: {value} }}\n" for name, value in named)
    return f"""# The match probability of a hit. Inputs: {_OF_LIST}.
function s() {{ expression: {sign}query(score) }}
function gap() {{ expression: (s - query(top)) / query(deviation) }}
function order() {{ expression: -log(query(rank)) }}
function lead() {{ expression: query(lead) }}
function height() {{ expression: (query(top) - query(mean)) / query(deviation) }}
function crowd() {{ expression: query(crowd) }}
{own}function match_probability() {{ expression: 1 / (1 + exp(-({logit}))) }}"""


_CASE = "CASE WHEN {{a}} {} {{b}} THEN {{a}} ELSE {{b}} END"

_LANGUAGES = {
    "sql": _Language(_CASE.format("<"), _CASE.format(">"), _sql, "{value} AS {name}"),
    "javascript": _Language("Math.min({a}, {b})", "Math.max({a}, {b})", _javascript, "const {name} = {value};"),
    "python": _Language("min({a}, {b})", "max({a}, {b})", _python),
    "rust": _Language("({a}).min({b})", "({a}).max({b})", _rust, "let {name} = {value};"),
    "painless": _Language("Math.min({a}, {b})", "Math.max({a}, {b})", _painless, "double {name} = {value};"),
    "vespa": _Language("min({a}, {b})", "max({a}, {b})", _vespa),
}
"""How each language writes a formula."""
