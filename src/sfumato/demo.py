"""The demonstration: all steps on the embedded emoji set, and a page that shows what uncertainty is useful for."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from sfumato import __version__
from sfumato.arrays import n_threads
from sfumato.charts import FAINT, FAMILIES, FIRST, SECOND, Chart, data_url, render_page, require_matplotlib
from sfumato.data.emoji import emoji_names
from sfumato.data.pairs import PairData
from sfumato.errors import as_typed, counted
from sfumato.evaluation.protocols import evaluate_retrieval, table_rows
from sfumato.files import write_atomically
from sfumato.gaussian import Sides
from sfumato.ids import has_words
from sfumato.metrics.bootstrap import balanced_spearman, spearman
from sfumato.models.embed import embed_split, evaluate_run, load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.reports.evaluation import print_evaluation
from sfumato.reports.tables import percent, print_search, probability, signed
from sfumato.search.answer import MANY, Answer, QueryInfo
from sfumato.search.folder import is_collection
from sfumato.search.index import GaussianIndex, copy_gallery
from sfumato.training.loop import fit
from sfumato.workflows.index import GalleryPart, build_index

RECIPE = "emoji-demo"

SEED = 0
"""Draws what the page shows, so that nobody chose it."""

N_SHOWN = 4
"""Pairs of queries, and images to describe, on the page."""

_COLOURS = {"name": FIRST, "tag": FAMILIES[1], "subgroup": SECOND, "group": FAMILIES[2]}


def run_demo(out: Path, overrides: list[str]) -> dict[str, Any]:
    """Train (or resume), index, search, evaluate, and write the page."""
    require_matplotlib()
    started = time.monotonic()
    recipe = load_recipe(find_recipe(RECIPE), overrides)
    print(f"1. Training {recipe.name}: emoji in two drawing styles, from their images and names")
    seconds = fit(recipe, out / "run")["seconds"]
    run = load_run(out / "run")

    print("\n2. Indexing all images of a drawing style that training never saw")
    style = load_split(run.model, run.recipe.data, "style")
    images, texts = embed_split(run.model, style)
    index = build_index(run, GalleryPart(images, style.data.image_ids, images={"split": "style"}))
    if is_collection(out / "index"):
        shutil.rmtree(out / "index")
    copy_gallery(index, out / "index").close()
    print(f"{counted(len(index), 'image')}: {out / 'index'}")

    print("\n3. Searching: vague and precise queries, drawn at random")
    pairs, pictures = draw_examples(style.data)
    queries = [query for pair in pairs for query in pair]
    answers = index.search(run.model.embed_texts(queries), 12, about=QueryInfo.of_texts(queries))
    results = [answer.to_json() for answer in answers]
    for result in results:
        print_search(result | {"hits": result["hits"][:4]})
    search = as_typed("sfumato", "search", out / "index", "something red")
    print(f"After {time.monotonic() - started:.0f} seconds you can search: {search}")

    print("\n4. Evaluating on the concepts of that style that chose nothing")
    evaluation, _ = evaluate_run(run, "test")
    print_evaluation(evaluation, "test split")
    values = _page_values(run, index, answers, pictures, style.data, (images, texts))
    write_atomically(out / "index.html", render_page("demo.html.j2", values | {"seconds": round(seconds)}))
    print(f"\n5. Open {out / 'index.html'} in a browser")
    figures = {"seconds": round(time.monotonic() - started, 1), "test": evaluation.to_json(), "searches": results}
    return {"page": str(out / "index.html"), "run": str(out / "run"), "index": str(out / "index"), **figures}


def draw_examples(data: PairData, n: int = N_SHOWN, seed: int = SEED) -> tuple[list[tuple[str, str]], list[int]]:
    """Queries and images to show, drawn at random."""
    generator = np.random.default_rng(seed)
    relevance = data.relevance()
    of_text, of_image = (np.split(r.indices, r.indptr[1:-1]) for r in (relevance.transpose(), relevance))
    pairs: list[tuple[str, str]] = []
    for text in generator.permutation([t for t, images in enumerate(of_text) if len(images) >= MANY]):
        single = [t for image in of_text[text] for t in of_image[image] if len(of_text[t]) == 1]
        single = [t for t in single if has_words(data.texts[t])]
        if single and has_words(data.texts[text]) and len(pairs) < n:
            pairs.append((data.texts[text], data.texts[generator.choice(single)]))
    return pairs, generator.permutation(len(data.image_ids))[:n].tolist()


def _page_values(
    run: Run, index: GaussianIndex, answers: list[Answer], described: list[int], data: PairData, sides: Sides
) -> dict[str, Any]:
    """What the page shows."""
    (images, texts), relevance = sides, data.relevance()
    evaluation = evaluate_retrieval(*sides, relevance, distance=index.distance, text_kinds=data.text_kinds)
    sources = dict(zip(data.image_ids, data.images, strict=True))
    pictures = {i: data_url(s.read_bytes()) for i, s in sources.items()}
    cards = [_card(answer, data, pictures) for answer in answers]
    expected = np.array(index.expected_matches(texts))
    counts, variance = relevance.transpose().counts, texts.total_variance.numpy()
    of_texts = build_index(run, GalleryPart(texts, data.text_ids, data.texts))
    nearest = of_texts.search(images[np.array(described)], 8)
    metric_names = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
    return {
        "version": __version__, "n_images": len(index), "n_texts": texts.n,
        "pairs": [cards[i : i + 2] for i in range(0, len(cards), 2)], "many": MANY, "seed": SEED,
        "pictures": [_described(*each, data, pictures) for each in zip(nearest, described, strict=True)],
        "expected_spearman": signed(spearman(expected, counts)),
        "expected_balanced": signed(balanced_spearman(expected, counts)),
        "variance_spearman": signed(spearman(variance, counts)),
        "variance_balanced": signed(balanced_spearman(variance, counts)), "distance": index.distance,
        "chart": _expected_chart(data, expected, counts),
        "table": [{"name": name, "cells": [percent(m[n]) for n in metric_names]} for name, m in table_rows(evaluation)],
        "threads": n_threads(),
    }  # fmt: skip


def _card(answer: Answer, data: PairData, pictures: dict[str, str]) -> dict[str, Any]:
    true, expected, said = _true_images(data, answer.query), answer.expected_matches, answer.verdict
    assert expected is not None and said is not None, "the run of the demo is calibrated"
    hits = []
    for hit in answer:
        p, shown = hit.match_probability, {"src": pictures[hit.id], "label": hit.payload["label"]}
        hits.append(shown | {"true": hit.id in true, "width": round(100 * p), "pct": probability(p)})
    return {
        "query": answer.query, "doubtful": said.kind == "unsure", "verdict": said.text,
        "expected": f"{expected:.0f}" if said.kind == "many" else f"{expected:.1f}", "truth": len(true),
        "top": probability(answer.best_probability), "hits": hits,
    }  # fmt: skip


def _true_images(data: PairData, text: str) -> set[str]:
    position = {t: i for i, t in enumerate(data.texts)}.get(text)
    return set() if position is None else {data.image_ids[i] for i, t in data.pairs.tolist() if t == position}


def _described(answer: Answer, position: int, data: PairData, pictures: dict[str, str]) -> dict[str, Any]:
    """One image and the texts that are closest to it."""
    true, image_id = set(data.pairs[data.pairs[:, 0] == position, 1].tolist()), data.image_ids[position]
    rows = []
    for hit in answer:
        t, pct = data.text_ids.index(hit.id), probability(hit.match_probability)
        rows.append({"text": data.texts[t], "kind": data.text_kinds[t], "pct": pct, "true": t in true})
    return {"src": pictures[image_id], "label": emoji_names()[image_id.split("/")[0]], "texts": rows}


def _expected_chart(data: PairData, expected: np.ndarray, counts: np.ndarray) -> Markup:
    """Expected against true number of matches of every text, on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter

    chart = Chart("expected against true number of matches", width=720, height=380)
    axes = chart.axes
    top = 1.2 * max(counts.max(), expected.max(), 10)
    axes.plot([0.1, top], [0.1, top], color=FAINT, linestyle=(0, (5, 5)), linewidth=1)
    jitter = np.random.default_rng(0).uniform(0.9, 1.11, len(counts))
    kinds = np.array(data.text_kinds)
    for kind, colour in _COLOURS.items():
        chosen = np.flatnonzero(kinds == kind)
        if len(chosen):
            x, y = (counts * jitter)[chosen], expected[chosen].clip(0.1)
            axes.scatter(x.clip(0.1), y, s=28, color=colour, alpha=0.45, linewidth=0, label=kind)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.grid(axis="x")
    axes.set(xlabel="true matches", ylabel="expected matches")
    chart.legend()
    return chart.svg()
