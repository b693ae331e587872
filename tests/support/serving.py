"""A tiny trained run, served: what the tests of the service share."""

import base64
import contextlib
import io
import json
import os
import socket
import threading
import time
import zlib
from dataclasses import replace

import httpx
import numpy as np
import torch
import uvicorn
from PIL import Image

from sfumato import csd_matrix, find_recipe, fit, load_recipe
from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.data.images import FolderImages
from sfumato.models.embed import embed_folder
from sfumato.models.run import load_model, load_run
from sfumato.serve.app import create_app
from sfumato.serve.guard import Guard
from sfumato.serve.problems import CODES
from sfumato.serve.server import Connection
from sfumato.serve.settings import ServedGallery, Settings, Sources
from sfumato.workflows.index import GalleryPart, build_index, create_collection
from sfumato.workflows.own_folder import index_data
from support.pictures import encoded
from support.processes import Started, command

KEY = "a-key-for-the-tests"


def make_embedding_run(folder, *changes):
    """Trains heads on 48 images of 6 and texts of 5 channels, linear maps of one hidden vector; returns its folder."""
    random = np.random.default_rng(0)
    hidden = random.standard_normal((48, 4))
    np.save(folder / "images.npy", (hidden @ random.standard_normal((4, 6)) + 1).astype(np.float32))
    np.save(folder / "texts.npy", (hidden @ random.standard_normal((4, 5)) - 1).astype(np.float32))
    (folder / "images_ids.txt").write_text("".join(f"photo-{i}\n" for i in range(48)))
    data = [f"data.{side}={folder / side}.npy" for side in ("images", "texts")]
    small = "model.dim=8", "model.hidden=16", "train.batch_size=16", "train.epochs=3", "train.device=cpu"
    fit(load_recipe(find_recipe("embeddings"), [*small, *data, *changes]), folder / "run")
    return folder / "run"


def embedding_sources(run_folder):
    run, tables = load_run(run_folder), [np.load(run_folder.parent / f"{side}.npy") for side in ("images", "texts")]
    images, texts = run.model.embed_images(npy_rows(tables[0])), run.model.embed_texts(npy_rows(tables[1]))
    run = replace(run, calibrated=True, calibration=calibration(texts, images))
    ids, words = [f"photo-{i}" for i in range(48)], [f"text {i % 5}" for i in range(48)]
    parts = {"images": GalleryPart(images, ids), "texts": GalleryPart(texts, ids, words)}
    return Sources(run.model, "run", {name: ServedGallery(build_index(run, part)) for name, part in parts.items()})


def npy_rows(table):
    files = []
    for row in table:
        file = io.BytesIO()
        np.save(file, row)
        files.append(file.getvalue())
    return files


def picture(colour="red", size=(20, 14), format="PNG", **options):
    return encoded(Image.new("RGB", size, colour), format, **options)


in_base64 = lambda data: base64.b64encode(data).decode()


def bomb(width=50_000, height=50_000):
    data = bytearray(picture())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def many_scans(n, size=(64, 64)):
    file = picture("grey", size, "JPEG", progressive=True)
    return file[:-2] + file[file.rindex(b"\xff\xda") : -2] * n + file[-2:]


def embedded(run, pictures):
    embeddings, ids, _ = embed_folder(run, pictures)
    return GalleryPart(embeddings, ids, images={"folder": str(pictures)})


def calibration(texts, images):
    """Of queries whose matches lie at the near end of these distances: probabilities spread over the whole range."""
    near, far = csd_matrix(texts, images).flatten().quantile(torch.tensor([0.1, 0.9]))
    generator, match = torch.Generator().manual_seed(5), torch.nn.functional.one_hot(torch.arange(400) % 48, 48)
    distance = torch.where(match == 1, near, far) + (far - near) / 4 * torch.randn(400, 48, generator=generator)
    scores = QueryScores.fit(distance, match)
    return Calibration.fit(distance, match, t2i=scores, i2t=scores)


def read_only(run_folder, pictures):
    run = load_run(run_folder)
    images = embedded(run, pictures)
    texts = [f"a {c} {s}" for c in ("red", "green", "blue") for s in ("circle", "square", "cross")]
    lines = GalleryPart(run.model.embed_texts(texts), [str(i) for i in range(len(texts))], texts)
    run = replace(run, calibration=calibration(lines.embeddings, images.embeddings))
    galleries = {"images": ServedGallery(build_index(run, images), FolderImages(pictures))}
    galleries["texts"] = ServedGallery(build_index(run, lines))
    return Sources(run.model, "run", galleries)


def collected(run, part, folder, *store):
    with create_collection(run, part, folder, *store) as collection:
        collection.upsert(part.embeddings, part.ids, part.payload)
    return folder


SQUARES = ("red", "green", "blue", "white", "black", "yellow", "orange", "pink")


def make_squares(folder):
    (folder / "pictures").mkdir()
    lines = []
    for i, colour in enumerate(SQUARES):
        for k in range(3):
            Image.new("RGB", (40, 30 + k), colour).save(folder / "pictures" / f"{i}{k}.png")
            lines.append({"image": f"{i}{k}.png", **({"captions": [f"a plain {colour} square"]} if k != 1 else {})})
    (folder / "pictures" / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index_data(load_model("small"), str(folder / "pictures" / "list.jsonl"), folder / "index", "file:")
    return folder / "index"


new_item = lambda id, colour="red", **more: {"id": id, "image": in_base64(picture(colour)), **more}
add = lambda client, *ids, **more: client.post("/v1/items", json={"items": [new_item(id) for id in ids], **more})
remove = lambda client, *ids, **more: client.post("/v1/items/delete", json={"ids": list(ids), **more})


def problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == status and told["title"] and told["detail"]
    assert told["type"] == f"/docs#problem-{told['code']}" and CODES[told["code"]][0] == status
    return told


def search(client, *queries, status=200, **options):
    answer = client.post("/v1/search", json={"queries": list(queries), **options})
    assert answer.status_code == status, answer.text
    return answer.json()["answers"] if status == 200 else problem(answer, status)


by_image = lambda data, **options: {"json": {"queries": [{"image": in_base64(data)}], **options}}


def begun(client, line, body=b"", length=10_000_000, headers=()):
    connection = socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20)
    lines = f"{line} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {length}", *headers
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
    return connection


@contextlib.contextmanager
def served(sources, **settings):
    with served_app(create_app(sources, Settings(**settings)), **settings) as client:
        yield client


@contextlib.contextmanager
def served_app(app, **settings):
    config = uvicorn.Config(app, port=0, http=Connection, log_level="error", ws="none", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {settings['keys'][0]}"} if settings.get("keys") else {}
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=20, trust_env=False) as client:
            client.app = app
            until(lambda: ready(client))
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the service does not end"


ready = lambda client: client.get("/readyz").status_code == 200


def guard_of(app):
    layer = app.middleware_stack
    while not isinstance(layer, Guard):
        layer = layer.app
    return layer


def until(true):
    for _ in range(2000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not become true")


class SlowModel(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.go, self.sizes = threading.Event(), []
        self.go.set()
        self.image, self.text = model.image, model.text

    def embed_texts(self, texts):
        self.go.wait(20)
        self.sizes.append(len(texts))
        return self.model.embed_texts(texts)


class Process:
    def __init__(self, *arguments, folder=None, **environment):
        self._started = Started(_serve, folder or os.getcwd(), *arguments, env=environment, piped=True)
        line = self._started.stdout.readline()
        assert "http://" in line, self._started.finish()
        self.client = httpx.Client(base_url=line.split()[-1], timeout=20, trust_env=False)

    def end(self, signal_number):
        """(exit status, standard error)."""
        self.send_signal(signal_number)
        self.client.close()
        return self.finish()

    def send_signal(self, signal_number):
        os.kill(self._started.pid, signal_number)

    def finish(self):
        with self._started.stdout:
            return self._started.finish(30)


def _serve(folder, *arguments):
    os.chdir(folder)
    command("serve", "--port", "0", "--set", "drain=0", *arguments)
