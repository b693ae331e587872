"""The HTTP routes of the service, with the limits on request bodies, and the pages that document them."""

import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi import Path as PathParameter
from fastapi import Query as Parameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute, Mount, Route

from sfumato import __version__
from sfumato.charts import render_page
from sfumato.errors import UserError
from sfumato.serve import schemas
from sfumato.serve.decoding import Unavailable
from sfumato.serve.guard import RIGHTS, Guard
from sfumato.serve.judging import WEB, JudgementsRequest, JudgementsResponse, JudgementsSummary, Judging
from sfumato.serve.monitoring import TEXT
from sfumato.serve.problems import CODES, COMMON, IMAGE, INTRODUCTION, Refusal, busy, documented, invalid, problems
from sfumato.serve.searching import Asked, asked_by, asked_text
from sfumato.serve.service import Service
from sfumato.serve.settings import GalleryName, Settings, Sources
from sfumato.serve.writing import Writer

JSON = "application/json"

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
                found = f"{plain} bytes beside its images, more than the limit of {_MOST_PLAIN}"
                raise Refusal(413, f"The request has {found}; send fewer queries or items at a time")
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

        async def checked(request: Request) -> Response:
            request = _CheckedRequest(request.scope, request.receive)
            came = request.headers.get("content-type", "")
            if came.partition(";")[0].strip().lower() != JSON:
                raise Refusal(415, f"Content-Type is {came[:100]!r}, expected {JSON}")
            return await handler(request)

        return checked


PAGE = Path(__file__).parent / "page"

_LOG = logging.getLogger("sfumato.serve")

_READS = problems(404, 422, 503, 504)
"""What a request that reads may be refused for."""

_LOOKS = {**_READS, **problems(416), **IMAGE}

_ORIGINAL = (
    "the file of an indexed folder as it is, also HEIC, RAW or a video, with its metadata and position, whatever"
    " `size`; the image where there is no such file, or the service gives out none (`--no-metadata`)"
)

_ItemGallery = Annotated[GalleryName, Parameter(description="gallery of the item")]
_Id = Annotated[str, PathParameter(description="id of the item; percent-encoded, but for its slashes")]


def create_app(sources: Sources, settings: Settings = Settings()) -> FastAPI:
    """The service as an ASGI application."""
    service = Service(sources, settings)
    writer = Writer(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        service.ready.clear()
        await writer.close()
        await service.stop()

    app = FastAPI(
        generate_unique_id_function=lambda route: route.name,
        title="sfumato",
        summary="Probabilistic image-text search",
        version=__version__,
        description=INTRODUCTION,
        responses=problems(*COMMON),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = CheckedRoute
    app.state.service, app.state.writer = service, writer
    _handle_errors(app)
    _add_pages(app, service)
    _add_searches(app, service)
    _add_views(app, service)
    _add_writes(app, service, writer)
    _add_judgements(app, Judging(service))

    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=6)
    leaving = partial(getattr, service, "draining")
    app.add_middleware(Guard, settings=settings, metrics=service.metrics, route=partial(route_of, app), leaving=leaving)
    app.openapi = lambda: documented(app)  # type: ignore[method-assign]
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(UserError)
    async def unreachable(request: Request, error: UserError) -> Response:
        _LOG.error("the store failed: %s", error)
        reason = "The store cannot be searched now; the log of the service has the reason"
        return busy(reason, 5, code="store-failed").response()

    @app.exception_handler(Unavailable)
    async def unavailable(request: Request, error: Unavailable) -> Response:
        return busy(str(error), error.seconds, code=error.code).response()

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        if isinstance(error, Refusal):
            return error.response()
        details = {
            404: "There is nothing under this path; GET /docs lists the paths",
            405: f"{request.method} is not allowed for this path; GET /docs lists the methods",
        }
        detail = details.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            methods = set[str]().union(*map(_taken, _routes(app, request.url.path)))
            headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        code = "no-such-path" if error.status_code == 404 else None
        return Refusal(error.status_code, detail, headers=headers, code=code).response()


def route_of(app: FastAPI, method: str, path: str) -> str:
    """The template of the route of a request, which holds no id; that of its path if none has its method, or "none"."""
    routes = list(_routes(app, path))
    own = [route for route in routes if ("GET" if method == "HEAD" else method) in _taken(route)]
    return next((str(getattr(route, "path", "")) for route in own + routes), "none")


def _routes(app: FastAPI, path: str) -> Iterator[BaseRoute]:
    """The routes of a path."""
    return (route for route in app.routes if isinstance(route, Route | Mount) and route.path_regex.match(path))


def _taken(route: BaseRoute) -> set[str]:
    """The methods that a route takes; files have no list of methods."""
    return getattr(route, "methods", None) or {"GET"}


class _Assets(StaticFiles):
    """Files of the page. A browser keeps them and asks each time whether they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See :meth:`starlette.staticfiles.StaticFiles.file_response`."""
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _add_pages(app: FastAPI, service: Service) -> None:
    assets = _Assets(directory=PAGE)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await assets.get_response("index.html", request.scope)

    def docs(request: Request) -> Response:
        return HTMLResponse(render_page("interface.html.j2", {"document": app.openapi(), "codes": CODES}))

    app.add_route("/docs", docs, include_in_schema=False)
    app.mount("/page", assets, name="page")

    @app.get("/healthz", response_model=schemas.State, tags=["state"])
    async def get_health() -> Response:
        """Whether the process is alive. Needs no key."""
        return _json(schemas.State(status="alive"))

    @app.get("/readyz", response_model=schemas.State, tags=["state"], responses=problems(503))
    async def get_readiness() -> Response:
        """Whether the service answers searches: 503 during warm-up and shutdown, and while a store does not answer.

        Needs no key.
        """
        if not service.ready.is_set():
            why = "warming up failed; the log of the service has the reason" if service.failed else ""
            raise busy(f"Not ready: {why or 'warming up, or shutting down'}", code="not-ready")
        if problem := service.store_problem:
            raise busy(f"Not ready: {problem}", code="not-ready")
        return _json(schemas.State(status="ready"))

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Counters for Prometheus."""
        return Response(await service.measured(), media_type=TEXT)

    @app.get("/v1/info", response_model=schemas.Info, tags=["state"])
    async def get_info(request: Request) -> Response:
        """The galleries, what you may do, the guarantees that the calibration can give, and the limits."""
        return _json(await service.info(request.scope[RIGHTS]))


def _add_searches(app: FastAPI, service: Service) -> None:
    refusals = problems(404, 413, 415, 422, 503, 504)

    @app.get("/v1/search", response_model=schemas.SearchResponse, tags=["search"], responses=_READS)
    async def search_by_text(parameters: Annotated[schemas.TextSearch, Parameter()]) -> Response:
        """Search by one text."""
        asked = asked_text(parameters.q, parameters.also, parameters.without, "query.q")
        return await _answers(service, [asked], parameters)

    @app.post("/v1/search", response_model=schemas.SearchResponse, tags=["search"], responses=refusals)
    async def search(wanted: schemas.SearchRequest) -> Response:
        """Search by texts, images, ids of stored items and vectors, also mixed. A search by id also finds the item."""

        def read() -> list[Asked]:
            return [asked_by(query, i) for i, query in enumerate(wanted.queries)]

        slow = any(query.image or query.vector for query in wanted.queries)
        asked = await service.threads.run(read) if slow else read()
        return await _answers(service, asked, wanted)


def _add_views(app: FastAPI, service: Service) -> None:
    @app.get("/v1/items", response_model=schemas.ItemList, tags=["items"], responses=_READS)
    async def list_items(
        gallery: Annotated[GalleryName, Parameter(description="gallery to list")] = "images",
        cursor: Annotated[
            str | None,
            Parameter(max_length=100_000, description="`next_cursor` of the items before; left out to begin"),
        ] = None,
        limit: Annotated[int, Parameter(ge=1, le=1000, description="items at most")] = 100,
    ) -> Response:
        """Items in the order of their ids, some at a time."""
        return _json(await service.items(gallery, cursor, limit))

    @app.get("/v1/items/{id:path}", response_model=schemas.Item, tags=["items"], responses=_READS)
    async def get_item(id: _Id, gallery: _ItemGallery = "images") -> Response:
        """One item, by its id. Ids may hold slashes."""
        return _json(await service.item(id, gallery))

    @app.get("/v1/pictures/{id:path}", response_class=Response, tags=["look"], responses=_LOOKS)
    async def get_picture(
        request: Request,
        id: _Id,
        size: Annotated[int | None, Parameter(ge=16, le=2048, description="longest side of a smaller copy")] = None,
        original: Annotated[bool, Parameter(description=_ORIGINAL)] = False,
    ) -> Response:
        """The image of an item, as stored or smaller."""
        if original and (file := await service.file(id)) is not None:
            return await _file(file, request.headers, service)
        data, kind = await service.image(id, size)
        tag = f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'
        # In a collection an image can be replaced, so browsers must revalidate.
        lasting = "no-cache" if service.sources.gallery("images").writable else "max-age=604800"
        headers = {"ETag": tag, "Cache-Control": f"private, {lasting}"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=kind)


async def _file(path: Path, asked: Headers, service: Service) -> Response:
    """A file for a browser, which runs nothing that lies in it; or a part of it."""
    kind = guess_type(path.name)[0] or ""
    shown = kind.startswith(("image/", "video/")) and "svg" not in kind
    about = await service.threads.run(path.stat)
    response = FileResponse(
        path,
        stat_result=about,
        media_type=kind if shown else "application/octet-stream",
        filename=path.name,
        content_disposition_type="inline",
        headers={"Cache-Control": "private, no-cache"},
    )
    tag, size = response.headers["etag"], about.st_size
    if tag in asked.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag, "Cache-Control": "private, no-cache"})
    parts = asked.get("range") if asked.get("if-range", tag) in (tag, response.headers["last-modified"]) else None
    if parts is not None and not _has(size, parts):
        detail = f"Range is {parts!r}, and the file has {size} bytes; expected parts of it, e.g. bytes=0-99"
        raise Refusal(416, detail, headers={"Content-Range": f"bytes */{size}"})
    return response


_PART = re.compile(r"\s*(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))\s*")


def _has(size: int, parts: str) -> bool:
    """Whether a file of a size has all parts of a Range header; Starlette's own refusals are no problem documents."""
    unit, _, given = parts.partition("=")
    found = [_PART.fullmatch(one) for one in given.split(",")]
    spans = [(int(one[1] or max(0, size - int(one[3] or 0))), one[2]) for one in found if one]
    within = all(start < size and start <= int(last or start) for start, last in spans)
    return unit.strip().lower() == "bytes" and all(found) and within


CREATED: dict[int | str, dict[str, Any]] = {
    201: {
        "description": "at least one of the items is new; for a request with a single item, Location is its path",
        "model": schemas.AddResponse,
        "headers": {"Location": {"description": "path of the new item", "schema": {"type": "string"}}},
    }
}


def _add_writes(app: FastAPI, service: Service, writer: Writer) -> None:
    writes: dict[str, Any] = {"tags": ["items"], "responses": problems(404, 409, 413, 415, 422, 503, 504)}
    adds: dict[str, Any] = {**writes, "responses": {**writes["responses"], **CREATED}}

    @app.post("/v1/items", response_model=schemas.AddResponse, **adds)
    async def add_items(wanted: schemas.AddRequest) -> Response:
        """Add items, or replace those with the same ids. All are checked before one is stored.

        The status is 201 if at least one item is new, and 200 if all existed.
        """
        done = await writer.add(wanted)
        response = _json(done)
        if done.created:
            response.status_code = 201
            if len(wanted.items) == 1:
                gallery = "" if done.gallery == "images" else f"?gallery={done.gallery}"
                response.headers["Location"] = f"/v1/items/{quote(wanted.items[0].id)}{gallery}"
        return response

    @app.post("/v1/items/delete", response_model=schemas.DeleteResponse, **writes)
    async def delete_items(wanted: schemas.DeleteRequest) -> Response:
        """Remove items; unknown ids are skipped."""
        return _json(await writer.delete(wanted.gallery, wanted.ids))


def _add_judgements(app: FastAPI, judging: Judging) -> None:
    tagged: dict[str, Any] = {"tags": ["judgements"], "responses": problems(404, 409, 422, 503, 504)}

    @app.get("/v1/judgements", response_model=JudgementsSummary, **tagged)
    async def get_judgements(
        format: Annotated[
            Literal["summary", "qrels"], Parameter(description="qrels: all verdicts as TREC qrels, in plain text")
        ] = "summary",
        query: Annotated[str | None, Parameter(max_length=2000, description="text whose verdicts to list")] = None,
        judge: Annotated[str, Parameter(max_length=100, description="whose verdicts to list")] = WEB,
        figures: Annotated[bool, Parameter(description="whether to compute the figures; else they are null")] = True,
    ) -> Response:
        """What people's verdicts say about the hits, and those of a judge on one query."""
        if format == "qrels":
            return PlainTextResponse(await judging.qrels())
        return _json(await judging.summary(query, judge, measured=figures))

    tagged = {**tagged, "responses": problems(404, 409, 413, 415, 422, 503, 504)}

    @app.post("/v1/judgements", response_model=JudgementsResponse, **tagged)
    async def post_judgements(wanted: JudgementsRequest) -> Response:
        """Keep people's verdicts on hits, all or none, or take some back. The response confirms the write.

        With `use` all verdicts refine the probabilities.
        """
        return _json(await judging.keep(wanted))


_MANY_RESULTS = 200


async def _answers(service: Service, asked: Sequence[Asked], options: schemas.SearchFields) -> Response:
    """The response of a search; a large one is written in a thread, so that nobody waits for it."""
    found = await service.searches.search(asked, options)
    large = len(asked) * options.max_results > _MANY_RESULTS or options.coverage is not None
    return await service.threads.run(_json, found) if large else _json(found)


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type=JSON)
