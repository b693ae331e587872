"""The log of the service on standard error: lines for people, or one JSON object a line for programs."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal, cast, get_args

from sfumato.errors import UserError

LogFormat = Literal["text", "json"]
"""How the lines of the log look."""


def log_format_of(name: str) -> LogFormat:
    """The format of a name."""
    for one in get_args(LogFormat):
        if one == name:
            return cast(LogFormat, one)
    raise UserError(f"--log-format must be {' or '.join(get_args(LogFormat))}, got {name!r}")


_FIELDS = ("request_id", "method", "path", "status", "milliseconds")


class JsonFormatter(logging.Formatter):
    """One object a line: time in UTC, level, logger and message, and of a request its id, route, status and time.

    The path is the template of the route. So a line holds no id, no query and no key.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if isinstance(took := line.get("milliseconds"), float):
            line["milliseconds"] = round(took, 1)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(format: LogFormat, *, access_log: bool) -> None:
    """Log to standard error unless logging is set up already; with a line for every request if that is wanted."""
    handler = logging.StreamHandler()
    lines = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if format == "json" else lines)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("sfumato.serve").setLevel(logging.DEBUG if access_log else logging.INFO)
