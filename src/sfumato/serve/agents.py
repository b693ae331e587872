"""A collection as tools of agents by the Model Context Protocol: search, show, facets, status. Nothing is written."""

import base64
import binascii
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from sfumato import __version__
from sfumato.data.images import handed_out, thumbnail
from sfumato.errors import UserError, need
from sfumato.search.answer import Hit
from sfumato.search.searcher import Searcher

with need("mcp", "sfumato mcp needs the SDK of the Model Context Protocol"):
    from mcp.server.mcpserver import Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

MOST_RESULTS, MOST_IMAGE = 50, 20_000_000
"""Largest number of results, and of bytes of an image to search by."""

_SIDE, _BYTES = 768, 150_000
"""Longer side of a shown image in pixels, and its size."""

_SAMPLED, _VALUES = 5_000, 30
"""Items whose fields are counted, and values of a field that are told."""

_INSTRUCTIONS = (
    "A collection of images or texts that says how sure it is. Search first, and read the verdict. match_probability"
    " is that a person would call the hit right; on images of an unusual kind it can be far off. If nothing here shows"
    " what you ask for, other words seldom help: say so and stop. If there are many matches, more words or `where`"
    " narrow the search. null is no probability: then only the order means something."
)

_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


class Tools:
    """The tools over an opened collection."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher

    def search(
        self,
        text: str = "",
        image: str = "",
        k: int = 10,
        where: list[str] | str | None = None,
        without: list[str] | str | None = None,
    ) -> dict[str, Any]:
        """Search by a text, or by an image file in base64; one of both.

        `where` are conditions such as "folder=beach" or "date>=2024-06" (facets tells the fields); `without` are texts
        that a hit should not fit. The answer is that of `sfumato search --json`: a verdict in words, expected_matches,
        nothing_probability, for a sentence the multiplicity (how many of COCO's 123,287 photographs people would find),
        and hits, best first, each with its id, match_probability, best_text and what else is known of it.
        """
        if bool(text) == bool(image):
            raise UserError("give either text or image")
        if not 1 <= k <= MOST_RESULTS:
            raise UserError(f"k must be between 1 and {MOST_RESULTS}, got {k}")
        if image and without:
            raise UserError("without stands beside a text")
        query = text or _decoded(image)
        answer = self._searcher.search(query, k, where=_listed(where), without=_listed(without), duplicates="fold")
        return answer.to_json() | {"verdict": answer.sentence}

    def show(self, id: str) -> list[Any]:
        """Show an item by its id: what is known of it, and its image, at most 768 pixels wide and high."""
        found = self._searcher.gallery.get([id])
        if not found.ids:
            raise UserError(f"there is no item {id!r}; ids are those that search returns")
        source = self._searcher.image_of(Hit(id, 1, 0, 0, 0, dict(found.payloads[0])))
        small = None if source is None else thumbnail(source, _SIDE, _BYTES)
        return [handed_out(found.payloads[0]), *([] if small is None else [Image(data=small, format="webp")])]

    def facets(self, field: str = "") -> dict[str, Any]:
        """The fields that `where` can ask for, or the values of one, with numbers among at most 5,000 sampled items."""
        payloads = [handed_out(one) for one in self._searcher.gallery.sample(_SAMPLED).payloads]
        if not field:
            return {"sampled": len(payloads), "fields": dict(Counter(name for one in payloads for name in one))}
        values = Counter(one[field] for one in payloads if field in one)
        if not values:
            raise UserError(f"no item has a field {field!r}; facets without a field lists them")
        return {"sampled": len(payloads), "values": dict(values.most_common(_VALUES)), "n_values": len(values)}

    def status(self) -> dict[str, Any]:
        """What the collection holds, and whether its results have probabilities."""
        held = self._searcher.gallery
        return {"holds": held.contents, "items": held.size, "calibrated": held.calibrated, "note": held.note}


def _listed(given: list[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []


def _decoded(image: str) -> bytes:
    try:
        data = base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError("image is not base64; give the file of an image in base64") from error
    if len(data) > MOST_IMAGE:
        raise UserError(f"the image has {len(data):,} bytes; give one of at most {MOST_IMAGE:,}")
    return data


def _told(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The same tool; the agent reads what it did wrong."""

    @functools.wraps(tool)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return tool(*arguments, **options)
        except (UserError, ValueError) as error:
            raise ToolError(str(error)) from error

    return call


def make_server(searcher: Searcher) -> MCPServer:
    """The server of a collection."""
    server = MCPServer("sfumato", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")
    tools = Tools(searcher)
    for tool in (tools.search, tools.show, tools.facets, tools.status):
        described, shows = inspect.getdoc(tool), tool == tools.show
        server.add_tool(_told(tool), description=described, annotations=_READS, structured_output=not shows)
    return server
