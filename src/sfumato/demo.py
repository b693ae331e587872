"""The demonstration: the whole way on the embedded emoji set, and a page that shows what uncertainty is good for."""

import base64
import math
import time
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from sfumato import __version__
from sfumato.data.emoji import emoji_names
from sfumato.data.pairs import PairData
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval, table_rows
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.metrics.uncertainty import balanced_spearman, spearman
from sfumato.models.embed import evaluate_run
from sfumato.models.galleries import GalleryPart, build_index
from sfumato.models.gallery_search import describe
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.models.splits import embed_split, load_split
from sfumato.reports.console import print_evaluation, print_search
from sfumato.search.exact import top_k
from sfumato.search.gallery import MANY, verdict
from sfumato.search.index import GaussianIndex
from sfumato.training.loop import fit

RECIPE = "emoji-demo"

PAIRS = (("flag", "black flag"), ("game", "pool 8 ball"), ("clock", "mantelpiece clock"), ("animal", "giraffe"))
"""A vague and a precise question each, picked to illustrate; the last precise one is beyond the model, and it should say so."""

PICTURES = ("1F98A", "1F34E", "1F692", "1F47B")
"""Pictures to be described: fox, red apple, fire engine, ghost."""

_VARIANCE_NOTE = (
    "So ask for expected matches, not for the variance, when you want to know how ambiguous a text is: variance also measures how"
    " crowded its neighbourhood is."
)

_COLOURS = {"name": "#2563eb", "tag": "#0f766e", "subgroup": "#c2410c", "group": "#7c3aed"}


def run_demo(out: Path, overrides: list[str]) -> dict[str, Any]:
    """Train (or resume), evaluate, index, search, and write the page.

    Args:
        out: folder for "run", "index" and "index.html".
        overrides: of the recipe emoji-demo.

    Returns:
        {"page", "run", "index", "seconds", "test": metrics, "searches": results}.
    """
    started = time.monotonic()
    recipe = load_recipe(find_recipe(RECIPE), overrides)
    print(f"1. Training {recipe.name}: emoji in two drawing styles, from their pictures and names")
    seconds = fit(recipe, out / "run")["seconds"]
    run = load_run(out / "run")

    print("\n2. Evaluating on concepts drawn in a style that training never saw")
    evaluation, _ = evaluate_run(run, "test")
    print_evaluation(evaluation, "test split")

    print("\n3. Indexing every picture of that style")
    style = load_split(run.model, run.recipe.data, "style")
    images, texts = embed_split(run.model, style)
    index = build_index(
        run, GalleryPart(images, style.data.image_ids, images={"split": "style"}), model_source=out / "run"
    )
    index.save(out / "index")
    print(f"{len(index)} pictures: {out / 'index'}")

    print("\n4. Searching: a vague and a precise question side by side")
    queries = [q for pair in PAIRS for q in pair]
    results = describe(index, queries, run.model.embed_texts(queries), 12)
    for result in results:
        print_search(result | {"hits": result["hits"][:4]})
    whole = evaluate_retrieval(
        images, texts, style.data.relevance(), distance=index.distance, text_kinds=style.data.text_kinds
    )
    page = _page(run, index, results, style.data, images, texts, whole, seconds)
    write_atomically(out / "index.html", page)
    print(
        f'\n5. Look at {out / "index.html"} in a browser; search yourself with: sfumato search {out / "index"} "something red"'
    )
    return {
        "page": str(out / "index.html"),
        "run": str(out / "run"),
        "index": str(out / "index"),
        "seconds": round(time.monotonic() - started, 1),
        "test": evaluation.to_json(),
        "searches": results,
    }


def _page(
    run: Run,
    index: GaussianIndex,
    results: list[dict[str, Any]],
    data: PairData,
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    evaluation: Evaluation,
    seconds: float,
) -> str:
    """The self-contained HTML page."""
    sources = dict(zip(data.image_ids, data.images, strict=True))
    pictures = {i: "data:image/png;base64," + base64.b64encode(s.read_bytes()).decode() for i, s in sources.items()}
    cards = [_card(result, data, pictures) for result in results]
    expected = np.array(index.expected_matches(texts))
    counts = data.relevance().transpose().counts
    variance = texts.total_variance.numpy()
    balanced = balanced_spearman(expected, counts), balanced_spearman(variance, counts)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True)
    page: str = environment.get_template("demo.html.j2").render(
        version=__version__,
        n_images=len(index),
        n_texts=texts.n,
        pairs=[cards[i : i + 2] for i in range(0, len(cards), 2)],
        pictures=_described(run, data, images, texts, pictures),
        expected_spearman=f"{spearman(expected, counts):+.2f}",
        expected_balanced=f"{balanced[0]:+.2f}",
        variance_spearman=f"{spearman(variance, counts):+.2f}",
        variance_balanced=f"{balanced[1]:+.2f}",
        variance_note=_VARIANCE_NOTE if abs(balanced[0]) > abs(balanced[1]) else "",
        distance=index.distance,
        **_plot(data, expected, counts),
        table=[
            {
                "name": name,
                "cells": [f"{metrics[m]:.1%}" for m in ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")],
            }
            for name, metrics in table_rows(evaluation)
        ],
        seconds=round(seconds),
        threads=torch.get_num_threads(),
    )
    return page


def _card(result: dict[str, Any], data: PairData, pictures: dict[str, str]) -> dict[str, Any]:
    true = _true_images(data, result["query"])
    expected = result["expected_matches"]
    best = result["hits"][0]["match_probability"]
    vague = expected >= MANY
    return {
        "query": result["query"],
        "vague": vague,
        "verdict": verdict(expected, best).text,
        "expected": f"{expected:.0f}" if vague else f"{expected:.1f}",
        "truth": len(true),
        "top": f"{best:.0%}",
        "uncertainty": f"{result['uncertainty']:.3g}",
        "hits": [
            {
                "src": pictures[hit["id"]],
                "label": hit["label"],
                "true": hit["id"] in true,
                "width": round(100 * hit["match_probability"]),
                "pct": f"{hit['match_probability']:.0%}",
            }
            for hit in result["hits"]
        ],
    }


def _true_images(data: PairData, text: str) -> set[str]:
    place = {t: i for i, t in enumerate(data.texts)}.get(text)
    return set() if place is None else {data.image_ids[i] for i, t in data.pairs.tolist() if t == place}


def _described(
    run: Run, data: PairData, images: GaussianEmbedding, texts: GaussianEmbedding, pictures: dict[str, str]
) -> list[dict[str, Any]]:
    names, described = emoji_names(), []
    for code in PICTURES:
        place = next((i for i, image in enumerate(data.image_ids) if image.startswith(f"{code}/")), None)
        if place is None:
            continue
        distance, closest = top_k(images[place : place + 1], texts, 8, run.loss.distance.name)
        probability = match_probability(distance, run.logit_scale, run.logit_bias)[0].tolist()
        true = set(data.pairs[data.pairs[:, 0] == place, 1].tolist())
        rows = [
            {"text": data.texts[t], "kind": data.text_kinds[t], "pct": f"{p:.0%}", "true": t in true}
            for t, p in zip(closest[0].tolist(), probability, strict=True)
        ]
        described.append({"src": pictures[data.image_ids[place]], "label": names[code], "texts": rows})
    return described


def _plot(data: PairData, expected: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Dots and axes of the scatter plot, in the coordinates of its 720 x 380 drawing; both axes logarithmic."""
    top = math.log10(max(counts.max(), expected.max(), 10) * 1.2)
    low = -1.0

    def x(value: float) -> float:
        return round(60 + 640 * (math.log10(max(value, 0.1)) - low) / (top - low), 1)

    def y(value: float) -> float:
        return round(330 - 310 * (math.log10(max(value, 0.1)) - low) / (top - low), 1)

    jitter = np.random.default_rng(0).uniform(0.9, 1.11, len(counts))
    dots = [
        {
            "x": x(count * wiggle),
            "y": y(value),
            "colour": _COLOURS[kind],
            "title": f"{text}: {count} true, {value:.1f} expected",
        }
        for text, kind, count, value, wiggle in zip(
            data.texts, data.text_kinds, counts.tolist(), expected.tolist(), jitter, strict=True
        )
    ]
    marks = [m for m in (0.1, 1, 10, 100, 1000) if math.log10(m) <= top]
    ticks = [{"x": x(m), "y": y(m), "label": f"{m:g}"} for m in marks]
    return {
        "dots": dots,
        "ticks": ticks,
        "legend": [{"name": kind, "colour": colour} for kind, colour in _COLOURS.items()],
    }
