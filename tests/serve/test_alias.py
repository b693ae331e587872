"""A service that was started with a link follows it to another folder."""

import shutil
import threading

import pytest
from support.serving import add, embedded, served_app, until

from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.serve.alias import Following
from sfumato.serve.answering import Sources, open_sources
from sfumato.serve.app import create_app
from sfumato.serve.settings import Settings
from sfumato.training.loop import fit
from sfumato.workflows.copy import point
from sfumato.workflows.index import create_collection


@pytest.fixture(scope="module")
def other(toy, tmp_path_factory):
    """A run of the same data, named "other"."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    fit(load_recipe(toy / "toy.toml", ["train.epochs=1", "train.seed=7"]), folder)
    return folder


@pytest.fixture
def live(filled, other, data, tmp_path):
    """A link to a collection, beside one of the other run."""
    shutil.copytree(filled, tmp_path / "a")
    run = load_run(other)
    part = embedded(run, data)
    with create_collection(run, part, tmp_path / "b") as made:
        made.upsert(part.embeddings, part.ids, part.payload)
    (tmp_path / "live").symlink_to("a")
    return tmp_path / "live"


def following(live, **settings):
    def make(folder):
        return create_app(open_sources(folder), Settings(**settings))

    return served_app(Following(live, make, every=0.05))


def model(client):
    return client.get("/v1/info").json()["model"]


def distances(client):
    found = client.get("/v1/search", params={"q": "red", "max_results": 3}).json()
    return [hit["distance"] for hit in found["answers"][0]["hits"]]


def test_requests_go_to_what_the_link_points_to(live):
    with following(live) as client:
        before = distances(client)
        assert model(client) == "run" and add(client, "one").status_code == 201
        point(live, live.parent / "b")
        until(lambda: model(client) == "other")
        assert distances(client) != before and client.get("/v1/items/one").status_code == 404
        assert add(client, "two").status_code == 201
        point(live, live.parent / "a")
        until(lambda: model(client) == "run")
        assert client.get("/v1/items/one").status_code == 200 and client.get("/v1/items/two").status_code == 404
        assert distances(client) == before


def test_a_folder_that_cannot_be_served_changes_nothing(live, caplog):
    (live.parent / "empty").mkdir()
    with following(live) as client:
        for name in ("empty", "gone"):
            point(live, live.parent / name)
            until(lambda name=name: f"{name}, which cannot be served" in caplog.text)
            assert model(client) == "run" and distances(client)
        point(live, live.parent / "b")
        until(lambda: model(client) == "other")


def test_a_folder_that_failed_once_is_tried_again(live, caplog):
    failures = [OSError("the database is restarting")] * 2

    def make(folder):
        if folder.name == "b" and failures:
            raise failures.pop()
        return create_app(open_sources(folder), Settings())

    with served_app(Following(live, make, every=0.05)) as client:
        point(live, live.parent / "b")
        until(lambda: model(client) == "other")
        assert caplog.text.count("cannot be served") == 1 and not failures


def test_an_error_of_the_old_service_does_not_end_the_following(live, monkeypatch):
    closed = []

    def close(self):
        closed.append(self)
        if len(closed) == 1:
            raise OSError("the connection is gone")

    with following(live) as client:
        monkeypatch.setattr(Sources, "close", close)
        point(live, live.parent / "b")
        until(lambda: model(client) == "other")
        assert add(client, "one").status_code == 201
        point(live, live.parent / "a")
        until(lambda: model(client) == "run")


def test_a_write_waits_for_the_new_collection(live):
    """It arrives while the link points elsewhere, and the new collection is still being opened."""
    go, asked = threading.Event(), []

    def make(folder):
        if folder.name == "b":
            asked.append(folder)
            go.wait(20)
        return create_app(open_sources(folder), Settings())

    with served_app(Following(live, make, every=0.05)) as client:
        point(live, live.parent / "b")
        until(lambda: asked)
        answers = []
        writing = threading.Thread(target=lambda: answers.append(add(client, "one").status_code))
        writing.start()
        assert distances(client) and model(client) == "run"  # Searches go on.
        writing.join(0.5)
        assert writing.is_alive()
        go.set()
        writing.join(20)
        assert answers == [201] and client.get("/v1/items/one").status_code == 200
    with open_sources(live.parent / "a").galleries["images"].gallery as old:
        assert not old.get(["one"]).ids


def test_a_write_gives_up_where_nothing_new_comes(live):
    (live.parent / "empty").mkdir()
    with following(live, timeout=1.0) as client:
        point(live, live.parent / "empty")
        answer = add(client, "one")
        assert answer.status_code == 503 and answer.json()["code"] == "not-ready" and "Retry-After" in answer.headers
        point(live, live.parent / "a")
        until(lambda: add(client, "one").is_success)
