"""The demo page in a real browser answers as the library does, with a tiny model on every fourth emoji.
SFUMATO_DEMO_RUN=runs/demo/run compares the whole page of `make site`."""

import functools
import http.server
import os
import threading
from pathlib import Path

import demo_page
import numpy as np
import pytest
from serve.test_page import CHROMIUM, Tab, chromium, expect  # noqa: F401
from test_demo import TINY, read_every_fourth

from sfumato import GaussianEmbedding, Searcher, find_recipe, fit, load_recipe
from sfumato.data.sources import SOURCES, Source
from sfumato.models.run import load_model
from sfumato.search.answer import QueryInfo
from sfumato.workflows.index import GalleryPart, create_collection

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")]
K = 24
REAL = os.environ.get("SFUMATO_DEMO_RUN")
ALL = """() => DATA.queries.map((query) => {
    const {hits, text, expected, nothing} = answerTo(query);
    const rows = hits.map(({id, distance, probability}) => [id, distance, probability]);
    return {query, text, expected, nothing, hits: rows};
})"""

rounded = lambda vectors: vectors.astype(np.float16).astype(np.float32)


@pytest.fixture(scope="module")
def items():
    return demo_page.choose_items()[:: 1 if REAL else 4]


@pytest.fixture(scope="module")
def searcher(items, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo_page")
    if not REAL:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(SOURCES, "emoji", Source(read_every_fourth, needs_path=False))
            fit(load_recipe(find_recipe("emoji-demo"), TINY), folder / "run")
    with demo_page.make_searcher(load_model(REAL or str(folder / "run")), items, folder / "collection") as found:
        yield found


@pytest.fixture(scope="module")
def site(searcher, items, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    demo_page.write_page(searcher, items, folder / "below" / "demo")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder / "below" / "demo", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def half_precision(searcher, items, tmp_path_factory):
    whole, ids = searcher.gallery, [one.id for one in items]
    stored, payloads = whole.get(ids), [one.payload for one in items]
    embeddings = stored.embeddings[np.array([stored.ids.index(id) for id in ids])]
    texts = rounded(whole.texts.of(ids, payloads).vectors)
    embeddings, model = GaussianEmbedding(rounded(embeddings.mean), embeddings.log_var), searcher.model
    folder = tmp_path_factory.mktemp("half") / "collection"
    collection = create_collection(model, GalleryPart(embeddings, ids), folder, texts=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sfumato.search.texts.text_vectors", lambda given: texts)
        collection.upsert(embeddings, ids, payloads=payloads)
    with Searcher(collection, "half", lambda: model) as found:
        yield found


@pytest.fixture(scope="module")
def tab(chromium, site):  # noqa: F811
    tab = Tab(chromium, site[1])
    tab.page.goto("/below/demo/index.html")
    yield tab
    assert not tab.seen
    tab.page.context.close()


@pytest.fixture(scope="module")
def shown(tab):
    tab.page.wait_for_selector(".tiles")
    answers = tab.page.evaluate(ALL)
    assert len(answers) > 300 and all(len(answer["hits"]) == K for answer in answers)
    return answers


def test_the_page_answers_as_the_library_does_with_vectors_in_half_precision(shown, half_precision, monkeypatch):
    from sfumato.encoders.package_weights import sentence_vectors

    queries = [answer["query"] for answer in shown]
    query = half_precision.model.embed_texts(queries).numpy()
    query = GaussianEmbedding(rounded(query.mean), query.log_var)
    monkeypatch.setattr("sfumato.search.candidates.sentence_vectors", lambda texts: rounded(sentence_vectors(texts)))
    found = half_precision.gallery.search(query, K, about=QueryInfo.of_texts(queries))
    assert {answer.target for answer in found} == {"fits"}
    for page, answer in zip(shown, found, strict=True):
        assert [hit[0] for hit in page["hits"]] == [hit.id for hit in answer], page["query"]
        assert page["text"] == answer.verdict.text, page["query"]
        numbers = [[hit.distance, hit.match_probability] for hit in answer]
        np.testing.assert_allclose([hit[1:] for hit in page["hits"]], numbers, atol=2e-5, rtol=0)
        np.testing.assert_allclose(page["expected"], answer.expected_matches, rtol=1e-4)
        np.testing.assert_allclose(page["nothing"], answer.nothing_probability, atol=2e-5)


def test_it_shows_answers_in_its_address_and_invents_none(tab, shown):
    page = tab.page
    page.goto("/below/demo/index.html")
    expect(page.locator(".tile")).to_have_count(3)
    page.get_by_role("button", name="“volcano”").click()
    answer = next(one for one in shown if one["query"] == "volcano")
    expect(page.locator("#answers .verdict")).to_contain_text(answer["text"])
    expect(page.locator(".hit")).to_have_count(K)
    shown_ids = page.locator(".hit").evaluate_all("(nodes) => nodes.map((node) => node.dataset.id)")
    assert shown_ids == [hit[0] for hit in answer["hits"]]
    expect(page.locator("#status")).to_have_text(f"volcano: {answer['text']}. {K} results.")
    assert page.url.endswith("#q=volcano")
    page.reload()
    expect(page.locator("#answers h2")).to_have_text("“volcano”")
    page.locator("#q").fill(" Black  CAT ")
    page.keyboard.press("Enter")
    expect(page.locator("#answers h2")).to_have_text("“black cat”")
    page.go_back()
    expect(page.locator("#answers h2")).to_have_text("“volcano”")
    page.get_by_role("link", name="sfumato").click()
    expect(page.locator(".tile")).to_have_count(3)
    page.goto("/below/demo/index.html")
    page.locator("#q").fill("cactuss with a hat")
    page.keyboard.press("Enter")
    expect(page.locator("#answers .verdict")).to_have_text("This page does not know this search")
    expect(page.locator(".hit")).to_have_count(0)
    page.locator("#answers").get_by_role("link", name="cactus", exact=True).click()
    expect(page.locator(".hit")).to_have_count(K)
    expect(page.locator("#answers")).to_be_focused()


def test_it_fits_a_phone_opens_from_a_file_and_asks_nobody_else(chromium, site):  # noqa: F811
    tab = Tab(chromium, (site[0] / "index.html").as_uri().removesuffix("/demo/index.html"))
    tab.page.set_viewport_size({"width": 360, "height": 700})
    for query in ("", "#q=animal", "#q=spreadsheet", "#q=no%20such%20query"):
        tab.page.goto(f"{(site[0] / 'index.html').as_uri()}{query}")
        expect(tab.page.locator("#answers h2")).to_be_visible()
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), query
    tab.page.context.close()
    assert not tab.seen
    files = {path.name: path.read_bytes() for path in Path(site[0]).iterdir()}
    names = {"index.html", "demo.css", "page.css", "demo.js", "data.js", "emoji.webp", "licences.txt"}
    assert set(files) == names and sum(map(len, files.values())) < demo_page.MOST_BYTES
    for name in ("index.html", "demo.css", "demo.js"):
        assert not any(bad in files[name].decode() for bad in ("https://", "innerHTML", "eval(", "fetch(")), name
    assert len((demo_page.SOURCE / "demo.js").read_text("utf-8")) < 16_000
    assert b"Microsoft" in files["licences.txt"] and b"WordNet" in files["licences.txt"]
