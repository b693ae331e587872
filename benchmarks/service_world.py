"""What the benchmarks of the service serve, and how: models that were never trained, and galleries of noise."""

import base64
import contextlib
import io
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image
from store_servers import family, family_memory

from sfumato.calibration.calibrator import Calibration
from sfumato.data.images import UploadedImages
from sfumato.encoders.processors import train_tokenizer
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.build import Assets, DualEncoder, build_model
from sfumato.models.sections import ModelConfig
from sfumato.search.collection import GaussianCollection
from sfumato.search.index import GaussianIndex
from sfumato.serve.settings import ServedGallery, Sources

WORDS = (
    "red", "green", "blue", "bird", "fish", "tree", "old", "small", "quick", "house", "on", "a", "the", "in", "water",
)  # fmt: skip


def random_model(d: int, width: int, seed: int = 0, *, variance: bool = True) -> DualEncoder:
    """Small encoders with fresh weights."""
    config = ModelConfig.model_validate(
        {
            "dim": d,
            "variance": variance,
            "image": {"kind": "small", "size": 16, "width": 4},
            "text": {"kind": "small", "vocabulary": 200, "width": width},
        }
    )
    torch.manual_seed(seed)
    return build_model(config, Assets(train_tokenizer(WORDS, 200), {})).eval()


def noise(n: int, d: int, seed: int = 1) -> GaussianEmbedding:
    """Unit means and small variances."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=1)
    return GaussianEmbedding(mean, torch.rand(n, d, generator=generator).mul(0.4 / d).log())


def small_sources(folder: Path, n: int = 30, d: int = 16, calibration: Calibration | None = None) -> Sources:
    """A collection in a new folder."""
    collection = GaussianCollection.create(folder / "collection", d=d, calibration=calibration)
    collection.upsert(
        noise(n, d), [str(i) for i in range(n)], {"first": ["yes" if i < n // 2 else "no" for i in range(n)]}
    )
    pictures = UploadedImages(folder / "collection" / "pictures")
    for i in range(5):
        pictures.write(str(i), picture())
    return Sources(random_model(d, 16), "random", {"images": ServedGallery(collection, pictures)})


def large_sources(n: int, d: int, width: int) -> Sources:
    """An exact index in memory."""
    index = GaussianIndex.build(noise(n, d), [str(i) for i in range(n)])
    return Sources(random_model(d, width), "random", {"images": ServedGallery(index)})


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve an application in this process on a free port of 127.0.0.1; yields the port when it is ready."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        while httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=90).status_code != 200:
            time.sleep(0.05)
        yield port
    finally:
        server.should_exit = True
        thread.join(30)


class ServiceProcess:
    """A service in a process of its own, which prints its address when it is ready."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"the service does not start: {line}; see {self._log}")
        self.url = line.strip().partition(": ")[2]
        self.port = int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; returns its exit status."""
        self._process.send_signal(number)
        return self._process.wait(60)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def workers(self) -> list[int]:
        """Its worker processes."""
        return family(self._process.pid)[1:]

    @property
    def memory(self) -> float:
        """Resident MB of the service with its workers."""
        return family_memory(self._process.pid)


def picture(colour: str = "red", size: tuple[int, int] = (20, 14), format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture; options are those of Pillow's save."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format, **options)
    return file.getvalue()


def bomb(width: int = 50_000, height: int = 50_000) -> bytes:
    """A PNG of a few bytes whose header promises billions of pixels."""
    data = bytearray(picture())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def in_base64(data: bytes) -> str:
    """As text."""
    return base64.b64encode(data).decode()
