"""Settings of a service: limits, sizes, keys and what they permit."""

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from sfumato.errors import UserError

Rights = Literal["read", "write"]
"""What a caller may do; who may write may also read."""

MOST = 1024
"""Longest list in a request; the limit of a service is at most this."""


@dataclass(frozen=True)
class Limits:
    """Limits and sizes of a service that the command line sets, with the help of their options."""

    max_upload_mb: Annotated[float, "Largest size of an image file, in megabytes."] = 10.0
    max_pixels: Annotated[int, "Largest number of pixels in all images of a request."] = 40_000_000
    max_batch: Annotated[int, "Largest number of queries or new items in a request."] = 64
    max_results: Annotated[int, "Largest number of results per query and of items per conformal set."] = 1000
    batch_size: Annotated[int, "Largest number of texts or images that are embedded together."] = 32
    batch_window_ms: Annotated[float, "Longest wait for a batch to fill, in milliseconds."] = 2.0
    max_records: Annotated[int, "Largest number of results and items of conformal sets in a response."] = 20_000
    byte_budget_mb: Annotated[
        float, "Largest size of all requests in memory, in megabytes; 64 KiB of each are free."
    ] = 128.0
    pixel_budget: Annotated[int, "Largest number of pixels in the images of all requests at work."] = 120_000_000
    decode_timeout: Annotated[float, "Longest time to decode an image, in seconds of the processor."] = 10.0
    decode_memory_mb: Annotated[int, "Memory of a process that decodes images, in megabytes."] = 1300
    queue: Annotated[int, "Largest number of texts or images that wait; further requests are refused."] = 256
    timeout: Annotated[
        float, "Longest time for a request to arrive, in seconds. The answer may take the same time."
    ] = 30.0
    threads: Annotated[int, "Number of threads per computation."] = 1
    workers: Annotated[int, "Number of searches at the same time."] = 2


@dataclass(frozen=True)
class Settings(Limits):
    """The limits of a service, and who may use it."""

    max_requests: int = 128  # simultaneous requests to /v1/, counted when their bodies have arrived
    max_response_bytes: int = 16_000_000  # of all payloads in a response
    optimise_after: int = 10_000  # written items after which a store is optimised while the service runs
    keys: tuple[str, ...] = field(default=(), repr=False)  # they permit everything
    reading_keys: tuple[str, ...] = field(default=(), repr=False)  # everything but writes; without keys none is needed
    read_only: bool = False  # refuse every write, with any key
    judgements: Path | None = None  # file of people's verdicts; they cannot be given without
    hosts: tuple[str, ...] = ()  # accepted names in the Host header; any if empty

    def __post_init__(self) -> None:
        for one in fields(self):
            value, kind = getattr(self, one.name), type(one.default)
            if kind is int and value < 1:
                raise UserError(f"serve: {one.name} must be at least 1, got {value}")
            if kind is float and not (value > 0 or (value == 0 and one.name == "batch_window_ms")):
                raise UserError(f"serve: {one.name} must be positive, got {value}")
        from sfumato.data.image_decoding import MAX_PIXELS  # Which imports numpy; the flags of a command need none.

        if self.max_pixels > MAX_PIXELS:
            raise UserError(f"serve: max_pixels must be at most {MAX_PIXELS}, got {self.max_pixels}")
        if self.max_batch > MOST:
            raise UserError(f"serve: max_batch (--max-batch) must be at most {MOST}, got {self.max_batch}")
        if self.queue < self.max_batch:
            raise UserError(
                f"serve: queue (--queue) must be at least max_batch (--max-batch), got {self.queue} and"
                f" {self.max_batch}; else a request with max_batch queries could never be accepted"
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
    def max_upload_bytes(self) -> int:
        """Largest image file in bytes."""
        return int(self.max_upload_mb * 1_000_000)

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
