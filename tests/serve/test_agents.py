"""The tools of agents, asked by the client of the SDK: in process, over standard input and output, and over HTTP."""

import asyncio
import base64
import io
import json
import os
import socket
import subprocess
import sys

import pytest
from PIL import Image
from support.serving import until

import sfumato

mcp = pytest.importorskip("mcp", reason="mcp is not installed")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    for name, colour in {"red": "red", "blue": "blue", "green": "green"}.items():
        (folder / "shown" / name).mkdir(parents=True)
        Image.new("RGB", (1200, 900), colour).save(folder / "shown" / name / f"{name}.png")
    (folder / "shown/red/red.txt").write_text("a red wall\n")
    command = ("index", "small", "--data", folder / "shown", "--out", folder / "index")
    subprocess.run([sys.executable, "-m", "sfumato", *map(str, command)], check=True, capture_output=True)
    return folder / "index"


def asked(server, *calls):
    """The results of some calls of tools."""

    async def ask():
        async with mcp.Client(server) as client:
            return (await client.list_tools()).tools, [await client.call_tool(*call) for call in calls]

    return asyncio.run(ask())


said = lambda result: json.loads(result.content[0].text)


def made(index):
    from sfumato.serve.agents import make_server

    return make_server(sfumato.load_index(index))


def test_an_agent_searches_and_looks_at_what_it_found(index):
    asked_for = {"text": "a red wall", "k": 2, "where": ["folder=red"]}
    calls = ("search", {"text": "a red wall"}), ("search", asked_for), ("show", {"id": "red/red.png"})
    calls += ("facets", {}), ("facets", {"field": "folder"}), ("status", {})
    tools, (found, some, shown, fields, folders, status) = asked(made(index), *calls)
    assert [tool.name for tool in tools] == ["search", "show", "facets", "status"]
    assert all(tool.annotations.read_only_hint for tool in tools)
    answer = sfumato.load_index(index).search("a red wall", duplicates="fold")
    assert [(one["id"], one["match_probability"]) for one in said(found)["hits"]] == [
        (hit.id, hit.match_probability) for hit in answer
    ]
    assert said(found)["verdict"] == answer.sentence and said(found)["expected_matches"] == answer.expected_matches
    assert [one["id"] for one in said(some)["hits"]] == ["red/red.png"]
    about, picture = shown.content
    image = Image.open(io.BytesIO(base64.b64decode(picture.data)))
    assert json.loads(about.text)["captions"] == "a red wall" and image.size == (768, 576)
    assert said(fields)["fields"]["folder"] == 3 and said(folders)["values"] == {"red": 1, "blue": 1, "green": 1}
    assert said(status)["items"] == 3 and said(status)["calibrated"]
    _, (alike,) = asked(made(index), ("search", {"image": picture.data, "k": 1}))
    assert said(alike)["hits"][0]["id"] == "red/red.png" and said(alike)["hits"][0]["match_probability"] is None


def test_what_an_agent_asks_wrongly_is_told_to_it(index):
    wrong = {
        "give either text or image": ("search", {}), "between 1 and 50": ("search", {"text": "a dog", "k": 51}),
        "no words": ("search", {"text": "?"}), "is not base64": ("search", {"image": "%%"}),
        "there is no item 'x'": ("show", {"id": "x"}), "no item": ("show", {"id": "../secret"}),
        "without stands beside a text": ("search", {"image": "AAAA", "without": ["a cat"]}),
        "expected FIELD=VALUE": ("search", {"text": "a dog", "where": ["folder"]}),
    }  # fmt: skip
    _, results = asked(made(index), *wrong.values())
    for message, result in zip(wrong, results, strict=True):
        assert result.is_error and message in result.content[0].text


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_command_answers(index):
    command = [sys.executable, "-m", "sfumato", "mcp", str(index)]
    by_pipes = mcp.StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            assert said(asked(by_pipes, ("status", {}))[1][0])["items"] == 3
            until(lambda: listens(port))  # It began before the pipes.
            assert said(asked(f"http://127.0.0.1:{port}/mcp", ("status", {}))[1][0])["items"] == 3
        finally:
            process.terminate()
