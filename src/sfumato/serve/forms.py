"""Bodies of requests, JSON and forms, as models; whatever is wrong with them is a refusal."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile

from sfumato.serve.schemas import Refusal, invalid
from sfumato.serve.service import Service

Model = TypeVar("Model", bound=BaseModel)
_AT_ONCE = 20_000
"""Bytes of JSON that are parsed without a thread."""
_PLAIN = 1_000_000
"""Bytes of JSON beside its images: a million small things take seconds to look at, a large image does not."""
_IMAGE = re.compile(rb'"image"\s*:\s*"[^"]*"')
_TOO_WRONG = 100


async def read_json(request: Request, model: type[Model], service: Service) -> Model:
    """The body as a model.

    Raises:
        Refusal: 413, 415 or 422.
    """
    _check_type(request, "application/json")
    body = await request.body()

    def parse() -> Model:
        if len(body) > _PLAIN:
            plain = len(body) - sum(image.end() - image.start() for image in _IMAGE.finditer(body))
            if plain > _PLAIN:
                raise Refusal(
                    413, f"The request has {plain} bytes beside its images, more than the limit of {_PLAIN}"
                )
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise _listed(error, "body") from None

    return parse() if len(body) <= _AT_ONCE else await service.in_thread(parse)


async def read_form(request: Request, model: type[Model], *, nested: Sequence[str] = ()) -> tuple[Model, str, bytes]:
    """A form with one file, `image`, and fields.

    Args:
        request: it.
        model: of the fields; of one with a field `image` that is filled with a placeholder.
        nested: fields that are JSON.

    Returns:
        (the fields, name of the file, its bytes).

    Raises:
        Refusal: 415 or 422.
    """
    _check_type(request, "multipart/form-data")
    try:
        form = await request.form(max_files=1, max_fields=200, max_part_size=65_536)
    except (
        Exception
    ) as error:  # The parser raises many things on what is no form, LookupError for a charset among them.
        raise Refusal(422, f"The form cannot be read: {getattr(error, 'detail', error)}") from error
    try:
        fields: dict[str, Any] = {}
        file: UploadFile | None = None
        errors: list[tuple[str, str]] = []
        repeated = {name for name, about in model.model_fields.items() if "list" in str(about.annotation)}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name == "image":
                    file = value
                else:
                    errors.append((f"form.{name}", "is a file; the file goes under image"))
            elif name in repeated:
                fields.setdefault(name, []).append(value)
            elif name in fields:
                errors.append((f"form.{name}", "is given twice"))
            elif name in nested:
                try:
                    fields[name] = json.loads(value)
                except (ValueError, RecursionError) as error:
                    errors.append((f"form.{name}", f"not JSON: {error}"))
            else:
                fields[name] = value
        if file is None:
            errors.append(("form.image", "is missing, or has no file name"))
        if errors:
            raise Refusal(422, f"The form is not valid: {errors[0][0]} {errors[0][1]}", errors=errors)
        assert file is not None
        if "image" in model.model_fields:
            fields["image"] = "file"
        try:
            return model.model_validate(fields), (file.filename or "image")[:200], await file.read()
        except ValidationError as error:
            raise _listed(error, "form") from None
    finally:
        await form.close()


def _listed(error: ValidationError, root: str) -> Refusal:
    if error.error_count() > _TOO_WRONG:  # To list them all would take longer than to find them.
        return Refusal(422, f"The request is not valid: {root}: wrong in {error.error_count()} places")
    return invalid(error.errors(include_url=False, include_context=False, include_input=False), root)


def _check_type(request: Request, wanted: str) -> None:
    came = request.headers.get("content-type", "")
    if came.partition(";")[0].strip().lower() != wanted:
        raise Refusal(415, f"Content-Type is {came[:100]!r}, expected {wanted}")
