"""Limits on request bodies before FastAPI validates them. What cannot be parsed becomes a refusal (RFC 9457)."""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import params
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sfumato.serve.schemas import Refusal

JSON, FORM = "application/json", "multipart/form-data"
_MOST_PLAIN = 1_000_000
"""Largest JSON without its images, in bytes: a million small values take seconds to validate, an image does not."""
_IMAGE = re.compile(rb'"image"\s*:\s*"[^"]*"')


class _CheckedRequest(Request):
    """A request whose JSON is parsed by pydantic, which bounds depth and numbers."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > _MOST_PLAIN:
            plain = len(body) - sum(image.end() - image.start() for image in _IMAGE.finditer(body))
            if plain > _MOST_PLAIN:
                raise Refusal(
                    413, f"The request has {plain} bytes beside its images, more than the limit of {_MOST_PLAIN}"
                )
        try:
            return from_json(body)
        except ValueError as error:
            raise Refusal(422, f"The request is not valid: body: {error}", errors=[("body", str(error))]) from None


class CheckedRoute(APIRoute):
    """A route that checks the content type and the size of a body before FastAPI reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See :meth:`fastapi.routing.APIRoute.get_route_handler`."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        wanted = FORM if isinstance(self.body_field.field_info, params.Form) else JSON

        async def checked(request: Request) -> Response:
            request = _CheckedRequest(request.scope, request.receive)
            came = request.headers.get("content-type", "")
            if came.partition(";")[0].strip().lower() != wanted:
                raise Refusal(415, f"Content-Type is {came[:100]!r}, expected {wanted}")
            if wanted == FORM:
                try:  # FastAPI takes the form that is parsed here.
                    await request.form(max_files=1, max_fields=200, max_part_size=65_536)
                except (HTTPException, LookupError, ValueError) as error:
                    raise Refusal(422, f"The form cannot be read: {getattr(error, 'detail', error)}") from error
            return await handler(request)

        return checked
