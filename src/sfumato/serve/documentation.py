"""The OpenAPI document with its problem documents, and an HTML page of it without scripts."""

import json
import re
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from markupsafe import Markup, escape

from sfumato.serve.schemas import PROBLEM, Problem

INTRODUCTION = (
    "Search among images and texts with match probabilities. Every error is a problem document (RFC 9457). Where the"
    " service has a key,"
    " send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`."
)
_REF = "#/components/schemas/{model}"
_WHY = {
    400: "the request uses a host name that the service does not know, or is not HTTP",
    401: "the key is missing or wrong",
    403: "the request comes from a page of another web site",
    404: "there is no such gallery, item or image",
    408: "the request took too long to arrive",
    409: "the gallery is read-only",
    413: "the request is larger than the limit",
    415: "the content type is not the expected one",
    422: "the request is not valid; `errors` lists what is wrong and where",
    500: "an error in the service; its log has the cause under the number in `detail`",
    503: "the service is busy or not ready, or its store cannot be reached; see Retry-After",
    504: "the service did not answer in time",
}
COMMON = (400, 401, 403, 408, 413, 500, 503)
"""Statuses of problems that every route may return."""

IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "an image", "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "the image has not changed since the request named by If-None-Match"},
}
"""Responses of a route that returns an image."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of problem documents, for the `responses` of a route.

    Args:
        statuses: of HTTP.

    Returns:
        One response for each status.
    """
    content = {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}}
    return {status: {"description": _WHY[status], "content": content} for status in statuses}


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application: FastAPI's, with the problem documents and the ways to send a key.

    Args:
        app: the application; it keeps the document.

    Returns:
        The document.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            summary="Probabilistic image-text search",
        )
        described = Problem.model_json_schema(ref_template=_REF)
        document["components"]["schemas"] |= {**described.pop("$defs"), "Problem": described}
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{}, {"bearer": []}, {"header": []}]
        app.openapi_schema = document
    return app.openapi_schema


def page_of(document: dict[str, Any], address: str) -> str:
    """The document as a page: each route with its parameters, its body, its responses and a curl command.

    Args:
        document: of :func:`documented`.
        address: base URL of the service, for the curl commands.

    Returns:
        HTML without scripts and without external resources.
    """
    schemas = document["components"]["schemas"]
    routes = [
        {"method": method.upper(), "path": path, "curl": _curl(method, address + path, operation, schemas), **operation}
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return _template().render(document=document, routes=routes, schemas=schemas, type_of=_type, phrase=_phrase)


@cache
def _template() -> jinja2.Template:
    text = (Path(__file__).parent / "docs.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = _marked
    return environment.from_string(text)


def _marked(text: str | None) -> Markup:
    """A description as HTML; text between backticks becomes code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text or ""))))


def _phrase(status: str) -> str:
    return HTTPStatus(int(status)).phrase


def _curl(method: str, url: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    words = ["curl"] if method in ("get", "post") else ["curl", "-X", method.upper()]
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        (example, *_) = schemas[_type(content["application/json"]["schema"])]["examples"]
        words += ["--json", f"'{json.dumps(example, ensure_ascii=False)}'"]
    if "multipart/form-data" in content:
        words += ["-F image=@image.jpg"] + (["-F id=birds/red.jpg"] if "items" in url else [])
    where = url.replace("{id}", "birds/red.jpg")
    if any(parameter["name"] == "q" for parameter in operation.get("parameters", ())):
        return " ".join(["curl", "-G", "--data-urlencode", "'q=a red bird'", where])
    return " ".join([*words, where])


def _type(schema: dict[str, Any]) -> str:
    """A short name of the type of a value."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(repr(one) for one in schema["enum"])
    if "const" in schema:
        return repr(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "anything"))
