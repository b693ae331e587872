"""What the service promises: the answers of the library, over HTTP; writes that last; and good order at the end."""

import base64
import gzip
import json
import os
import re
import signal
import threading
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import ExifTags, Image
from support import serving
from support.raising import failing, raises
from support.toy import make_toy

from sfumato import fit, load_recipe
from sfumato.data.image_decoding import decode_image
from sfumato.data.images import SplitImages, UploadedImages
from sfumato.errors import UserError
from sfumato.models.run import load_run
from sfumato.search.answer import QueryInfo, SearchOptions, TextQuery
from sfumato.search.folder import change_metadata, writers_lock
from sfumato.search.index import copy_gallery
from sfumato.search.stores.protocol import Filter
from sfumato.serve.app import PAGE, create_app, route_of
from sfumato.serve.embedding import vector_sides
from sfumato.serve.problems import CODES
from sfumato.serve.server import check_host, hosts_of, is_loopback, run_app
from sfumato.serve.settings import ServedGallery, Settings, Sources, open_sources
from sfumato.workflows.index import GalleryPart, build_index


def same(answer, found):
    close = lambda value: value if value is None else pytest.approx(value, abs=1e-5)

    def hits(some):
        return [
            {
                "id": h.id, "rank": h.rank, "distance": close(h.distance), "total_variance": close(h.uncertainty),
                "match_probability": close(h.match_probability if found.calibrated else None),
                "payload": h.payload, "best_text": h.best_text, "duplicates": [*h.duplicates],
                "why": pytest.approx({**h.why} if found.calibrated else {}, abs=1e-4),
            }
            for h in some
        ]  # fmt: skip

    def plain(some):
        return [{name: value for name, value in h.items() if name not in ("picture", "to_judge")} for h in some]

    assert plain(answer["hits"]) == hits(found)
    for name in ("distance", "target", "calibrated", "hidden", "note", "abstained", "suggestion", "warning"):
        assert answer[name] == getattr(found, name), name
    for name, value in (("total_variance", found.uncertainty), ("expected_matches", found.expected_matches)):
        assert answer[name] == close(value), name
    assert answer["verdict"] == (found.verdict and vars(found.verdict))
    whole = answer["conformal_set"]
    assert (whole is None) == (found.conformal_set is None)
    if whole is not None:
        assert plain(whole["hits"]) == hits(found.conformal_set) and whole["complete"] is not found.conformal_set_cut


RED, TWO = {"text": "a red circle"}, {"where": {"text": ["a red circle", "a blue cross", "nothing"]}}
CASES = [
    (RED, {"max_results": 5}), (RED, {"max_results": 40, "coverage": 0.9, "abstain": 0.3}),
    (RED, {"max_results": 40, "min_probability": 0.4}), (RED, {"max_results": 4, "duplicates": "fold"}),
    (RED, {"filter": {}, "coverage": 0.5}),  # Every item passes.
    ({"text": "red", "without": ["a circle"]}, {}), ({"text": "red", "also": ["circle"], "without": ["a circle"]}, {}),
    ({"id": "110.png"}, {"max_results": 3}),
    ({"image": serving.in_base64(serving.picture()), "name": "x.png"}, {"max_results": 3}),
    ({"image": serving.in_base64(serving.picture())}, {"gallery": "texts", "max_results": 4, "coverage": 0.8}),
    ({"image": serving.in_base64(serving.picture())}, {"gallery": "texts", "filter": TWO}),
    ({"text": "red"}, {"gallery": "texts", "filter": {"ranges": {"text": ["a blue cross", "a blue d"]}}}),
]  # fmt: skip


def library(sources, query, gallery="images", max_results=10, filter=None, abstain=None, **options):
    where = {name: tuple(values) for name, values in (filter or {}).get("where", {}).items()}
    wanted = Filter(where, None, filter.get("ranges", {})) if filter else None
    options = SearchOptions(filter=wanted, max_risk=abstain, max_set=40, **options)
    searcher = sources.searcher(gallery)
    if "id" in query:
        return searcher.search_items([query["id"]], max_results, options)[0]
    if "image" in query:
        return searcher.answers([base64.b64decode(query["image"])], max_results, options)[0]
    text = TextQuery(query["text"], tuple(query.get("also", ())), tuple(query.get("without", ())))
    return searcher.answers([text], max_results, options)[0]


@pytest.mark.parametrize(("query", "options"), CASES)
def test_an_answer_is_that_of_the_library(client, sources, query, options):
    (answer,) = serving.search(client, query, **options)
    same(answer, found := library(sources, query, **options))
    names = {"text": found.query, "image": query.get("name", "image 1"), "id": query.get("id")}
    assert answer["query"] == names[answer["kind"]] and answer["kind"] in query


def test_links_mixed_kinds_and_promises_are_those_of_json_and_the_library(client, sources):
    red, blue = ({"image": serving.in_base64(serving.picture(colour))} for colour in ("red", "blue"))
    queries = red, {"text": "a bar"}, {"id": "110.png"}, blue
    for answer, query in zip(serving.search(client, *queries, max_results=3), queries, strict=True):
        same(answer, library(sources, query, max_results=3))
    several = {"also": ["circle"], "without": ["a circle"]}
    values = {"where": ["text:a red circle", "text:a blue cross", "text:nothing"]}
    ends, ranges = ["text>=a blue cross", "text<a blue d"], {"text": ["a blue cross", "a blue d"]}
    for words, query, options in (
        ({"max_results": 5}, {}, {"max_results": 5}), (several, several, {}),
        ({"gallery": "texts", **values}, {}, {"gallery": "texts", "filter": TWO}),
        ({"gallery": "texts", "where": ends}, {}, {"gallery": "texts", "filter": {"ranges": ranges}}),
        ({"max_total_variance": 3.0, "order": "distance"}, {}, {"filter": {"max_total_variance": 3.0}}),
    ):  # fmt: skip
        link = client.get("/v1/search", params={"q": RED["text"], **words})
        assert link.json()["answers"] == serving.search(client, {**RED, **query}, **options)
    for wrong, where in (({"where": ["date=2023", "date=2024"]}, "query.where"), ({"without": " "}, "query.without.0")):
        refused = client.get("/v1/search", params={"q": "a", **wrong})
        assert refused.status_code == 422 and refused.json()["errors"][0]["where"] == where
    refused = serving.search(client, {"id": "000.png", "without": ["red"]}, status=422)
    assert "stand beside a text" in refused["detail"]
    told = client.get("/v1/info").json()["galleries"]["images"]
    assert 0.5 in told["risks"] and told["coverages"] == [0.5, 0.8, 0.9, 0.95]
    for risk in told["risks"]:
        serving.search(client, RED, abstain=risk)
    assert "no limit has a risk" in serving.search(client, RED, abstain=0.0001, status=422)["detail"]
    assert "a filter may remove" in serving.search(client, RED, coverage=0.5, filter=TWO, status=422)["detail"]
    for promise in ("abstain", "coverage", "min_probability"):
        for query in ({"image": serving.in_base64(serving.picture())}, {"id": "000.png"}):
            refused = serving.search(client, {"text": "fine"}, query, **{promise: 0.5}, status=422)
            assert f"{promise} works only with queries by text" in refused["detail"]
            assert refused["errors"][0]["where"] == promise
        refused = serving.search(client, {"text": "a"}, gallery="texts", **{promise: 0.5}, status=422)
        assert "works only with queries by image" in refused["detail"]


def test_info_and_metrics(client):
    info = client.get("/v1/info").json()
    assert info["dimensions"] == 16 and info["distance"] == "csd" and info["limits"]["max_results"] == 40
    assert {n: g["n"] for n, g in info["galleries"].items()} == {"images": 48, "texts": 9}
    assert info["galleries"]["texts"]["fields"] == ["text"] and not info["galleries"]["texts"]["pictures"]
    client.get("/v1/items/000.png")
    client.request("BREW", "/v1/items/000.png")
    # Counted after its answer.
    serving.until(lambda: 'route="/v1/items/{id:path}",status="405"' in client.get("/metrics").text)
    text = client.get("/metrics").text
    assert 'sfumato_requests_total{method="GET",route="/v1/items/{id:path}",status="200"}' in text
    for method, path, route in (
        ("POST", "/v1/items/delete", "/v1/items/delete"), ("GET", "/v1/items/delete", "/v1/items/{id:path}"),
        ("HEAD", "/v1/items", "/v1/items"), ("PATCH", "/v1/items/delete", "/v1/items/{id:path}"),
        ("GET", "/nowhere", "none"),
    ):  # fmt: skip
        assert route_of(client.app, method, path) == route
    assert 'sfumato_requests_total{method="other",route="/v1/items/{id:path}",status="405"}' in text
    assert 'sfumato_items{gallery="images"} 48.0' in text and 'sfumato_waiting{kind="text"} 0.0' in text
    assert "sfumato_batch_size_bucket" in text and "sfumato_request_seconds_bucket" in text


def test_the_page_and_the_documentation_need_nothing_from_elsewhere(client):
    page, docs = client.get("/"), client.get("/docs")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert re.search("<noscript>.*needs JavaScript.*</noscript>", page.text)
    files = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert set(files) == {"index.html", "page.css", "page.js", "service.js", "words.js", "add.js", "judge.js"}
    assert sum(len(text) for name, text in files.items() if name.endswith(".js")) < 56_000
    for name, text in files.items():
        assert not re.search(r"https://|http://(?!www\.w3\.org/)|//cdn|innerHTML|eval\(", text), name
    document = client.get("/openapi.json").json()
    linked, there = (set(re.findall(rf'{name}="#?([^"]*)"', docs.text)) for name in ("href", "id"))
    assert linked - there == {"./", "openapi.json", "page/page.css"} and not re.search("<script|style[=>]", docs.text)
    assert {f"problem-{code}" for code in CODES} | set(document["components"]["schemas"]) <= there
    assert docs.headers["content-security-policy"] == page.headers["content-security-policy"]
    assert "HTTPValidationError" not in json.dumps(document)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"<h2><code>{method.upper()} {path}</code></h2>" in docs.text and operation["operationId"] in there
            assert all(f"<code>{one['name']}</code>" in docs.text for one in operation.get("parameters", ()))
            assert all("application/problem+json" in operation["responses"][s]["content"] for s in ("401", "500"))


def test_pictures_and_files_of_the_page_are_the_files_and_travel_once(client, data):
    answer = client.get("/v1/pictures/051.png")
    assert answer.content == (data / "051.png").read_bytes()
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
    assert "max-age=604800" in answer.headers["cache-control"]
    again = client.get("/v1/pictures/051.png", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content
    small = client.get("/v1/pictures/051.png?size=16")
    assert decode_image(small.content, None).shape == (3, 16, 16) and small.headers["etag"] != answer.headers["etag"]
    (hit, *_) = serving.search(client, {"id": "051.png"})[0]["hits"]
    assert client.get(hit["picture"]).status_code == 200
    for path in ("/", "/page/page.js", "/page/page.css"):
        plain = client.get(path, headers={"Accept-Encoding": "identity"})
        with client.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as small:
            sent = b"".join(small.iter_raw())
            assert small.headers["content-encoding"] == "gzip" and "Accept-Encoding" in small.headers["vary"]
        assert gzip.decompress(sent) == plain.content == (PAGE / (path[6:] or "index.html")).read_bytes()
        assert len(sent) < len(plain.content) / 2
        assert plain.headers["cache-control"] == "no-cache"  # kept, and asked for each time
        again = client.get(path, headers={"If-None-Match": plain.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_a_collection_of_texts_beside_pictures_and_galleries_that_do_not_fit(run, data, collection, tmp_path, sources):
    loaded = load_run(run)
    lines = GalleryPart(loaded.model.embed_texts(["a red bar"]), ["one"], ["a red bar"])
    with serving.served(open_sources(collection, texts=serving.collected(loaded, lines, tmp_path / "texts"))) as client:
        added = client.post("/v1/items", json={"gallery": "texts", "items": [{"id": "two", "text": "a blue bar"}]})
        assert added.json() == {"gallery": "texts", "stored": 1, "created": 1, "n": 2}
        assert added.headers["location"] == "/v1/items/two?gallery=texts"
        assert client.get("/v1/items/two?gallery=texts").json()["payload"] == {"text": "a blue bar"}
        wrong = serving.add(client, "3", gallery="texts")
        assert wrong.status_code == 422 and "takes items with text" in wrong.json()["detail"]
    raises(UserError, "give a collection of texts there", open_sources, collection, texts=collection)
    loaded, images, texts = load_run(run), sources.galleries["images"], sources.galleries["texts"]
    queries = loaded.model.embed_texts(["a"])
    other = build_index(loaded, GalleryPart(type(queries)(queries.mean[:, :5], queries.log_var[:, :5]), ["a"], ["a"]))
    raises(UserError, "differ in d", Sources, loaded.model, "run", {"images": images, "texts": type(texts)(other)})


def test_what_was_added_is_found_shown_replaced_and_removed(writable, sources):
    red, blue = serving.picture("red"), serving.picture("blue", format="JPEG")
    new = serving.new_item("new/1", payload={"by": "me"}), {"id": "new 2", "image": serving.in_base64(blue)}
    answer = writable.post("/v1/items", json={"items": new})
    assert answer.status_code == 201, answer.text
    assert answer.json() == {"gallery": "images", "stored": 2, "created": 2, "n": 50}
    assert writable.get("/v1/items/new%2F1").json()["payload"] == {"by": "me"}
    found = serving.search(writable, {"image": serving.in_base64(red)}, max_results=3)[0]["hits"]
    assert "new/1" in [h["id"] for h in found]
    shown = writable.get("/v1/pictures/new/1")
    assert (decode_image(shown.content, None) == decode_image(red, None)).all()
    assert shown.headers["cache-control"] == "private, no-cache"
    for asked in ("", "?original=true"):
        answer = writable.get(f"/v1/pictures/new%202{asked}")
        assert answer.headers["content-type"] == "image/jpeg" and "content-disposition" not in answer.headers
    assert writable.get("/v1/pictures/000.png").status_code == 200  # Of before, from the folder.
    again = writable.post("/v1/items", json={"items": [serving.new_item("new/1", "green", payload={"by": "you"})]})
    assert again.json()["n"] == 50 and writable.get("/v1/items/new/1").json()["payload"] == {"by": "you"}
    assert writable.get("/v1/pictures/new/1").headers["etag"] != shown.headers["etag"]
    assert serving.remove(writable, "new/1").json() == {"gallery": "images", "deleted": 1, "n": 49}
    assert serving.remove(writable, "new/1").json()["deleted"] == 0
    assert writable.get("/v1/pictures/new/1").status_code == 404
    assert serving.remove(writable, "new 2", "new 2", "nobody").json() == {"gallery": "images", "deleted": 1, "n": 48}
    assert not [f for f in (writable.folder / "pictures").rglob("*") if f.is_file()]


def test_what_another_process_calibrates_holds_at_once(writable):
    for known in (False, True):  # Without a search between them.
        change_metadata(writable.folder, lambda now, known=known: {"calibrated": known})
        serving.search(writable, RED, min_probability=0.3, status=200 if known else 422)
        change_metadata(writable.folder, lambda now, known=known: {"calibrated": not known})
        assert writable.get("/v1/info").json()["galleries"]["images"]["calibrated"] is not known


def test_a_second_writer_is_told_so_and_leaves_no_image(run, collection, writable, caplog):
    assert serving.add(writable, "new").status_code == 201
    files = sorted((collection / "pictures").rglob("*"))
    with serving.served(open_sources(collection)) as second:
        for answer in (serving.add(second, "other"), serving.remove(second, "new")):
            assert answer.status_code == 409
            assert answer.json()["detail"].startswith("Another process writes to this collection: send writes to")
        assert second.get("/v1/items/new").status_code == 200 and second.get("/v1/search?q=red").status_code == 200
    assert sorted((collection / "pictures").rglob("*")) == files
    assert caplog.text.count("writes to it; wait until it closes the store") == 2


@pytest.mark.parametrize("path", ["/v1/items", "/v1/items/delete"])
def test_a_write_that_waits_for_another_service_is_not_made_once_its_caller_has_gone(writable, path, monkeypatch):
    assert serving.add(writable, "kept").status_code == 201
    images, come = writable.app.state.service.sources.galleries["images"].writable, threading.Event()
    noted = lambda folder, timeout: (come.set(), writers_lock(folder, 20))[1]
    monkeypatch.setattr("sfumato.serve.writing.writers_lock", noted)
    body = json.dumps({"ids": ["kept"]} if path.endswith("delete") else {"items": [serving.new_item("late")]}).encode()
    with writers_lock(images.folder, 5):
        with serving.begun(writable, f"POST {path}", body, len(body)):
            assert come.wait(20)
        serving.until(lambda: 'status="499"' in writable.get("/metrics").text)
    monkeypatch.undo()
    assert serving.add(writable, "next").status_code == 201  # Made after what waited.
    assert [writable.get(f"/v1/items/{id}").status_code for id in ("kept", "late", "next")] == [200, 404, 200]


def test_ids_that_no_path_can_hold_are_refused(kept):
    for id in ("two\nlines", "bell\a", "..", "."):
        answer = serving.add(kept, "good", id)
        assert answer.status_code == 422 and f"body.items.1.id: the id {id!r} " in answer.json()["detail"]
        assert kept.get("/v1/items/good").status_code == 404 and serving.remove(kept, id).json()["deleted"] == 0


def test_a_batch_is_stored_whole_and_photographs_bring_their_fields(writable):
    torn = serving.in_base64(serving.picture(size=(200, 200), format="JPEG")[:600])
    for bad, where in (
        ({"id": "bad", "image": torn}, "body.items.1.image"), ({"id": "bad", "image": "****"}, "body.items.1.image"),
        (serving.new_item("good"), "body.items.1.id"), ({"id": "bad", "text": "a"}, "body.items.1"),
        ({"id": "bad"}, "body.items.1"), (serving.new_item("bad\0"), "body.items.1.id"),
        (serving.new_item("bad", payload={"a": 1}), "body.items.1.payload.a"),
        (serving.new_item("bad", payload={"_file": "reserved"}), "body.items.1.payload._file"),
    ):  # fmt: skip
        answer = writable.post("/v1/items", json={"items": [serving.new_item("good"), bad]})
        assert answer.status_code == 422 and answer.json()["errors"][0]["where"] == where, answer.text
    assert writable.get("/v1/info").json()["galleries"]["images"]["n"] == 48
    assert not (writable.folder / "pictures").exists()
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription], exif[ExifTags.Base.Model] = "a dog at the gate", "EOS 5D"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:06:13 12:01:09"
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (48.0, 51.0, 0.0)
    image = serving.in_base64(serving.picture(format="JPEG", exif=exif))
    items = [{"id": "a", "image": image}, {"id": "b", "image": image, "payload": {"captions": "mine", "by": "me"}}]
    assert writable.post("/v1/items", json={"items": items}).status_code == 201
    own = {"date": "2024-06-13T12:01:09", "camera": "EOS 5D"}
    assert writable.get("/v1/items/a").json()["payload"] == {"captions": "a dog at the gate", **own}
    assert writable.get("/v1/items/b").json()["payload"] == {"captions": "mine", "by": "me", **own}
    assert b"EOS" not in writable.get("/v1/pictures/a").content


def test_hits_name_a_picture_only_where_there_may_be_one(run, data, collection):
    sources = open_sources(collection)
    sources.galleries["images"].images = UploadedImages(collection / "pictures", SplitImages({"000.png": None}))
    with serving.served(sources) as client:
        serving.add(client, "new")
        hits = serving.search(client, {"text": "a"}, max_results=49)[0]["hits"]
        assert {h["id"] for h in hits if h["picture"]} == {"000.png", "new"}
        assert client.get("/v1/items/001.png").json()["picture"] is None


def test_a_store_is_optimised_after_many_writes_and_at_the_end(collection, monkeypatch):
    sources, calls, go = open_sources(collection), [], threading.Event()
    gallery = sources.galleries["images"].gallery
    monkeypatch.setattr(gallery.store, "optimise", lambda: (calls.append(len(gallery)), go.wait(20)))
    with serving.served(sources, optimise_after=3) as client:
        assert serving.add(client, "1").status_code == serving.add(client, "2").status_code == 201 and not calls
        assert serving.add(client, "3").status_code == 201  # And does not wait for it.
        serving.until(lambda: calls)
        assert calls == [51] and serving.search(client, {"text": "a"})
        go.set()
        assert serving.add(client, "4").status_code == 201 and calls == [51]
    assert calls == [51, 52]
    with serving.served(open_sources(collection)) as client:
        again = client.app.state.service.sources.galleries["images"].gallery
        monkeypatch.setattr(again.store, "optimise", lambda: calls.append(0))
        serving.search(client, {"text": "a"})
    assert calls == [51, 52]  # Nothing was written.


def test_keys_and_hosts_keep_strangers_out(sources):
    with serving.served(sources, keys=(serving.KEY, "another-key-as-good")) as client:
        for headers in (
            {}, {"X-API-Key": "wrong"}, {"Authorization": f"Basic {serving.KEY}"}, {"Authorization": "Bearer"},
        ):  # fmt: skip
            with httpx.Client(base_url=client.base_url, headers=headers, trust_env=False) as stranger:
                for path in ("/v1/info", "/metrics", "/docs", "/openapi.json", "/v1/pictures/000.png", "/nothing"):
                    answer = stranger.get(path)
                    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
                for path in ("/", "/healthz", "/readyz", "/page/page.css"):
                    assert stranger.get(path).status_code == 200, path
                assert stranger.get("/page/../v1/info").status_code == 401
        for headers in ({"X-API-Key": serving.KEY}, {"Authorization": "bearer another-key-as-good"}):
            with httpx.Client(base_url=client.base_url, headers=headers, trust_env=False) as friend:
                assert friend.get("/v1/info").status_code == 200
    with serving.served(sources, hosts=hosts_of("127.0.0.1", [])) as client:
        for query, code in (("q=k%FCche", "encoding"), ("q=a&q=b", "twice"), ("&".join("a" * 1001), "encoding")):
            answer = client.get(f"/v1/search?{query}")
            assert answer.status_code == 400 and answer.json()["code"] == code
        assert client.get("/v1/info", headers={"Host": "evil.example"}).status_code == 400
        assert client.get("/v1/info", headers={"Host": "localhost:1234"}).status_code == 200
        for origin in ("http://evil.example", "null", "http://["):
            answer = client.post("/v1/search", json={"queries": [{"text": "a"}]}, headers={"Origin": origin})
            assert answer.status_code == 403
        own = str(client.base_url)
        assert client.post("/v1/search", json={"queries": [{"text": "a"}]}, headers={"Origin": own}).status_code == 200
        answer = client.get("/v1/info")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    check_host("0.0.0.0", Settings(keys=(serving.KEY,)), False)
    check_host("0.0.0.0", Settings(hosts=hosts_of("0.0.0.0", ["a.example"])), True)
    check_host("127.0.0.2", Settings(), False)
    assert hosts_of("0.0.0.0", []) == () and hosts_of("0.0.0.0", ["a.example"])[-1] == "a.example"
    assert "127.0.0.2" in hosts_of("127.0.0.2", []) and "192.0.2.1" in hosts_of("192.0.2.1", ["a.example"])
    assert hosts_of("::1", []) == hosts_of("localhost", []) == ("127.0.0.1", "localhost", "[::1]")


@pytest.mark.slow
def test_what_was_acknowledged_survives_kill_9(collection):
    process, acknowledged, sent = serving.Process(collection), [], threading.Event()
    serving.until(lambda: serving.ready(process.client))

    def ingest():
        for i in range(10_000):
            ids = [f"k{i}-{j}" for j in range(3)]
            try:
                answer = serving.add(process.client, *ids)
            except httpx.HTTPError:
                return
            assert answer.status_code == 201
            acknowledged.extend(ids)
            if len(acknowledged) > 30:
                sent.set()

    thread = threading.Thread(target=ingest)
    thread.start()
    assert sent.wait(30)
    process.send_signal(signal.SIGKILL)
    thread.join()
    assert process.finish()[0] == -signal.SIGKILL
    with serving.served(open_sources(collection)) as client:
        for id in acknowledged:
            assert client.get(f"/v1/items/{id}").status_code == 200
            assert client.get(f"/v1/pictures/{id}").status_code == 200
        n = client.get("/v1/info").json()["galleries"]["images"]["n"]
        assert 48 + len(acknowledged) <= n <= 48 + len(acknowledged) + 3


def test_a_service_that_cannot_answer_says_so_and_ends(collection, monkeypatch, capsys):
    sources = open_sources(collection)
    monkeypatch.setattr(sources.galleries["images"].gallery.store, "search", failing(UserError("no such table")))
    stop = threading.Timer(15, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    ended = raises(SystemExit, None, run_app, create_app(sources), host="127.0.0.1", port=0)
    stop.cancel()
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and "cannot answer: no such table" in err and not out


def test_the_command_says_what_is_wrong_and_hands_on_what_is_right(run, collection, tmp_path, sfumato, monkeypatch):
    apps = []
    monkeypatch.setattr("sfumato.serve.server.run_app", lambda app, **options: apps.append(app))
    (tmp_path / "v.jsonl").write_text("{}\n")
    for arguments, message in (
        ((tmp_path / "nothing",), str(tmp_path / "nothing")), ((collection, "--host", "0.0.0.0"), "--no-key"),
        ((collection, "--host", "0.0.0.0", "--no-key"), "--allowed-host"), ((run,), "is a run; make an index of it"),
        ((collection, "--judgements", tmp_path), "is a folder"),
        ((collection, "--judgements", tmp_path / "none" / "v.jsonl"), "does not exist"),
        ((collection, "--judgements", tmp_path / "v.jsonl"), "line 1"),
    ):  # fmt: skip
        assert message in sfumato.refused("serve", *arguments) and not apps
    monkeypatch.setenv("SFUMATO_API_KEY", "read:a-key-for-reading")
    right = "--read-only", "--port", 0, "--judgements", tmp_path / "new.jsonl", "--set", "timeout=7"
    assert sfumato("serve", collection, *right)[0] == 0
    service = apps[0].state.service
    service.sources.close()
    found = service.settings
    assert found.read_only and found.reading_keys == ("a-key-for-reading",) and not found.keys
    assert found.judgements == tmp_path / "new.jsonl" and found.timeout == 7


def test_idle_connections_are_kept_longer_than_proxies_keep_them(sources, monkeypatch):
    configured = []
    monkeypatch.setattr("sfumato.serve.server.Server.run", lambda self: configured.append(self.config))
    run_app(create_app(sources), host="127.0.0.1", port=0)
    assert configured[0].timeout_keep_alive > 60


@pytest.fixture(scope="module")
def texts(vector_run):
    return np.load(vector_run.parent / "texts.npy")


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    folder = tmp_path_factory.mktemp("points")
    fit(load_recipe(make_toy(folder), ["train.epochs=1", "model.variance=false", "loss.name=infonce"]), folder / "run")
    run = load_run(folder / "run")
    part = serving.embedded(run, folder / "data")
    calibration = serving.calibration(run.model.embed_texts(["a red circle", "a bar"]), part.embeddings)
    run = replace(run, calibration=calibration)
    return Sources(run.model, "points", {"images": ServedGallery(build_index(run, part))})


query = lambda vector, **rest: {"vector": np.asarray(vector).tolist(), **rest}


def test_vectors_of_both_modalities_find_what_the_library_and_the_command_find(
    vectors, adopted, vector_run, texts, tmp_path, sfumato
):
    index, queries = adopted.galleries["images"].gallery, adopted.model.embed_texts(serving.npy_rows(texts[[7]]))
    (answer,) = serving.search(vectors, query(texts[7], name="the seventh"), max_results=5)
    same(answer, index.search(queries, 5)[0])
    assert answer["query"] == "the seventh" and answer["kind"] == "text" and answer["calibrated"]
    np.save(tmp_path / "seven.npy", texts[7])
    copy_gallery(index, tmp_path / "index").close()
    (command,) = sfumato.json("search", tmp_path / "index", tmp_path / "seven.npy", "-k", 5)
    assert command["verdict"] == answer["verdict"]["text"]
    for ours, theirs in zip(answer["hits"], command["hits"], strict=True):
        assert ours["id"] == theirs["id"]
        assert ours["match_probability"] == pytest.approx(theirs["match_probability"], abs=1e-6)
    images = np.load(vector_run.parent / "images.npy")
    asked = [query(images[3], modality="image"), query(texts[4]), query(images[5], modality="image")]
    answers = serving.search(vectors, *asked, max_results=3)
    model, index = adopted.model, adopted.galleries["images"].gallery
    photos = model.embed_images(serving.npy_rows(images[[3, 5]]))
    words = model.embed_texts(serving.npy_rows(texts[[4]]))
    for answer, row, native in zip(answers, (photos[:1], words, photos[1:]), (False, True, False), strict=True):
        same(answer, index.search(row, 3, about=[QueryInfo("", native=native)])[0])
    assert [a["query"] for a in answers] == ["vector 1", "vector 2", "vector 3"]
    assert [a["calibrated"] for a in answers] == [False, True, False]
    assert answers[0]["hits"][0]["id"] == "photo-3" and answers[0]["hits"][0]["distance"] == pytest.approx(0, abs=1e-5)
    (among,) = serving.search(vectors, asked[0], gallery="texts")
    assert among["calibrated"]


def test_a_model_of_points_takes_its_own_embeddings(points):
    row = points.model.embed_texts(["a red circle"])
    assert np.linalg.norm(row.mean) == pytest.approx(1, abs=1e-6)
    with serving.served(points) as client:
        kinds = client.get("/v1/info").json()["query_kinds"]
        assert kinds == {"text": True, "image": True, "id": True, "vector": {"text": 16, "image": 16}}
        once, thrice = serving.search(client, query(row.mean[0]), query(3 * row.mean[0]), max_results=5)
        written = client.post("/v1/search", json={"queries": [{"text": "a red circle"}], "max_results": 5}).json()
    same(once, points.galleries["images"].gallery.search(row, 5)[0])
    for answer in (once, thrice):  # Scaled to unit length, as the model does.
        assert [h["id"] for h in answer["hits"]] == [h["id"] for h in written["answers"][0]["hits"]]
        ours, theirs = ([h["distance"] for h in one["hits"]] for one in (answer, written["answers"][0]))
        assert ours == pytest.approx(theirs, abs=1e-5)
    points.model.text.head.normalize = False  # A model without unit length keeps the length.
    (side,) = [side for side in vector_sides(points.model, 16).values() if side.modality == "text"]
    assert np.linalg.norm(side.points([np.full(16, 2.0, np.float32)]).mean) == pytest.approx(8)


def test_what_a_model_does_not_read_is_refused_with_the_way_out(client, vectors):
    assert client.get("/v1/info").json()["query_kinds"] == {"text": True, "image": True, "id": True, "vector": {}}
    told = serving.search(client, query(np.ones(16)), status=422)
    assert "embeds each text with a variance, which a vector has not" in told["detail"]
    assert told["errors"][0]["where"] == "body.queries.0.vector"
    told = serving.search(client, query(np.ones(16), modality="image"), status=422)
    assert "search by the image itself, or by an item" in told["detail"]
    assert vectors.get("/v1/info").json()["query_kinds"] == {
        "text": False, "image": False, "id": True, "vector": {"text": 5, "image": 6},
    }  # fmt: skip
    told = serving.problem(vectors.post("/v1/search", json={"queries": [{"text": "a dog"}]}), 422)
    assert "search by vector or by item" in told["detail"]
    told = serving.problem(vectors.post("/v1/search", **serving.by_image(serving.picture())), 422)
    assert "reads embeddings, not images; search by vector or by item" in told["detail"]


def test_what_is_wrong_with_a_vector_and_one_that_the_model_cannot_embed(vectors, tmp_path, texts):
    head = {"Content-Type": "application/json"}
    for vector, message in (
        ("[]", "has 0 numbers, expected the 5 of an embedding of a text"),
        ("[1, 2, 3, 4, 5, 6]", "has 6 numbers, expected the 5 of an embedding of a text"),
        ("[1, 2, 1e999, 4, 5]", "number 2 (from 0) is inf in float32, expected finite numbers"),
        ("[1, 2, 3, -1e39, 5]", "number 3 (from 0) is -inf in float32"), ("[0, 0, 0, 0, -0.0]", "holds zeros alone"),
        ("[1e-60, 0, 0, 0, 0]", "holds zeros alone"),
        ("[1e-20, 0, 0, 0, 0]", "has the Euclidean length 1e-20, expected 1e-12 to 1e+18"),
        ("[3e38, 3e38, 0, 0, 0]", "has the Euclidean length 4.24e+38, expected 1e-12 to 1e+18"),
        ('["1", 2, 3, 4, 5]', "Input should be a valid number"),
        ("[true, 2, 3, 4, 5]", "Input should be a valid number"),
        ("[1" + 400 * "0" + ", 2, 3, 4, 5]", "Input should be a valid number"), ("5", "Input should be a valid list"),
    ):  # fmt: skip
        body = f'{{"queries": [{{"vector": [1, 2, 3, 4, 5]}}, {{"vector": {vector}}}]}}'
        told = serving.problem(vectors.post("/v1/search", content=body, headers=head), 422)
        assert "body.queries.1.vector" in told["detail"] and message in told["detail"], vector
        (error,) = told["errors"]
        assert error["where"].startswith("body.queries.1.vector") and message in error["message"]
    row = query(np.ones(5))
    for query_, where in (({}, ""), ({"text": "a", **row}, ""), ({**row, "modality": "sound"}, ".modality")):
        told = serving.problem(vectors.post("/v1/search", json={"queries": [query_]}), 422)
        assert told["errors"][0]["where"] == f"body.queries.0{where}"
    asked = query(np.ones(6)), query(np.ones(5)), query(np.ones(5), modality="image")
    told = serving.search(vectors, *asked, status=422)
    assert [error["where"] for error in told["errors"]] == ["body.queries.0.vector", "body.queries.2.vector"]
    assert "expected the 6 of an embedding of a image" not in told["errors"][1]["message"]
    assert "expected the 6 of an embedding of an image" in told["errors"][1]["message"]
    run = serving.make_embedding_run(tmp_path, "train.epochs=1", "model.variance=true", "loss.name=pcmepp")
    with serving.served(serving.embedding_sources(run)) as client:
        (answer,) = serving.search(client, query(texts[3]))
        assert answer["total_variance"] > 0 and answer["calibrated"]
        huge = [1e17, -1e17, 1e17, 1e17, -1e17]
        told = [serving.search(client, query(texts[3]), query(sign * np.array(huge)), status=422) for sign in (1, -1)]
    message = "body.queries.1.vector: the embedding of this vector by the model is not finite"
    assert all(message in one["detail"] for one in told)
