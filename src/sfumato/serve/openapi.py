"""The OpenAPI document of the service, and what it says of responses."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sfumato.serve.problems import CODES, PROBLEM, Problem
from sfumato.serve.schemas import AddResponse, QueryKinds

INTRODUCTION = (
    "Search among images and texts with match probabilities. Every error is a problem document (RFC 9457) with a"
    " `code`. Every path that takes GET takes HEAD. Where the service has keys, send one as"
    " `Authorization: Bearer KEY` or `X-API-Key: KEY`.\n\n| code | status | what happened |\n| --- | --- | --- |\n"
    + "".join(f"| `{code}` | {status} | {text} |\n" for code, (status, text) in CODES.items())
)


_REF = "#/components/schemas/{model}"


COMMON = (400, 401, 403, 408, 413, 500, 503)
"""Statuses of problems that every route may return."""


IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "an image", "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "the image has not changed since the request named by If-None-Match"},
}
"""Responses of a route that returns an image."""


CREATED: dict[int | str, dict[str, Any]] = {
    201: {
        "description": "at least one of the items is new; for a request with a single item, Location is its path",
        "model": AddResponse,
        "headers": {"Location": {"description": "path of the new item", "schema": {"type": "string"}}},
    }
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of problem documents, for the `responses` of a route."""
    content = {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}}
    return {status: {"description": _why(status), "content": content} for status in statuses}


def _why(status: int) -> str:
    """The problems of a status."""
    return "; ".join(f"`{code}`: {text}" for code, (of, text) in CODES.items() if of == status)


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application: FastAPI's, with the problem documents and the ways to send a key."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            summary="Probabilistic image-text search",
        )
        described = Problem.model_json_schema(ref_template=_REF, mode="serialization")
        document["components"]["schemas"] |= {**described.pop("$defs"), "Problem": described}
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{}, {"bearer": []}, {"header": []}]
        _fit_example(document, app.state.service.queries.kinds())
        _type_values(document["components"]["schemas"])
        app.openapi_schema = document
    return app.openapi_schema


def _type_values(schema: Any) -> None:
    """Write `patternProperties`, which let other keys pass and generators of clients ignore, as types of all values."""
    if isinstance(schema, dict):
        for pattern, values in schema.pop("patternProperties", {}).items():
            schema["additionalProperties"] = values
            schema["propertyNames"] = {**schema.get("propertyNames", {}), "pattern": pattern}
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        _type_values(inner)


def _fit_example(document: dict[str, Any], kinds: QueryKinds) -> None:
    """Give a search of a model without texts an example of a vector of the right length, so that it works."""
    schema = document["components"]["schemas"]["SearchRequest"]
    for modality, length in list(kinds.vector.items())[: not kinds.text]:
        (example,) = schema["examples"]
        schema["examples"] = [{**example, "queries": [{"vector": [0.1] * length, "modality": modality}]}]
