"""The memory that a block of code needs at its peak."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path
from typing import Self

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """A context that measures its own peak of resident memory, which counts what torch and NumPy allocate.

    Linux keeps the largest value and can forget it; other systems cannot, and give None.

    Memory that the allocator keeps for later is given back to the system first; otherwise a block that reuses it would
    seem to need none.
    """

    megabytes: float | None = None  # 10^6 bytes above the start; None before the end, and where it cannot be measured

    def __enter__(self) -> Self:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError, TypeError):  # Only glibc has it.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            _RESET.write_text("5", encoding="ascii")
            self._start: float | None = _largest()
        except OSError:
            self._start = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:
            self.megabytes = max(0.0, _largest() - self._start)


def _largest() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    if found is None:
        raise OSError(f"{_STATUS} has no VmHWM")
    return int(found[1]) * 1024 / 1e6
