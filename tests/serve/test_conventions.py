"""What clients expect: methods, statuses, problems with codes; what a key may do; verdicts of people."""

import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from support.raising import raises
from support.serving import KEY, SQUARES, add, by_image, new_item, picture, problem, remove, search, served

from sfumato.errors import UserError
from sfumato.evaluation.judgements import Judgement, ShownHit, judged_figures, read_judgements, write_judgements
from sfumato.serve.problems import CODES
from sfumato.serve.settings import Settings, open_sources, read_keys
from sfumato.workflows.judgements import refine_index

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve.md"


def test_any_id_is_a_path(kept):
    for id in (
        *("a/b/c.png", "/a", "a/", "a//b", "a b", "a?b#c", "100%", "%2F", "ä/ö/🦊"),
        *("image", "delete", "a;b=c", "+", "'"),
    ):
        path, answer = f"/v1/items/{quote(id)}", add(kept, id)
        assert answer.status_code == 201 and answer.headers["location"] == path
        item = kept.get(path).json()
        assert item["id"] == id and kept.get(item["picture"]).status_code == 200
        assert id in [one["id"] for one in kept.get("/v1/items", params={"limit": 1000}).json()["items"]]
        assert remove(kept, id).json()["deleted"] == 1 and problem(kept.get(path), 404)["code"] == "not-found"


def listed(client, limit, between=lambda page: None, **more):
    found, cursor = [], None
    while True:
        page = client.get("/v1/items", params={"limit": limit, **more, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= limit
        found += [item["id"] for item in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            return found
        between(page)


def test_items_are_listed_page_by_page(client, sources):
    for name, served_gallery in sources.galleries.items():
        ids = served_gallery.gallery.ids
        for limit in (1, 7, len(ids) - 1, len(ids), 1000):
            assert listed(client, limit, gallery=name) == sorted(ids)
    page = client.get("/v1/items", params={"limit": 2}).json()
    assert page["gallery"] == "images" and page["items"][0] == client.get("/v1/items/000.png").json()
    assert len(client.get("/v1/items").json()["items"]) == min(100, len(sources.galleries["images"].gallery.ids))
    for wrong in ("?", "a", "AAAA", "_w"):  # No base64, cut short, NUL, no UTF-8.
        told = problem(client.get("/v1/items", params={"cursor": wrong}), 422)
        assert told["errors"][0]["where"] == "query.cursor" and "next_cursor" in told["detail"]
    for limit in ("0", "1001", "x"):
        assert problem(client.get(f"/v1/items?limit={limit}"), 422)["errors"][0]["where"] == "query.limit"


def test_items_are_created_and_replaced_and_a_list_misses_none_meanwhile(writable):
    first = add(writable, "a/new one?.png")
    assert first.status_code == 201 and first.json()["created"] == 1
    again = add(writable, "a/new one?.png")
    assert again.status_code == 200 and again.json()["created"] == 0 and "location" not in again.headers
    some = add(writable, "a/new one?.png", "b")
    assert some.status_code == 201 and "location" not in some.headers
    assert some.json() == {"gallery": "images", "stored": 2, "created": 1, "n": first.json()["n"] + 1}
    kept, names = listed(writable, 1000), iter(range(100))

    def change(page):
        last = page["items"][-1]["id"]
        assert add(writable, f"0{next(names)}").status_code == 201  # Before and after where the list is.
        assert add(writable, f"{last}-new").status_code == 201
        if last.endswith("-new"):
            assert remove(writable, last).json()["deleted"] == 1

    found = listed(writable, 5, change)
    assert found == sorted(found) and len(set(found)) == len(found) and set(kept) <= set(found)


def test_methods_and_problems_are_as_http_says(client):
    for path in (
        *("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/metrics", "/page/page.js"),
        *("/v1/info", "/v1/search?q=a", "/v1/items", "/v1/items/000.png", "/v1/pictures/000.png?size=16"),
        *("/v1/items/nothing", "/v1/search", "/nothing"),
    ):
        plain = {"Accept-Encoding": "identity"}  # else a length is that of the compressed body
        got, head = client.get(path, headers=plain), client.head(path, headers=plain)
        assert head.status_code == got.status_code and head.content == b"" and got.content
        for name in ("content-type", "content-security-policy", "etag", "cache-control"):
            assert head.headers.get(name) == got.headers.get(name)
        if path != "/metrics":  # It counts its own requests.
            assert head.headers.get("content-length") == got.headers.get("content-length") == str(len(got.content))
            lengths = [ask(path).headers.get("content-length") for ask in (client.get, client.head)]
            assert lengths[0] == lengths[1]
    for path, methods in (
        ("/", "GET, HEAD"), ("/page/page.js", "GET, HEAD"), ("/metrics", "GET, HEAD"),
        ("/v1/search", "GET, HEAD, POST"), ("/v1/items", "GET, HEAD, POST"), ("/v1/items/000.png", "GET, HEAD"),
        ("/v1/items/delete", "GET, HEAD, POST"),
    ):  # fmt: skip
        for method in ("PATCH", "OPTIONS", "PUT"):
            answer = client.request(method, path)
            assert problem(answer, 405)["code"] == "wrong-method" and answer.headers["allow"] == methods
        assert client.request("PUT", path, content=b"body").headers["allow"] == methods
    described = client.get("/openapi.json").json()["info"]["description"]
    for code, path, options in (
        ("no-such-path", "/nothing", {"method": "GET"}), ("not-found", "/v1/items/nothing", {"method": "GET"}),
        ("invalid", "/v1/items?gallery=sounds", {"method": "GET"}),
        ("wrong-content-type", "/v1/search", {"content": b"{}"}),
        ("other-site", "/v1/search", {"json": {}, "headers": {"Origin": "http://elsewhere"}}),
        ("too-large", "/v1/search", by_image(b"x" * 21_000_000)),
        ("index", "/v1/items/delete", {"json": {"ids": ["000.png"]}}),
    ):  # fmt: skip
        answer = client.request(**{"method": "POST", "url": path, **options})
        assert problem(answer, CODES[code][0])["code"] == code
    assert all(f"| `{code}` | {status} |" in described for code, (status, _) in CODES.items())
    rows = re.findall(r"^\| (\d{3}) \| (`[a-z`, -]+`) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {c: int(s) for s, codes in rows for c in codes[1:-1].split("`, `")} == {c: s for c, (s, _) in CODES.items()}


def inside(schema):
    yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from inside(inner)


def test_the_document_describes_all_and_its_defaults_and_examples_are_valid(client, vectors):
    document, names = client.get("/openapi.json").json(), []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names.append(operation["operationId"])
            assert operation["summary"] and operation["description"], (method, path)
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description") or parameter["schema"].get("description"), (path, parameter["name"])
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z]+(_[a-z]+)+|search", name) for name in names)
    schemas = document["components"]["schemas"]
    assert len(schemas) > 20
    for name, schema in schemas.items():
        assert schema.get("description"), name
        for field, one in schema["properties"].items():
            assert one.get("description"), f"{name}.{field}"
    assert document["openapi"].startswith("3.1") and "patternProperties" not in str(document)
    assert schemas["ItemFilter"]["properties"]["where"]["additionalProperties"]["type"] == "array"
    assert "default" not in schemas["SearchRequest"]["properties"]["max_results"]  # Clients would send it always.
    answers, new = set(), {"Problem"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                assert answer.get("content") or status == "304", (path, status)
                new |= refs(answer)
            assert {"206", "304", "416"} <= {*operation["responses"]} or "pictures" not in path
    while new:
        answers |= new
        new = set().union(*(refs(schemas[name]) for name in new)) - answers
    assert len(answers) > 20 and not {"SearchRequest", "NewItem"} & answers
    for name in answers:  # The service sends each, also the default.
        assert schemas[name]["required"] == list(schemas[name]["properties"]), name
    jsonschema = pytest.importorskip("jsonschema", reason="comes with schemathesis")
    for document in (client.get("/openapi.json").json(), vectors.get("/openapi.json").json()):
        checked = 0
        for schema in filter(lambda one: isinstance(one, dict), inside(document)):
            if isinstance(schema.get("properties"), dict):
                jsonschema.Draft202012Validator.check_schema(schema)
            values = [*schema.get("examples", ()), *([schema["default"]] if "default" in schema else ())]
            for value in values:
                jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)
                checked += 1
        assert checked > 30


def refs(schema):
    found = (one.get("$ref") for one in inside(schema) if isinstance(one, dict))
    return {ref.rpartition("/")[2] for ref in found if isinstance(ref, str)}


READER = "a-key-for-reading"
WRITES = [
    ("POST", "/v1/items", {"json": {"items": [new_item("new")]}}),
    ("POST", "/v1/items/delete", {"json": {"ids": ["000.png"]}}),
]
READS = [
    ("GET", "/v1/info", {}), ("GET", "/v1/search?q=a", {}),
    ("POST", "/v1/search", {"json": {"queries": [{"text": "a"}]}}), ("POST", "/v1/search", by_image(picture())),
    ("GET", "/v1/items/000.png", {}), ("GET", "/v1/pictures/000.png", {}), ("GET", "/metrics", {}),
    ("GET", "/docs", {}),
]  # fmt: skip


asked = lambda client, requests: [client.request(method, path, **body) for method, path, body in requests]


def told(client):
    info = client.get("/v1/info").json()
    return info["rights"], info["galleries"]["images"]["writable"]


def test_who_may_read_and_who_may_write(collection, caplog):
    with served(open_sources(collection), keys=(KEY,), read_only=True) as client:
        assert told(client) == ("read", False)
        assert [one.status_code for one in asked(client, READS)] == [200] * len(READS)
        assert all("--read-only" in problem(one, 403)["detail"] for one in asked(client, WRITES))
        problem(client.put("/v1/items/000.png"), 403)  # Whatever may become a write.
    caplog.set_level(logging.DEBUG)
    with served(open_sources(collection), keys=(KEY,), reading_keys=(READER,)) as client:
        assert told(client) == ("write", True)
        client.headers = {"X-API-Key": READER}
        assert told(client) == ("read", False)
        assert [one.status_code for one in asked(client, READS)] == [200] * len(READS)
        assert all("This key permits" in problem(one, 403)["detail"] for one in asked(client, WRITES))
        assert client.get("/v1/items/000.png").status_code == 200 and client.get("/v1/items/new").status_code == 404
        client.headers = {"Authorization": f"Bearer {KEY}"}
        assert [one.is_success for one in asked(client, WRITES)] == [True] * len(WRITES)
        client.headers = {"X-API-Key": "neither-of-the-two"}
        problem(client.get("/v1/info"), 401)
    assert KEY not in caplog.text and READER not in caplog.text


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\nread: {READER}\n write:another:one \n read:second-reader\n")
    assert read_keys(file, "ignored") == ((KEY, "another:one"), (READER, "second-reader"))
    assert read_keys(None, f" {KEY} ") == ((KEY,), ()) and read_keys(None, f"read:{READER}") == ((), (READER,))
    assert read_keys(None, None) == read_keys(None, " ") == ((), ())
    file.write_text("\n")
    raises(UserError, "holds no key", read_keys, file, None)
    for bad in ("read:short", "short", "write:", "read:"):
        file.write_text(f"{bad}\n")
        with pytest.raises(UserError, match="at least 8"):
            keys, reading_keys = read_keys(file, None)
            Settings(keys=keys, reading_keys=reading_keys)
    error = raises(UserError, "both for reading and for writing", Settings, keys=(KEY,), reading_keys=(KEY,))
    assert KEY not in str(error.value)
    assert KEY not in repr(Settings(keys=(KEY,))) and READER not in repr(Settings(reading_keys=(READER,)))


def fitting(client, text):
    (answer,) = search(client, {"text": text}, max_results=24)
    assert answer["target"] == "fits"
    return answer["hits"]


def give(client, *verdicts, status=200, **more):
    judgements = [dict(zip(("query", "id", "yes", "probability"), one, strict=False)) for one in verdicts]
    answer = client.post("/v1/judgements", json={"judgements": judgements, **more})
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told.pop("used", None) is None
    return told


use = lambda client: client.post("/v1/judgements", json={"use": True})


def test_verdicts_are_counted_kept_replaced_and_taken_back(judged):
    names = [f'sfumato_judged_{name}_total{{drawn="{drawn}",target="fits"}}'
             for drawn in ("no", "yes") for name in ("hits", "right", "probability")]  # fmt: skip

    def counted():
        lines = dict(line.rsplit(" ", 1) for line in judged.get("/metrics").text.splitlines())
        return [float(lines.get(name, 0)) for name in names]

    ids, before = [hit["id"] for hit in fitting(judged, "red")], counted()
    give(judged, ("red", ids[0], True, 0.9), ("red", ids[1], False, 0.3), ("red", ids[2], True), ("red", ids[3], None))
    drawn = {"query": "a red one", "id": ids[0], "yes": True, "probability": 0.5, "why": "probability 0.1-0.9"}
    assert judged.post("/v1/judgements", json={"judgements": [drawn]}).status_code == 200
    assert [after - one for one, after in zip(before, counted(), strict=True)] == pytest.approx([2, 1, 1.2, 1, 1, 0.5])
    judged.file.unlink()
    assert judged.get("/v1/judgements").json()["precision"] is None and not judged.file.exists()
    assert give(judged, ("red", ids[0], True, 0.9), ("red", ids[1], False)) == {"kept": 2, "removed": 0, "n": 2}
    weighed = {"query": "a red one", "id": ids[0], "yes": True, "weight": 2.5, "why": "probability 0.1-0.9"}
    judged.post("/v1/judgements", json={"judgements": [weighed], "judge": "ann"})
    assert give(judged, ("red", ids[0], False, 0.8), ("red", ids[1], None), judge="ann")["n"] == 4  # Others' stay.
    assert give(judged, ("red", ids[0], None), judge="ann") == {"kept": 0, "removed": 1, "n": 3}
    assert give(judged, ("red", ids[1], True), ("red", ids[1], False)) == {"kept": 1, "removed": 1, "n": 3}
    first, other, second = read_judgements(judged.file)
    assert (first.judge, first.yes, first.probability, first.why, first.target) == ("web", 1, 0.9, "chosen", "fits")
    assert (other.judge, other.weight, other.why) == ("ann", 2.5, "probability 0.1-0.9")
    assert (second.pair, second.yes, second.probability) == (("red", ids[1]), 0, None)
    assert judged.get("/v1/judgements", params={"query": "red"}).json()["given"] == {ids[0]: True, ids[1]: False}
    assert judged.get("/v1/judgements", params={"query": "red", "judge": "ann"}).json()["given"] == {}
    qrels = judged.get("/v1/judgements?format=qrels")
    assert qrels.headers["content-type"].startswith("text/plain")
    assert qrels.text.splitlines() == [f"red 0 {ids[0]} 1", f"a%20red%20one 0 {ids[0]} 1", f"red 0 {ids[1]} 0"]


def test_the_summary_is_that_of_the_library(judged):
    hits = {text: fitting(judged, text) for text in ("red", "a blue square", "yellow thing")}
    verdicts = [(text, hit["id"], i % 3 == 0, hit["match_probability"]) for text in hits for i, hit in
                enumerate(hits[text])]  # fmt: skip
    give(judged, *verdicts)
    give(judged, ("pink", hits["red"][0]["id"], True))  # Without a probability: no part of the figures.
    write_judgements(
        judged.file, [*read_judgements(judged.file), Judgement("q", "i", 1, "a", "2025-01-01", "x", 0.5, 1.0, "listed")]
    )
    told = judged.get("/v1/judgements").json()
    assert judged.get("/v1/judgements?figures=false").json() == told | dict.fromkeys(list(told)[3:-1])
    own = [one for one in read_judgements(judged.file) if one.probability is not None and one.target == "fits"]
    figures = judged_figures([ShownHit(*one.pair, 1, one.probability) for one in own], own)
    assert (told["n"], told["queries"], told["judges"]) == (73, 4, 1)
    for name in ("precision", "said", "calibration_error"):
        assert told[name] == vars(getattr(figures, name)), name
    assert told["precision"]["value"] == pytest.approx(1 / 3)
    assert told["calibration_error_by_chance"] == figures.calibration_error_by_chance


def test_all_verdicts_of_a_request_are_kept_or_none(judged):
    item = fitting(judged, "red")[0]["id"]
    told = give(judged, ("red", item, True), ("red", "nothing", True), status=422)
    assert told["errors"] == [{"where": "body.judgements.1.id", "message": "there is no item 'nothing'"}]
    assert not judged.file.exists()
    assert give(judged, ("red", "nothing", None))["n"] == 0, "what is gone can be taken back"
    for wrong, where in (
        ({"yes": "perhaps"}, "yes"), ({"query": " "}, "query"), ({"probability": 1.1}, "probability"),
        ({"weight": 0.5}, "weight"), ({"other": 1}, "other"), ({"why": ""}, "why"),
    ):  # fmt: skip
        body = {"judgements": [{"query": "red", "id": item, "yes": True, **wrong}]}
        told = problem(judged.post("/v1/judgements", json=body), 422)
        assert told["errors"][0]["where"].startswith(f"body.judgements.0.{where}"), wrong
    assert "give judgements, or use" in problem(judged.post("/v1/judgements", json={"judgements": []}), 422)["detail"]
    judged.file.write_text("{}\n")
    body = {"judgements": [{"query": "a", "id": item, "yes": 1}]}
    for method, options in (("GET", {}), ("POST", {"json": {"use": True}}), ("POST", {"json": body})):
        assert problem(judged.request(method, "/v1/judgements", **options), 503)["code"] == "store-failed"
    assert judged.file.read_text() == "{}\n", "a file that cannot be read is left as it is"


def test_nothing_is_lost_when_many_judge_at_once(judged):
    ids = [hit["id"] for hit in fitting(judged, "red")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: give(judged, (f"query {i}", ids[i % 24], i % 2 == 0), judge=f"j{i % 3}"), range(48)))
    kept = read_judgements(judged.file)
    assert {one.query for one in kept} == {f"query {i}" for i in range(48)} and len(kept) == 48


@pytest.mark.slow
def test_using_the_verdicts_changes_the_next_search_as_the_command_does(squares, tmp_path):
    folder, file = shutil.copytree(squares, tmp_path / "index"), tmp_path / "verdicts.jsonl"
    texts = [f"a plain {colour} square" for colour in SQUARES]
    with served(open_sources(folder), judgements=file) as judged:
        assert "judge some results" in problem(use(judged), 422)["detail"]
        before = fitting(judged, texts[0])
        give(judged, *((texts[0], hit["id"], True, hit["match_probability"]) for hit in before))
        few = use(judged).json()["used"]
        assert few["changed"] == [] and few["text"].startswith("Nothing changed: 24 verdicts on 1 search show")
        for text in texts[1:]:
            give(judged, *((text, hit["id"], True, hit["match_probability"]) for hit in fitting(judged, text)))
        done = use(judged).json()["used"]
        assert set(done["changed"]) == {"items with texts", "items without texts"} and done["n"] == 192
        assert done["after"]["value"] < 0.6 * done["before"]["value"]
        assert done["text"].startswith("Used 192 verdicts on 8 searches: ")
        after = fitting(judged, texts[0])
        assert sum(hit["match_probability"] for hit in after) > sum(hit["match_probability"] for hit in before)
        assert use(judged).json()["used"] == done, "it starts at the packaged constants"
    assert refine_index(folder, file).after.calibration_error.value == pytest.approx(done["after"]["value"])


def test_who_may_judge_and_what_is_refined(judged, squares, client, tmp_path, sources):
    assert judged.get("/v1/info").json()["judgements"] and not client.get("/v1/info").json()["judgements"]
    body = {"json": {"judgements": [{"query": "a", "id": "000.png", "yes": True}]}}
    for method, options in (("GET", {}), ("POST", body), ("POST", {"json": {"use": True}})):
        told = problem(client.request(method, "/v1/judgements", **options), 409)
        assert told["code"] == "no-judgements" and "--judgements FILE" in told["detail"]
    settings = {"keys": (KEY,), "reading_keys": (READER,), "judgements": tmp_path / "others.jsonl"}
    with served(open_sources(squares), **settings) as reader:
        reader.headers = {"X-API-Key": READER}
        assert not reader.get("/v1/info").json()["judgements"] and reader.get("/v1/judgements").json()["n"] == 0
        for options in (body, {"json": {"use": True}}):
            assert problem(reader.post("/v1/judgements", **options), 403)["code"] == "no-right-to-write"
    with served(sources, judgements=tmp_path / "v.jsonl") as client:
        give(client, ("a red circle", "000.png", True, 0.5))
        (one,) = read_judgements(tmp_path / "v.jsonl")
        assert one.target == "listed"
        assert problem(use(client), 422)["detail"].startswith('this service has no probabilities of target "fits"')


def test_hits_are_drawn_to_be_judged_and_have_an_order(judged, client):
    seen = 0
    for text in ("a plain red square", "a square", "something blue or green"):
        hits = fitting(judged, text)
        asked = [hit for hit in hits if hit["to_judge"]]
        unsure = [hit for hit in hits if 0.1 <= hit["match_probability"] <= 0.9]
        assert len(asked) == min(10, len(unsure)) and all(hit in unsure for hit in asked)
        assert sum(hit["to_judge"]["weight"] for hit in asked) == pytest.approx(len(unsure))
        assert all(", probability 0." in hit["to_judge"]["why"] for hit in asked if len(asked) == len(unsure))
        assert hits == fitting(judged, text), "the same each time"
        seen += len(asked)
    assert seen > 3
    (answer,) = client.post("/v1/search", json={"queries": [{"text": "a red circle"}]}).json()["answers"]
    assert not any(hit["to_judge"] for hit in answer["hits"]), "a service that keeps no verdicts asks for none"
    query = {"text": "something blue or green"}
    fits, closest, listed = (search(judged, query, **o)[0] for o in ({}, {"order": "distance"}, {"target": "listed"}))
    ids = [[hit["id"] for hit in one["hits"]] for one in (fits, closest, listed)]
    assert ids[1] == ids[2] != ids[0]
    assert [one["target"] for one in (fits, closest, listed)] == ["fits", "fits", "listed"]
    link = judged.get("/v1/search", params={"q": query["text"], "order": "distance"}).json()["answers"][0]
    assert link["hits"] == closest["hits"]
    assert search(judged, query, order="date", status=422)["errors"][0]["where"] == "body.order"
