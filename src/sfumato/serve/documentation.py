"""The OpenAPI document, complete with problems, and a page made from it here: without scripts, without anything from elsewhere."""

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
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sfumato.serve.schemas import PROBLEM, AddRequest, DeleteRequest, NewItem, Problem, SearchParameters, SearchRequest

INTRODUCTION = (
    "Search among images and texts with match probabilities. Every error is a problem document (RFC 9457). Where the service has a key,"
    " send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`."
)
_REF = "#/components/schemas/{model}"
_WHY = {
    400: "called by a name that is not its own, or not HTTP",
    401: "no key, or a wrong one",
    403: "sent by a page of another web site",
    404: "no such gallery, item or image",
    408: "the request took too long to arrive",
    409: "the gallery is read-only",
    413: "larger than the limit",
    415: "another content type than expected",
    422: "not valid; `errors` says what and where",
    500: "a mistake of the service; its log knows more under the number in `detail`",
    503: "too much to do, not ready, or the store cannot be reached; see Retry-After",
    504: "not answered in time",
}
_EXAMPLES: dict[str, Any] = {
    "SearchRequest": {"queries": [{"text": "a red bird"}], "max_results": 5},
    "AddRequest": {"gallery": "texts", "items": [{"id": "caption-1", "text": "a red bird"}]},
    "DeleteRequest": {"gallery": "images", "ids": ["birds/red.jpg"]},
}
_QUERY = {"q": "a red bird"}


def route_extras(
    *statuses: int,
    body: type[BaseModel] | None = None,
    form: type[BaseModel] | None = None,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a route's decorator says for the document.

    Args:
        statuses: of the problems that are particular to it.
        body: what it reads as JSON.
        form: the fields that it reads beside a file.
        content: of the answer, if it is no JSON.
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": _WHY[status], "content": {PROBLEM: {"schema": {"$ref": _REF.format(model="Problem")}}}}
        for status in sorted({400, 401, 403, 408, 413, 500, 503, *statuses})
    }
    if content is not None:
        responses[200] = {"description": "an image", "content": content}
        responses[304] = {"description": "the one that you have is still right"}
    extra: dict[str, Any] = {}
    if body is not None:
        media = {"schema": {"$ref": _REF.format(model=body.__name__)}, "example": _EXAMPLES[body.__name__]}
        extra = {"requestBody": {"required": True, "content": {"application/json": media}}}
    if form is not None:
        described = form.model_json_schema(ref_template=_REF)
        fields = {name: value for name, value in described["properties"].items() if name not in ("image", "text")}
        fields["image"] = {"type": "string", "format": "binary", "description": "the image file"}
        required = sorted({"image", *described.get("required", ())})
        schema: dict[str, Any] = {
            "type": "object",
            "properties": fields,
            "required": required,
            "additionalProperties": False,
        }
        media = {
            "schema": schema,
            "encoding": {"payload": {"contentType": "application/json"}} if form is NewItem else {},
        }
        extra = {"requestBody": {"required": True, "content": {"multipart/form-data": media}}}
    return {"responses": responses, "openapi_extra": extra or None}


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            summary="Probabilistic image-text search",
        )
        read: list[type[BaseModel]] = [SearchRequest, SearchParameters, AddRequest, DeleteRequest, Problem]
        _, described = models_json_schema([(model, "validation") for model in read], ref_template=_REF)
        schemas = document["components"]["schemas"]
        schemas |= {name: schema for name, schema in described["$defs"].items() if name not in schemas}
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for path in document["paths"].values():
            for operation in path.values():
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] in _QUERY:
                        parameter["example"] = _QUERY[parameter["name"]]
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{}, {"bearer": []}, {"header": []}]
        app.openapi_schema = document
    return app.openapi_schema


def page_of(document: dict[str, Any], address: str) -> str:
    """The document for people: each route with its parameters, its body, its answers and a line for curl to this address."""
    routes = [
        {"method": method.upper(), "path": path, "curl": _curl(method, address + path, operation), **operation}
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return _template().render(
        document=document, routes=routes, schemas=document["components"]["schemas"], type_of=_type, phrase=_phrase
    )


@cache
def _template() -> jinja2.Template:
    text = (Path(__file__).parent / "docs.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = _marked
    return environment.from_string(text)


def _marked(text: str | None) -> Markup:
    """A description, what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text or ""))))


def _phrase(status: str) -> str:
    return HTTPStatus(int(status)).phrase


def _curl(method: str, url: str, operation: dict[str, Any]) -> str:
    words = ["curl"] if method in ("get", "post") else ["curl", "-X", method.upper()]
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        example = json.dumps(content["application/json"]["example"], ensure_ascii=False)
        words += ["--json", f"'{example}'"]
    if "multipart/form-data" in content:
        words += ["-F image=@image.jpg"] + (["-F id=birds/red.jpg"] if "items" in url else [])
    where = url.replace("{id}", "birds/red.jpg")
    if any(parameter["name"] == "q" for parameter in operation.get("parameters", ())):
        return " ".join(["curl", "-G", "--data-urlencode", "'q=a red bird'", where])
    return " ".join([*words, where])


def _type(schema: dict[str, Any]) -> str:
    """Of a value, in a word or two."""
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
