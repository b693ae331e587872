"""Problem documents (RFC 9457): the codes, the refusals that become them, and the OpenAPI document that lists them."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

NO_NUL, WORD = r"^[^\x00]*$", r"^[^\x00]*[^\s\x00][^\x00]*$"
_IN_WORDS = {NO_NUL: "holds NUL; leave it out", WORD: "is blank or holds NUL; expected a text"}
"""What is expected of a text, by its pattern: nobody should have to read a regular expression."""


class Model(BaseModel):
    """Base of requests and responses."""

    # The service sends every field, so the schemas of responses require those with a default too.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_serialization_defaults_required=True
    )


def example(request: dict[str, Any]) -> ConfigDict:
    """Settings of the schema of a request, with an example of it."""
    return ConfigDict(json_schema_extra={"examples": [request]})


class Invalid(Model):
    """One error in a request."""

    where: str = Field(description='place in the request, e.g. "body.queries.0.text"')
    message: str = Field(description="what is wrong, and what was expected")


class Problem(Model):
    """Why a request was refused, as RFC 9457 application/problem+json."""

    type: str = Field(description="`/docs#problem-CODE`; the description of the service explains each code")
    code: str = Field(description="which problem it is, for programs; the codes stay the same")
    title: str = Field(description="the status in words")
    status: int = Field(description="of HTTP")
    detail: str = Field(description="what happened, what was expected and what to do")
    errors: list[Invalid] = Field([], description="what is wrong, and where; the first 20")


CODES = {
    "bad-request": (400, "the request is not HTTP"),
    "unknown-host": (400, "the request uses a host name that the service does not know"),
    "encoding": (400, "the address holds letters that are not percent-encoded UTF-8"),
    "twice": (400, "the address has a parameter twice that it may have once"),
    "no-key": (401, "the key is missing or wrong"),
    "other-site": (403, "the request comes from a page of another web site"),
    "read-only": (403, "it is a write, and the service takes none"),
    "no-right-to-write": (403, "it is a write, and the key permits reading alone"),
    "not-found": (404, "there is no such gallery, item or image"),
    "no-such-path": (404, "the service has nothing under this path"),
    "wrong-method": (405, "the path takes other methods; Allow names them"),
    "too-slow": (408, "the request took too long to arrive"),
    "index": (409, "the gallery is in memory, and cannot be changed"),
    "other-writer": (409, "another process writes to the collection"),
    "no-judgements": (409, "the service keeps no verdicts: it was started without --judgements"),
    "too-large": (413, "the request is larger than a limit"),
    "wrong-content-type": (415, "the content type is not the expected one"),
    "no-such-part": (416, "the file has no such part; Content-Range has its length"),
    "invalid": (422, "the request is not valid; `errors` lists what is wrong and where"),
    "error": (500, "an error in the service; its log has the cause under the number in `detail`"),
    "busy": (503, "the service has too much to do; see Retry-After"),
    "not-ready": (503, "the service warms up or shuts down, or its store does not answer; see Retry-After"),
    "store-failed": (503, "the store failed; see Retry-After"),
    "too-long": (504, "the service did not answer in time"),
}
"""(status, description) of every problem; the first code of a status is its usual one."""


_USUAL = {status: code for code, (status, _) in reversed(CODES.items())}


PROBLEM = "application/problem+json"


_LONGEST, _MOST, _TOO_WRONG = 500, 20, 100


class Refusal(HTTPException):
    """The refusal of a request."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.errors, self.code = tuple(errors), code or _USUAL.get(status, "bad-request")

    def response(self) -> Response:
        """The refusal as a response."""
        problem = Problem(
            type=f"/docs#problem-{self.code}",
            code=self.code,
            title=HTTPStatus(self.status_code).phrase,
            status=self.status_code,
            detail=_clean(self.detail),
            errors=[Invalid(where=_clean(where), message=_clean(message)) for where, message in self.errors[:_MOST]],
        )
        # ASCII, so that encoding cannot fail.
        return Response(json.dumps(problem.model_dump()), self.status_code, headers=self.headers, media_type=PROBLEM)


def busy(detail: str, seconds: int = 1, *, code: str = "busy") -> Refusal:
    """The refusal of a busy service."""
    return Refusal(503, detail, headers={"Retry-After": str(seconds)}, code=code)


def wrong(*errors: tuple[str, str], before: str = "") -> Refusal:
    """The refusal of a request because of some places in it: (where, reason)."""
    where, reason = errors[0]
    return Refusal(422, f"{before}{where}: {reason}", errors=errors)


def invalid(errors: Sequence[Any]) -> Refusal:
    """The refusal of a request that pydantic finds invalid."""
    if len(errors) > _TOO_WRONG:
        return Refusal(422, f"The request is not valid: body: it has {len(errors)} errors")
    found = [(".".join(map(str, error["loc"])), _message(error)) for error in errors]
    first = "; ".join(f"{where}: {message}" for where, message in found[:3])
    return Refusal(422, f"The request is not valid: {first}", errors=found)


def _message(error: Any) -> str:
    """The message of one error of a ValidationError."""
    if error["type"] == "extra_forbidden":
        return f"unknown field {error['loc'][-1]!r}"
    if error["type"] == "string_pattern_mismatch":
        return _IN_WORDS[error["ctx"]["pattern"]]
    return str(error["msg"]).removeprefix("Value error, ")


def _clean(text: str) -> str:
    """A text shortened, and without characters that UTF-8 cannot encode."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


INTRODUCTION = (
    "Search among images and texts with match probabilities. Every error is a problem document (RFC 9457) with a"
    " `code`. Every path that takes GET takes HEAD. Where the service has keys, send one as"
    " `Authorization: Bearer KEY` or `X-API-Key: KEY`.\n\n| code | status | what happened |\n| --- | --- | --- |\n"
    + "".join(f"| `{code}` | {status} | {text} |\n" for code, (status, text) in CODES.items())
)

_REF = "#/components/schemas/{model}"

COMMON = (400, 401, 403, 408, 413, 500, 503)
"""Statuses of problems that every route may return."""

_FILE = {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}

IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "an image", **_FILE},
    206: {"description": "the parts of an original that Range names", **_FILE},
    304: {"description": "the image has not changed since the request named by If-None-Match"},
}
"""Responses of a route that returns an image."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of problem documents, for the `responses` of a route."""
    content = {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}}
    why = {status: [f"`{code}`: {text}" for code, (of, text) in CODES.items() if of == status] for status in statuses}
    return {status: {"description": "; ".join(codes), "content": content} for status, codes in why.items()}


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application: FastAPI's, with the problem documents and the ways to send a key."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    described = Problem.model_json_schema(ref_template=_REF, mode="serialization")
    document["components"]["schemas"] |= {**described.pop("$defs"), "Problem": described}
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    document["security"] = [{}, {"bearer": []}, {"header": []}]
    _type_values(document["components"]["schemas"])
    return document


def _type_values(schema: Any) -> None:
    """Write `patternProperties`, which let other keys pass and generators of clients ignore, as types of all values."""
    if isinstance(schema, dict):
        for pattern, values in schema.pop("patternProperties", {}).items():
            schema["additionalProperties"] = values
            schema["propertyNames"] = {**schema.get("propertyNames", {}), "pattern": pattern}
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        _type_values(inner)
