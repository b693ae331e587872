"""Every operation of the service by the generated Python client.

Arguments: the URL of a collection, its key, and the URL of a service that is searched by vector.
"""

import base64
import sys
from io import BytesIO
from typing import TypeVar

from PIL import Image
from sfumato_client import AuthenticatedClient, Client
from sfumato_client.api.items import add_items, delete_items, get_item, list_items
from sfumato_client.api.judgements import get_judgements, post_judgements
from sfumato_client.api.look import get_picture
from sfumato_client.api.search import search, search_by_text
from sfumato_client.api.state import get_health, get_info, get_metrics, get_readiness
from sfumato_client.models import (
    AddRequest,
    AddResponse,
    DeleteRequest,
    DeleteResponse,
    Info,
    Item,
    ItemFilter,
    ItemFilterRanges,
    ItemFilterWhere,
    ItemList,
    JudgementsRequest,
    JudgementsResponse,
    JudgementsSummary,
    JudgementsUsed,
    NewItem,
    NewItemPayload,
    NewJudgement,
    Problem,
    Query,
    SearchRequest,
    SearchResponse,
    State,
)
from sfumato_client.types import File

T = TypeVar("T")

URL, KEY, VECTORS = sys.argv[1:]
client = AuthenticatedClient(base_url=URL, token=KEY)
stranger = Client(base_url=URL)


def of(kind: type[T], answer: object) -> T:
    """The answer, which is of a kind."""
    assert isinstance(answer, kind), answer
    return answer


def png() -> bytes:
    file = BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "PNG")
    return file.getvalue()


def in_base64() -> str:
    return base64.b64encode(png()).decode()


def state() -> None:
    assert of(State, get_health.sync(client=stranger)).status == "alive"
    assert of(State, get_readiness.sync(client=stranger)).status == "ready"
    info = of(Info, get_info.sync(client=client))
    images = info.galleries["images"]
    assert info.rights == "write" and info.judgements and images.writable and images.n == 24
    assert info.query_kinds.text and info.query_kinds.vector.to_dict() == {}
    assert "sfumato_requests_total" in of(str, get_metrics.sync(client=client))


def searches() -> None:
    told = search_by_text.sync(client=client, q="a red square", max_results=3, where=["captions>=a"])
    (answer,) = of(SearchResponse, told).answers
    assert answer.kind == "text" and answer.target == "fits" and answer.calibrated and len(answer.hits) == 3
    assert answer.verdict is not None and answer.conformal_set is None and answer.hits[0].rank == 1
    hit = answer.hits[0]
    assert hit.match_probability is not None and hit.picture is not None and hit.duplicates == []
    where, ranges = ItemFilterWhere(), ItemFilterRanges()
    where["captions"], ranges["captions"] = ["a plain red square"], ["a", "b"]
    body = SearchRequest(
        queries=[Query(text="a red square", without=["blue"]), Query(id=hit.id), Query(image=in_base64())],
        filter_=ItemFilter(where=where, ranges=ranges),
    )
    some = of(SearchResponse, search.sync(client=client, body=body)).answers
    assert [one.kind for one in some] == ["text", "id", "image"] and some[1].hits[0].match_probability is None
    vectors = SearchRequest(queries=[Query(vector=[0.5] * 5)], max_results=4)
    (answer,) = of(SearchResponse, search.sync(client=Client(base_url=VECTORS), body=vectors)).answers
    assert answer.calibrated and len(answer.hits) == 4


def items() -> None:
    payload = NewItemPayload.from_dict({"place": "wood"})
    new = AddRequest(items=[NewItem(id="a/b c.png", image=in_base64(), payload=payload)])
    first, again = (add_items.sync_detailed(client=client, body=new) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200) and of(AddResponse, first.parsed).created == 1
    more = AddRequest(items=[NewItem(id=id, image=in_base64()) for id in ("c.png", "d.png")])
    assert of(AddResponse, add_items.sync(client=client, body=more)).n == 27
    assert of(Item, get_item.sync("a/b c.png", client=client)).payload.to_dict() == {"place": "wood"}
    small = of(File, get_picture.sync("a/b c.png", client=client, size=16))
    with Image.open(small.payload) as shown:
        assert shown.size == (16, 12)
    found: list[str] = []
    cursor: str | None = None
    while page := of(ItemList, list_items.sync(client=client, cursor=cursor, limit=10)):
        found += [item.id for item in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert len(found) == 27 and found == sorted(found)
    rest = DeleteRequest(ids=["a/b c.png", "c.png", "d.png", "never.png"])
    assert of(DeleteResponse, delete_items.sync(client=client, body=rest)).deleted == 3


def judgements() -> None:
    given = [
        NewJudgement(query=f"a {c} square", id="00.png", yes=c == "red", probability=0.5)
        for c in ("red", "blue", "pink", "green", "black")
    ]
    body = JudgementsRequest(judge="ann", judgements=given)
    assert of(JudgementsResponse, post_judgements.sync(client=client, body=body)).kept == 5
    summary = of(JudgementsSummary, get_judgements.sync(client=client, query="a red square", judge="ann"))
    assert summary.queries == 5 and summary.given["00.png"] and summary.precision is not None
    used = of(JudgementsResponse, post_judgements.sync(client=client, body=JudgementsRequest(use=True))).used
    assert of(JudgementsUsed, used).n == 5
    back = JudgementsRequest(judge="ann", judgements=[NewJudgement(query="a red square", id="00.png", yes=None)])
    assert of(JudgementsResponse, post_judgements.sync(client=client, body=back)).removed == 1


def problems() -> None:
    refused = {
        "no-key": get_info.sync(client=stranger),
        "not-found": get_item.sync("never", client=client),
        "invalid": search.sync(client=client, body=SearchRequest(queries=[])),
        "index": delete_items.sync(client=Client(base_url=VECTORS), body=DeleteRequest(ids=["photo-1"])),
    }
    for code, answer in refused.items():
        told = of(Problem, answer)
        assert told.code == code and told.detail and told.title
    assert of(Problem, refused["invalid"]).errors[0].where == "body.queries"


for part in (state, searches, items, judgements, problems):
    part()
