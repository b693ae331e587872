"""People's verdicts over HTTP: kept in a file, summed up, taken back, given as qrels, and used at once."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.serving import KEY, SQUARES, problem, search, served

from sfumato.evaluation.judgements import Judgement, ShownHit, judged_figures, read_judgements, write_judgements
from sfumato.serve.settings import open_sources
from sfumato.workflows.judgements import refine_index

READER = "a-key-for-reading"


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
    more = [after - one for one, after in zip(before, counted(), strict=True)]
    assert more == pytest.approx([2, 1, 1.2, 1, 1, 0.5])
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
    given = judged.get("/v1/judgements", params={"query": "red"}).json()["given"]
    assert given == {ids[0]: True, ids[1]: False}
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
        answer = judged.request(method, "/v1/judgements", **options)
        assert problem(answer, 503)["code"] == "store-failed"
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
        assert done["after"]["value"] < done["before"]["value"] / 2
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
