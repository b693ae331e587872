"""The examples of the start page, and how the files of the page travel."""

import gzip
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.serving import read_only, served

from sfumato.serve import service
from sfumato.serve.answering import candidates, chosen
from sfumato.serve.app import PAGE
from sfumato.serve.schemas import Answer, ResultRecord, VerdictText


def answer(query, kind, *probabilities):
    hits = [
        ResultRecord(id=str(i), rank=i, distance=0, match_probability=p, total_variance=0, payload={}, picture=None)
        for i, p in enumerate(probabilities, 1)
    ]
    return Answer(
        query=query, kind="text", distance="csd", calibrated=True, total_variance=0, queries_differ=False,
        expected_matches=sum(probabilities), verdict=kind and VerdictText(kind=kind, text=kind), abstained=None,
        hits=hits, conformal_set=None,
    )  # fmt: skip


def test_candidates_are_frequent_words_and_names():
    payloads = [{"label": "flag: Norway"}, {"label": "Flag: Peru"}, {"text": "a red fox"}, {"name": "x" * 81}, {}]
    found = candidates(payloads)
    assert found[:4] == ["flag", "flag: Norway", "Flag: Peru", "a red fox"]  # no word occurs twice but "flag"
    assert "x" * 81 not in found and "" not in found
    assert len(found) == len(set(found)) and len(candidates([{"label": f"a{i} b{i}"} for i in range(500)])) <= 118
    photos = [
        {"captions": "A dog and the sea\nThe dog swims", "tags": "sea\nholiday", "name": "rome"},
        {"captions": "Two dogs and the sky", "title": "A dog day"},
        {"folder": "2024/dog", "camera": "Canon", "_digest": "dog"},  # no words about what is to be seen
    ]
    assert candidates(photos)[:4] == ["dog", "A dog and the sea", "Two dogs and the sky", "animal"]


def test_each_kind_has_its_clearest_answer():
    answers = [
        answer("one", "clear", 0.8, 0.7),
        answer("two", "clear", 0.9, 0.0),
        answer("some", "many", 0.9, 0.2),
        answer("all", "many", 0.8, 0.8),
        answer("few", "few", 0.99),
        answer("unfamiliar words", "unfamiliar", 0.9),
        answer("of no", "unsure", 0.1),
        answer("plain", None, 0.1),
    ]
    kinds = lambda some: {one.kind: one.answer.query for one in chosen(some)}
    assert kinds(answers) == {"vague": "all", "precise": "two"}
    assert kinds(answers[4:]) == {"precise": "few"}
    assert chosen([]) == []


def test_a_collection_where_no_search_has_many_matches_has_a_vague_word():
    answers = [
        answer("dog", "few", 0.4, 0.3, 0.2),
        answer("a dog", "few", 0.4, 0.3, 0.3),  # not one word
        answer("fox", "few", 0.9, 0.0),
        answer("animal", "many", 0.9, 0.9),  # a word in general, which serves where there is no own one
        answer("two people at a table", "clear", 0.95),
    ]
    assert [(one.kind, one.answer.query) for one in chosen(answers)] == [("vague", "dog"), ("precise", "fox")]
    found = [(one.kind, one.answer.query) for one in chosen(answers[3:])]
    assert found == [("vague", "animal"), ("precise", "two people at a table")]


def test_examples_are_answers_of_the_gallery(client):
    found = client.get("/v1/examples").json()
    assert found == client.get("/v1/examples").json()
    assert found["queries"] and len({one["kind"] for one in found["queries"]}) == len(found["queries"])
    for one in found["queries"]:
        query = {"queries": [{"text": one["answer"]["query"]}], "max_results": 3}
        same = client.post("/v1/search", json=query).json()["answers"][0]
        assert same["verdict"] == one["answer"]["verdict"]
        assert [hit["id"] for hit in same["hits"]] == [hit["id"] for hit in one["answer"]["hits"]]
        assert same["expected_matches"] == pytest.approx(one["answer"]["expected_matches"], rel=1e-3)
    assert len(found["items"]) == 6
    for item in found["items"]:
        assert client.get(f"/v1/items/{item['id']}").json() == item


def test_the_first_visitors_share_one_choice(run, data, monkeypatch):
    chosen_for, some = [], service.candidates

    def counted(payloads):
        chosen_for.append(len(payloads))
        return some(payloads)

    monkeypatch.setattr(service, "candidates", counted)
    with served(read_only(run, data)) as client, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: client.get("/v1/examples").json(), range(6)))
        counted_queries = client.get("/v1/info").json()["galleries"]["images"]["queries"]["n_queries"]
    assert counted_queries == 0  # Examples are no queries of users.
    assert len(chosen_for) == 1 and all(one == found[0] for one in found) and found[0]["queries"]


def test_examples_follow_the_collection(writable):
    some = writable.get("/v1/examples").json()["items"]
    ids = [item["id"] for item in some]
    assert writable.post("/v1/items/delete", json={"ids": ids}).status_code == 200
    now = [item["id"] for item in writable.get("/v1/examples").json()["items"]]
    assert len(now) == 6 and not set(ids) & set(now)


def test_without_texts_as_queries_there_are_items_alone(client, vectors, kept):
    assert client.get("/v1/examples?gallery=texts").json()["queries"] == []
    found = vectors.get("/v1/examples").json()
    assert found["queries"] == [] and len(found["items"]) == 6
    assert kept.get("/v1/examples?gallery=texts").status_code == 404


def test_files_of_the_page_travel_small_and_once(client):
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
