"""Who may write: keys that read, keys that write, and services that take no writes."""

import logging

import pytest
from support.raising import raises
from support.serving import KEY, by_image, new_item, picture, problem, served

from sfumato.errors import UserError
from sfumato.serve.settings import Settings, open_sources, read_keys

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


def as_reader(client):
    client.headers = {"X-API-Key": READER}
    return client


def told(client):
    info = client.get("/v1/info").json()
    return info["rights"], info["galleries"]["images"]["writable"]


def test_who_may_read_and_who_may_write(collection, caplog):
    with served(open_sources(collection), keys=(KEY,), read_only=True) as client:
        assert told(client) == ("read", False)
        for method, path, body in READS:
            assert client.request(method, path, **body).status_code == 200, path
        for method, path, body in WRITES:
            assert "--read-only" in problem(client.request(method, path, **body), 403)["detail"]
        problem(client.put("/v1/items/000.png"), 403)  # Whatever may become a write.
    caplog.set_level(logging.DEBUG)
    with served(open_sources(collection), keys=(KEY,), reading_keys=(READER,)) as client:
        assert told(client) == ("write", True)
        as_reader(client)
        assert told(client) == ("read", False)
        for method, path, body in READS:
            assert client.request(method, path, **body).status_code == 200, path
        for method, path, body in WRITES:
            assert "This key permits" in problem(client.request(method, path, **body), 403)["detail"]
        assert client.get("/v1/items/000.png").status_code == 200 and client.get("/v1/items/new").status_code == 404
        client.headers = {"Authorization": f"Bearer {KEY}"}
        for method, path, body in WRITES:
            assert client.request(method, path, **body).is_success, path
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
    with pytest.raises(UserError, match="both for reading and for writing") as error:
        Settings(keys=(KEY,), reading_keys=(KEY,))
    assert KEY not in str(error.value)
    assert KEY not in repr(Settings(keys=(KEY,))) and READER not in repr(Settings(reading_keys=(READER,)))
