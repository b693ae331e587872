"""Settings of a service: limits, sizes, keys and what they permit."""

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sfumato.data.image_decoding import MAX_PIXELS
from sfumato.errors import UserError

Rights = Literal["read", "write"]
"""What a caller may do; who may write may also read."""

MOST = 1024
"""Longest list in a request; the limit of a service is at most this."""


@dataclass(frozen=True)
class Settings:
    """Limits and sizes of a service.

    Attributes:
        batch_size: largest number of texts, or images, that are embedded together.
        batch_window: seconds that the first item of a batch waits for others.
        max_waiting: largest number of texts, or images, that wait for the model; more are refused with 503. It is at
            least max_batch.
        max_batch: largest number of queries, or new items, in a request; at most MOST.
        max_results: largest number of results of a query, and of items in a conformal set.
        max_upload_bytes: largest image file in bytes.
        max_pixels: largest total number of pixels of all images in a request; at most MAX_PIXELS.
        pixel_budget: largest total number of pixels of the images of all requests that are being checked, decoded or
            embedded; more are refused with 503.
        decode_timeout: seconds of the processor within which an image must be decoded. When it takes a
            quarter longer by the clock, it is refused with 503.
        decode_memory_bytes: memory of a process that decodes images, where the system limits it. 40 million pixels
            take up to 1.1 GB, by their format.
        max_requests: largest number of simultaneous requests to /v1/, counted when their bodies have arrived; more are
            refused with 503.
        byte_budget: largest number of bytes of the bodies of all requests, arriving or at work; more are refused with
            503. Of each body 64 KiB do not count.
        max_records: largest number of results, and items of conformal sets, in a response.
        max_response_bytes: largest number of bytes of all payloads in a response.
        timeout: seconds for reading a request, and again for answering it.
        threads: number of torch threads of one computation.
        workers: number of simultaneous searches.
        optimise_after: number of written items after which a store is optimised while the service runs.
        keys: API keys that permit everything; a request needs one of them, or one of the reading keys.
        reading_keys: API keys that permit everything but writes. If there are no keys at all, no key is needed.
        read_only: refuse every write, with any key.
        hosts: accepted names in the Host header; any if empty.

    Raises:
        UserError: a value is out of range.
    """

    batch_size: int = 32
    batch_window: float = 0.002
    max_waiting: int = 256
    max_batch: int = 64
    max_results: int = 1000
    max_upload_bytes: int = 10_000_000
    max_pixels: int = 40_000_000
    pixel_budget: int = 120_000_000
    decode_timeout: float = 10.0
    decode_memory_bytes: int = 1_300_000_000
    max_requests: int = 128
    byte_budget: int = 128_000_000
    max_records: int = 20_000
    max_response_bytes: int = 16_000_000
    timeout: float = 30.0
    threads: int = 1
    workers: int = 2
    optimise_after: int = 10_000
    keys: tuple[str, ...] = field(default=(), repr=False)
    reading_keys: tuple[str, ...] = field(default=(), repr=False)
    read_only: bool = False
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type is int and value < 1:
                raise UserError(f"serve: {one.name} must be at least 1, got {value}")
        if not (self.batch_window >= 0 and self.timeout > 0 and self.decode_timeout > 0):
            raise UserError(
                "serve: batch_window must be at least 0, timeout and decode_timeout positive, got"
                f" {self.batch_window}, {self.timeout} and {self.decode_timeout}"
            )
        if self.max_pixels > MAX_PIXELS:
            raise UserError(f"serve: max_pixels must be at most {MAX_PIXELS}, got {self.max_pixels}")
        if self.max_batch > MOST:
            raise UserError(f"serve: max_batch (--max-batch) must be at most {MOST}, got {self.max_batch}")
        if self.max_waiting < self.max_batch:
            raise UserError(
                f"serve: max_waiting (--queue) must be at least max_batch (--max-batch), got {self.max_waiting} and"
                f" {self.max_batch};"
                " else a request with max_batch queries could never be accepted"
            )
        if any(len(key) < 8 or not key.isascii() for key in self.all_keys):
            raise UserError(
                "serve: an API key must be at least 8 ASCII characters; make one with `openssl rand -hex 32`"
            )
        if set(self.keys) & set(self.reading_keys):
            raise UserError("serve: an API key is given both for reading and for writing; give it once")

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every API key; empty if none is needed."""
        return self.keys + self.reading_keys

    @property
    def max_body_bytes(self) -> int:
        """Largest request in bytes: an image of the largest size in base64, and 64 KiB for the rest."""
        return self.max_upload_bytes * 4 // 3 + 65_536


def read_keys(file: Path | None, environment: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """API keys of a file, or of the environment. Returns (keys that permit everything, keys that permit reading)."""
    if file is None:
        lines = [environment or ""]
    else:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {file}: cannot be read: {error}") from error
    keys: dict[Rights, list[str]] = {"write": [], "read": []}
    for line in filter(None, map(str.strip, lines)):
        scope, colon, key = line.partition(":")
        if colon and scope == "read":
            keys["read"].append(key.strip())
        else:
            keys["write"].append(key.strip() if colon and scope == "write" else line)
    if file is not None and not any(keys.values()):
        raise UserError(f"--api-key-file {file}: holds no key; write one with `openssl rand -hex 32 > {file}`")
    return tuple(keys["write"]), tuple(keys["read"])


def require_extra() -> None:
    """Check that the packages of the extra `serve` are installed, before anything is loaded."""
    needed = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UserError(
            f"the service needs the extra serve, of which {' and '.join(missing)} is missing: pip install"
            " 'sfumato[serve]'"
        )
