"""Refusals: every error of the service is a problem document (RFC 9457)."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response

from sfumato.serve.schemas import Invalid, Problem

PROBLEM = "application/problem+json"
_LONGEST, _MOST = 500, 20


class Refusal(Exception):
    """A request that is not answered as wished.

    Args:
        status: of HTTP.
        detail: what came, what was expected, the way out.
        errors: (where, message) of each thing that is wrong.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors, self.headers = status, detail, tuple(errors), dict(headers or {})

    def response(self) -> Response:
        """The problem document."""
        problem = Problem(
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=_clean(self.detail),
            errors=[Invalid(where=_clean(where), message=_clean(message)) for where, message in self.errors[:_MOST]],
        )
        # ASCII, so that nothing in it can fail to be encoded.
        return Response(json.dumps(problem.model_dump()), self.status, headers=self.headers, media_type=PROBLEM)


def busy(detail: str, seconds: int = 1) -> Refusal:
    """Too much to do: 503, come back later."""
    return Refusal(503, detail, headers={"Retry-After": str(seconds)})


def invalid(errors: Sequence[Any], root: str = "") -> Refusal:
    """422 from the errors that pydantic lists.

    Args:
        errors: of a ValidationError.
        root: what was validated, e.g. "body".
    """
    found = []
    for error in errors:
        where = ".".join(str(part) for part in ((root,) if root else ()) + tuple(error["loc"]))
        found.append((where, str(error["msg"]).removeprefix("Value error, ")))
    first = "; ".join(f"{where}: {message}" if where else message for where, message in found[:3])
    return Refusal(422, f"The request is not valid: {first}", errors=found)


def _clean(text: str) -> str:
    """Of a bearable length, and without what UTF-8 cannot say."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
